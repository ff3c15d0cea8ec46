"""The account of leases against a plain model, whatever workers do and in whatever order they die."""

from __future__ import annotations

import random

import pytest

from headrace.extract.leases import Leases
from headrace.testing.extraction import make_rows

ROWS = make_rows(60)
BY_KEY = {row.key: row for row in ROWS}
TOKENS = sum(map(len, ROWS))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def leases(clock: Clock | None = None) -> Leases:
    return Leases(iter(ROWS), BY_KEY.__getitem__, TOKENS, clock or Clock())


def test_rows_go_out_in_order_and_only_once() -> None:
    account = leases()
    first, second = account.take(1, 100), account.take(2, 10**9)
    assert [r.key for r in (*first, *second)] == [r.key for r in ROWS]
    assert sum(map(len, first)) >= 100 > sum(map(len, first[:-1]))
    assert account.dry and account.left == 0 and account.unsettled and account.take(1, 10**9) == []
    assert account.out_tokens(1) == sum(map(len, first))


def test_a_lost_worker_costs_what_it_had_not_sealed() -> None:
    account = leases()
    rows = account.take(1, 10**9)
    sealed, written, out = (r.key for r in rows[:3])
    for key in (sealed, written):
        assert account.written(1, key, 7) == (len(BY_KEY[key]), True)
    assert account.sealed(1, sealed)
    lost = account.lose(1)
    assert list(lost.unsealed) == [written] and out in lost.again and sealed not in lost.again
    account.again([*lost.unsealed, *lost.again])
    assert {r.key for r in account.take(2, 10**9)} == set(BY_KEY) - {sealed}
    assert account.left == 0


def test_a_copy_counts_once_whoever_is_first() -> None:
    clock = Clock()
    account = leases(clock)
    slow = account.take(1, 1)[0]
    assert account.copies(2, 100, older=5.0) == []
    clock.now = 6.0
    assert [r.key for r in account.copies(2, 1, older=5.0)] == [slow.key]
    assert account.copies(3, 100, older=5.0) == []  # two holders are enough
    assert account.written(2, slow.key, 9) == (len(slow), True)
    assert account.written(1, slow.key, 9) == (len(slow), False)
    assert account.written(1, slow.key, 9) is None
    assert account.sealed(1, slow.key) and not account.sealed(2, slow.key)


def test_a_failure_counts_only_when_nobody_else_has_the_row() -> None:
    clock = Clock()
    account = leases(clock)
    row = account.take(1, 1)[0]
    clock.now = 9.0
    account.copies(2, 1, older=5.0)
    assert account.failed(1, row.key) == (len(row), False)
    assert account.failed(2, row.key) == (len(row), True)
    assert account.failed(2, row.key) is None


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_ends_with_every_row_settled(seed: int) -> None:
    """Nothing is forgotten and nothing is news twice, however workers fail, die, return and copy."""
    rng, clock = random.Random(seed), Clock()
    account = leases(clock)
    held: dict[int, dict[str, str]] = {1: {}, 2: {}, 3: {}}
    news: list[str] = []
    left = TOKENS
    for step in range(20_000):
        calm = step > 2000  # every run must end
        if not account.unsettled:
            break
        clock.now += 1.0
        worker = rng.choice(list(held))
        mine = held[worker]
        what = rng.choice(
            ["take", "write", "seal"] if calm else ["take", "write", "seal", "fail", "die", "back", "copy"]
        )
        if what in ("take", "copy"):
            rows = account.take(worker, 40) if what == "take" else account.copies(worker, 40, older=20.0)
            mine |= {row.key: "out" for row in rows}
        elif what == "die":
            lost = account.lose(worker)
            assert set(lost.out) == {k for k, state in mine.items() if state == "out"}
            account.again([*lost.again, *(k for k in lost.unsealed if not account.held_elsewhere(k))])
            mine.clear()
        elif what == "seal":
            for key in [k for k, state in mine.items() if state == "open"]:
                news += [key] if account.sealed(worker, key) else []
                del mine[key]
        elif out := [k for k, state in mine.items() if state == "out"]:
            key = rng.choice(out)
            if what == "write":
                assert account.written(worker, key, 1) is not None
                mine[key] = "open"
            else:
                del mine[key]
                if what == "back":
                    account.returned(worker, key)
                elif account.failed(worker, key) == (len(BY_KEY[key]), True):
                    account.again([key])
        left = account.left
    assert sorted(news) == sorted(BY_KEY)
    assert left == 0 and account.dry
