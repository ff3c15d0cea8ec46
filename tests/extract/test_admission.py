"""Order and budget of admission."""

from __future__ import annotations

import threading
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.extract.admission import Budget, Feed, RowSource, in_windows, window_size
from headrace.types import Row

from .conftest import make_rows


@given(count=st.integers(0, 300), window=st.integers(1, 80), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_windows_keep_every_row_once(count: int, window: int, seed: int) -> None:
    rows = [Row.make([i, i + 1], [False, True]) for i in range(count)]
    out = [row.key for row in in_windows(rows, window, seed)]
    assert sorted(out) == sorted(row.key for row in rows)


def test_longest_first_inside_a_window_and_mixed_between_windows() -> None:
    rows = sorted(make_rows(1600, low=4, high=400), key=len)  # the worst case: data sorted by length
    out = [len(row) for row in in_windows(rows, 100, seed=1)]
    windows = [out[i : i + 100] for i in range(0, len(out), 100)]
    assert all(window == sorted(window, reverse=True) for window in windows)
    # Sorted input would give first windows of only short rows; the pool of four windows spreads them.
    spread = [max(window) - min(window) for window in windows]
    assert np.median(spread) > 80


def test_order_is_reproducible_and_moves_with_the_seed() -> None:
    rows = make_rows(300)
    first, again, other = ([r.key for r in in_windows(rows, 64, seed)] for seed in (3, 3, 4))
    assert first == again != other


def test_window_size_is_a_small_share_of_the_data() -> None:
    assert [window_size(n) for n in (10, 37312, 1_000_000)] == [64, 186, 1024]


def test_budget_holds_and_frees() -> None:
    budget = Budget(100)
    assert budget.take(60) and not budget.take(41) and budget.take(40)
    budget.give(60)
    assert budget.take(60) and budget.used == 100


def test_a_row_larger_than_the_budget_passes_alone() -> None:
    budget = Budget(10)
    assert budget.take(50)
    assert not budget.take(1)
    budget.give(50)
    assert budget.take(1)
    assert not budget.take(50)


def feed_of(rows: list[Row], budget: Budget, taken: list[str]) -> tuple[RowSource, Feed]:
    source = RowSource(rows)
    return source, Feed(source, budget, lambda row: True, lambda row: taken.append(row.key))


def test_feed_blocks_on_the_budget_until_something_is_written() -> None:
    rows = [Row.make([i] * 10, [True] * 10) for i in range(3)]
    budget, taken = Budget(20), []  # type: ignore[var-annotated]
    _, feed = feed_of(rows, budget, taken)
    assert [next(feed).key, next(feed).key] == [rows[0].key, rows[1].key]
    got: list[Row] = []
    thread = threading.Thread(target=lambda: got.append(next(feed)))
    thread.start()
    time.sleep(0.3)
    assert not got
    budget.give(10)
    thread.join(5)
    assert [row.key for row in got] == [rows[2].key]
    assert next(feed, None) is None


def test_a_closed_feed_gives_nothing_and_loses_nothing() -> None:
    """An abandoned engine thread that still pulls must not swallow a row that a new engine has to get."""
    rows = [Row.make([i, i], [True, True]) for i in range(4)]
    taken: list[str] = []
    budget = Budget(2)
    source, feed = feed_of(rows, budget, taken)
    assert next(feed).key == rows[0].key
    zombie: list[Row | None] = []
    thread = threading.Thread(target=lambda: zombie.append(next(feed, None)))
    thread.start()  # blocks: the budget is used up
    time.sleep(0.1)
    feed.close()
    budget.give(2)
    thread.join(5)
    assert zombie == [None]
    fresh = Feed(source, Budget(100), lambda row: True, lambda row: None)
    assert [row.key for row in fresh] == [row.key for row in rows[1:]]


def test_feed_waits_while_the_disk_is_full_and_keeps_no_budget_for_it() -> None:
    gate = threading.Event()
    rows = [Row.make([1, 2], [True, True])]
    budget = Budget(10)
    feed = Feed(RowSource(rows), budget, lambda row: gate.is_set(), lambda row: None)
    got: list[Row] = []
    thread = threading.Thread(target=lambda: got.extend(feed))
    thread.start()
    time.sleep(0.5)
    assert not got and budget.used == 0
    gate.set()
    thread.join(5)
    assert len(got) == 1 and budget.used == 2
