"""The feed pulls no more than it has room for, never stops results, and ends in every way a supply of rows can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.engines.feed import RowFeed
from headrace.types import Row


def row(tokens: int) -> Row:
    return Row.make([1] * tokens, [True] * tokens)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited 10 s in vain"
        time.sleep(0.002)


class Receiver:
    """Takes what a feed gives."""

    def __init__(self, rows: Iterator[Row], budget: int) -> None:
        self.rows: list[Row] = []
        self.end: list[BaseException | None] = []
        self.feed = RowFeed(rows, budget, self.rows.append, self.end.append)


def test_all_rows_arrive_in_order() -> None:
    rows = [row(n) for n in (1, 2, 3)]
    got = Receiver(iter(rows), 100)
    wait_for(lambda: bool(got.end))
    assert got.rows == rows and got.end == [None] and got.feed.pulled == 3


def test_the_budget_holds_rows_back_until_others_are_answered() -> None:
    got = Receiver(iter([row(10)] * 10), 20)
    wait_for(lambda: len(got.rows) == 2)
    time.sleep(0.05)
    assert len(got.rows) == 2
    got.feed.release(10)
    wait_for(lambda: len(got.rows) == 3)
    time.sleep(0.05)
    assert len(got.rows) == 3
    got.feed.close()


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    got = Receiver(iter([row(50), row(1)]), 20)
    wait_for(lambda: len(got.rows) == 1)
    got.feed.release(50)
    wait_for(lambda: got.end == [None])
    assert len(got.rows) == 2


def test_an_error_of_the_supply_is_handed_on() -> None:
    def broken() -> Iterator[Row]:
        yield row(1)
        raise KeyError("rows")

    got = Receiver(broken(), 100)
    wait_for(lambda: bool(got.end))
    assert isinstance(got.end[0], KeyError) and got.feed.pulled == 1


@pytest.mark.parametrize("blocked", [True, False])
def test_closing_stops_the_pulling(blocked: bool) -> None:
    gate = threading.Event()

    def supply() -> Iterator[Row]:
        yield row(1)
        if blocked:
            gate.wait(10)
        while True:
            yield row(1)

    got = Receiver(supply(), 1)
    wait_for(lambda: len(got.rows) == 1)
    got.feed.close()
    gate.set()
    wait_for(lambda: got.end == [None])
    assert len(got.rows) == 1
