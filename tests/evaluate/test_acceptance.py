"""Acceptance lengths: pooled counts, one definition, the known wrong ones excluded by number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.draft.metrics import implied_length
from headrace.evaluate.acceptance import Acceptance


def test_length_is_one_plus_the_sum_of_products_of_conditional_acceptances() -> None:
    # 1000 verifications whose conditional acceptances are 0.8, 0.7, 0.6.
    counts = Acceptance(1000, (800, 560, 336))
    assert counts.conditional == pytest.approx([0.8, 0.7, 0.6])
    assert counts.joint == pytest.approx([0.8, 0.56, 0.336])
    assert counts.length == pytest.approx(2.696)
    assert implied_length(counts.conditional) == pytest.approx(counts.length)
    # Joint taken for conditional, conditional summed up, and the target's own token forgotten:
    for wrong in (2.399, 3.1, 1.696):
        assert counts.length != pytest.approx(wrong, abs=1e-3)


def test_out_of_vocabulary_is_a_miss_at_its_position() -> None:
    assert Acceptance.count([0, 2, 1, 3, 0], 3).to_dict() == {
        "verifications": 5,
        "accepted": 6,
        "acceptance_length": 2.2,
        "reached": [3, 2, 1],
        "joint": [0.6, 0.4, 0.2],
        "conditional": [0.6, 0.6667, 0.5],
    }


def test_nothing_verified_divides_by_nothing() -> None:
    empty = Acceptance.count([], 2)
    assert (empty.length, empty.joint, empty.conditional) == (0.0, [0.0, 0.0], [0.0, 0.0])


@given(st.lists(st.lists(st.integers(0, 5)), min_size=1, max_size=4))
def test_pooling_equals_counting_everything_at_once(parts: list[list[int]]) -> None:
    pooled = Acceptance.pooled([Acceptance.count(part, 5) for part in parts])
    together = Acceptance.count([v for part in parts for v in part], 5)
    assert pooled == together
    assert pooled.minus(Acceptance.count(parts[0], 5)) == Acceptance.pooled(
        [Acceptance.count([], 5), *(Acceptance.count(part, 5) for part in parts[1:])]
    )
    assert all(0 <= share <= 1 for share in [*pooled.joint, *pooled.conditional])
    if together.verifications:
        values = [v + 1 for part in parts for v in part]
        assert pooled.length == pytest.approx(sum(values) / len(values))


def test_counts_of_different_depths_are_not_pooled() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        Acceptance.pooled([Acceptance.count([1], 2), Acceptance.count([1], 3)])
