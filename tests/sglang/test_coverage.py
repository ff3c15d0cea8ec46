"""Coverage against a plain set of positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.sglang_plugin.coverage import Coverage


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20))
def test_claims_each_position_once(length: int, spans: list[tuple[int, int]]) -> None:
    coverage, seen = Coverage(length), set[int]()
    for start, stop in spans:
        fresh = coverage.claim(start, stop)
        positions = [p for a, b in fresh for p in range(a, b)]
        assert positions == sorted(set(range(start, min(stop, length))) - seen)
        assert all(a < b for a, b in fresh)
        seen.update(positions)
        assert coverage.complete == (len(seen) == length)
        missing = {p for a, b in coverage.missing() for p in range(a, b)}
        assert missing == set(range(length)) - seen


def test_re_prefill_of_prompt_and_output_claims_nothing() -> None:
    coverage = Coverage(29)
    assert coverage.claim(0, 29) == [(0, 29)]
    assert coverage.claim(0, 46) == []
    assert coverage.complete


def test_prefix_hit_is_missing_at_the_front() -> None:
    coverage = Coverage(15)
    assert coverage.claim(10, 15) == [(10, 15)]
    assert coverage.missing() == [(0, 10)]
    assert not coverage.complete
