"""The account: what is selected, what is remembered, and that the sum adds up or the run fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, IncompleteError
from headrace.extract.ledger import Account, FailedRow, FailureFile, Selection, select
from headrace.types import Failure

KEYS = [f"{n:032x}" for n in range(10)]


def choose(**changes: object) -> Selection:
    options: dict[str, object] = {"stored": set(), "set_aside": {}, "only": [], "limit": 0}
    return select(KEYS, range(10, 20), **{**options, **changes})  # type: ignore[arg-type]


def test_everything_is_to_do_at_first() -> None:
    selection = choose()
    assert list(selection.todo) == KEYS and selection.tokens == sum(range(10, 20))
    assert not selection.skipped and selection.rows == 10


def test_each_reason_is_counted() -> None:
    gone = {KEYS[3]: Failure(KEYS[3], "too_long", "x", retryable=False)}
    selection = select([*KEYS, KEYS[0]], [10] * 11, stored={KEYS[1]}, set_aside=gone, only=[], limit=6)
    assert list(selection.todo) == [KEYS[0], KEYS[2], KEYS[4], KEYS[5]]
    assert dict(selection.skipped) == {"already_stored": 1, "beyond_limit": 4, "duplicate": 1}
    assert set(selection.set_aside) == {KEYS[3]}


def test_limit_selects_the_same_rows_after_a_resume() -> None:
    first = choose(limit=4)
    again = choose(limit=4, stored=set(list(first.todo)[:3]))
    assert list(again.todo) == [KEYS[3]]


def test_a_row_inserted_at_the_top_is_the_only_new_one() -> None:
    """ST-14: pairing is by content, never by place."""
    selection = select(["f" * 32, *KEYS], [10] * 11, stored=set(KEYS), set_aside={}, only=[], limit=0)
    assert list(selection.todo) == ["f" * 32]
    assert selection.skipped["already_stored"] == 10


def test_only_takes_unique_beginnings() -> None:
    assert list(choose(only=[KEYS[4]]).todo) == [KEYS[4]]
    with pytest.raises(ConfigError, match="fits 10 keys"):
        choose(only=["000"])
    with pytest.raises(ConfigError, match="fits no key"):
        choose(only=["abc"])


@given(data=st.data())
def test_the_account_always_adds_up(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(KEYS), max_size=25))
    subset = st.sets(st.sampled_from(KEYS))
    stored_before, set_aside, stored_now, failed_now = (data.draw(subset) for _ in range(4))
    selection = select(
        keys,
        [7] * len(keys),
        stored=stored_before,
        set_aside={k: Failure(k, "too_long", "x") for k in set_aside},
        only=[],
        limit=data.draw(st.integers(0, 8)),
    )
    failed = {k: Failure(k, "timeout", "x") for k in failed_now}
    account = Account.close(selection, stored_before | stored_now, failed, finished=False)
    parts = account.to_json()
    assert (
        parts["stored"] + parts["skipped"] + parts["failed"] + parts["not_reached"]
        == parts["rows"]
        == len(keys)
    )


def test_a_row_lost_on_the_way_fails_a_finished_run() -> None:
    """EX-17: 100 rows in, 32 captures out, no error: never success."""
    selection = choose()
    with pytest.raises(IncompleteError, match="9 rows are neither stored nor failed"):
        Account.close(selection, {KEYS[0]}, {}, finished=True)
    assert Account.close(selection, {KEYS[0]}, {}, finished=False).not_reached == 9


def failed(key: str, retryable: bool = True) -> FailedRow:
    return FailedRow(Failure(key, "timeout", "no answer – in 5 s", retryable), 3, 17, "a.jsonl:4")


def test_failures_survive_and_settle(tmp_path: Path) -> None:
    file = FailureFile(tmp_path / "failures.jsonl")
    file.add(failed(KEYS[0]))
    file.add(failed(KEYS[1], retryable=False))
    file.add(failed(KEYS[0]))
    again = FailureFile(file.path)
    assert again.rows == {KEYS[0]: failed(KEYS[0]), KEYS[1]: failed(KEYS[1], retryable=False)}
    assert set(again.final()) == {KEYS[1]}
    again.settle(stored={KEYS[1]})
    assert set(FailureFile(file.path).rows) == {KEYS[0]}
    assert len(file.path.read_text().splitlines()) == 1
    again.settle(stored=set(KEYS))
    assert not file.path.exists()


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_failure_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    file = FailureFile(tmp_path / "failures.jsonl")
    file.add(failed(KEYS[0]))
    file.add(failed(KEYS[1]))
    file.path.write_bytes(file.path.read_bytes()[:-cut])
    again = FailureFile(file.path)
    again.add(failed(KEYS[2]))
    kept = {KEYS[0], KEYS[2]} | ({KEYS[1]} if cut == 1 else set())
    assert set(FailureFile(file.path).rows) == kept
