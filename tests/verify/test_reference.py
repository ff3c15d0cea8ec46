"""The reference of `headrace verify`: one model asked for states of a spec, for every boundary, and for its own logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.target import Target
from headrace.testing.engine import mixed_rows, row_error
from headrace.verify.reference import Reference


@pytest.mark.parametrize("packing", ["off", "on"])
def test_one_model_answers_in_three_ways(tiny_llama: Path, packing: str) -> None:
    """Where rows are packed, as on every GPU, the attention of packed rows was left in the model, and the other two ways failed."""
    target = Target.open(str(tiny_llama))
    (row,) = mixed_rows(1)
    options = {"device": "cpu", "packing": packing}
    spec = target.spec("2,3,final", dtype="float32")
    with Reference.open("hf", target, spec, options) as reference:
        everything, states = reference.everything(row.ids), reference.one(row)
        assert row_error(everything.boundaries[2], states[0]) < 1e-5
        assert row_error(target.head.logits(states[-1]), reference.logits(row.ids)) < 1e-5
        assert row_error(reference.one(row), states) == 0
