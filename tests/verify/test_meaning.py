"""What the stored final state means: tokens and probabilities compared with the target's own forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.target import Target
from headrace.testing.planted import Ground
from headrace.types import FINAL, Row
from headrace.verify import meaning
from headrace.verify.meaning import Meaning
from headrace.verify.reference import Reference


@pytest.fixture(scope="module")
def reference(model: Path, ground: Ground) -> Iterator[Reference]:
    with Reference.open("hf", Target.open(str(model)), ground.spec) as opened:
        yield opened


def measured(reference: Reference, row: Row, final: torch.Tensor) -> Meaning:
    every = np.ones(len(row), dtype=bool)
    return meaning.compare(reference.target, final, row, every, reference.logits(row.ids))


def test_right_states_mean_what_the_target_says(reference: Reference, ground: Ground) -> None:
    total = Meaning()
    for row in ground.rows:
        total += measured(reference, row, ground.states[row.key][-1])
    assert total.tokens == sum(map(len, ground.rows))
    assert total.supervised == sum(int(row.mask[1:].sum()) for row in ground.rows)
    assert total.clear_agreement == 1.0
    assert abs(total.likelihood_change) < 1e-3
    assert meaning.judge(total) == []


def test_perplexity_is_that_of_the_model(reference: Reference, ground: Ground) -> None:
    """Against transformers' own loss, which shifts labels itself."""
    row = ground.rows[3]
    model = reference._full_engine.model
    ids = torch.from_numpy(row.ids.astype(np.int64))[None].to(model.device)
    labels = torch.where(torch.from_numpy(row.mask)[None].to(model.device), ids, -100)
    with torch.inference_mode():
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    found = measured(reference, row, ground.states[row.key][-1])
    assert found.target_nll / found.supervised == pytest.approx(float(loss), rel=1e-3)
    assert found.to_dict()["perplexity_target"] == pytest.approx(math.exp(float(loss)), rel=1e-2)


@pytest.mark.parametrize("fault", ["shifted", "un-normed", "other row"])
def test_wrong_states_mean_something_else(reference: Reference, ground: Ground, fault: str) -> None:
    total = Meaning()
    for row, other in zip(ground.rows, ground.rows[5:], strict=False):  # rows five apart are of equal length
        final = ground.states[row.key][-1]
        if fault == "shifted":
            final = final.roll(1, dims=0)
        elif fault == "un-normed":
            final = ground.boundary(row.key, ground.spec.num_layers)
        else:
            final = ground.states[other.key][-1]
        total += measured(reference, row, final)
    assert "greedy-differs" in [fault.code for fault in meaning.judge(total)]


def test_only_kept_states_count(reference: Reference, ground: Ground) -> None:
    row = ground.rows[0]
    kept = np.zeros(len(row), dtype=bool)
    kept[3] = True
    final = torch.full_like(ground.states[row.key][-1], float("nan"))
    final[3] = ground.states[row.key][-1][3]
    found = meaning.compare(reference.target, final, row, kept, reference.logits(row.ids))
    assert (found.tokens, found.agree) == (1, 1)


def test_an_un_normed_store_is_normed_as_training_does(model: Path) -> None:
    """RMS of [3, 4, 0, 0] is 2.5, so with weights [2, 1, 1, 1] the final state is [2.4, 1.6, 0, 0]."""
    target = Target.open(str(model))
    target.__dict__["final_norm"] = lambda x: (
        x * torch.tensor([2.0, 1, 1, 1]) / x.pow(2).mean(-1, keepdim=True).sqrt()
    )
    spec = target.spec([1, FINAL], dtype="float32", final_normed=False)
    states = torch.tensor([[[0.0, 0, 0, 0]], [[3.0, 4, 0, 0]]])
    final = meaning.stored_final(target, spec, states)
    assert final is not None
    torch.testing.assert_close(final, torch.tensor([[2.4, 1.6, 0, 0]]))
    assert meaning.stored_final(target, target.spec([1, 2]), states) is None


def test_few_tokens_are_judged_gently() -> None:
    assert meaning.judge(Meaning(tokens=10, agree=8, clear=10, clear_agree=9)) == []
    assert meaning.judge(Meaning(tokens=1000, agree=800, clear=1000, clear_agree=900)) != []
    assert meaning.judge(Meaning()) == []
