"""The unrolled chains of training against a plain loop, the serving step, and each attention path against the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.draft.model import DraftCache, Eagle3Draft
from headrace.draft.objective import Objective
from headrace.draft.teacher import Teacher
from headrace.draft.ttt import Pack, Unroll
from headrace.target import Head

from .plain import PlainDrafter
from .toys import draft_ids, toy_config, toy_draft, toy_pack

VARIANTS: list[dict[str, Any]] = [
    {},
    {"normed_feedback": True},
    {"fc_norm": "joint", "norm_before_residual": True},
    {"fc_norm": "each", "taps": (0, 3), "num_kv_heads": 4},
]
MASKS = [
    [False, False, True, True, True, True, False, True, True, True, False],
    [False, True, True, True, True, True],
    [False, False, False],
    [False, True],
    [True, True, True, True],
]


def documents(pack: Pack) -> list[tuple[int, int, int, int]]:
    return list(pack.layout.spans)


def served_chain(model: Eagle3Draft, ids: Tensor, taps: Tensor, start: int, steps: int) -> Tensor:
    """What the serving step gives, fed the document's own tokens: prefill up to ``start``, then one row a call."""
    cache = DraftCache.allocate(model, 1, start + steps + 1)
    rows = torch.arange(start + 1)
    out = model.step(ids[rows + 1][None], model.fuse(taps[rows])[None], rows[None], cache)[:, -1:]
    outs = [out]
    for s in range(1, steps):
        position = torch.tensor([[start + s]])
        out = model.step(ids[start + 1 + s].view(1, 1), model.feedback(out), position, cache)
        outs.append(out)
    return model.norm(torch.cat(outs)[:, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_chains_equal_the_serving_step(variant: dict[str, Any]) -> None:
    """TR-02, TR-06, TR-07: same keys, positions, feedback and tokens as drafting row by row."""
    config = toy_config(**variant)
    model = toy_draft(config, dtype=torch.float64).requires_grad_(False)
    pack = toy_pack(config, MASKS, dtype=torch.float64)
    states = Unroll(model)(pack, 4)
    checked = 0
    for row, row_end, first, after in documents(pack):
        for m in range(first, after):
            start, room = int(pack.layout.starts[m]) - row, int(pack.layout.room[m])
            served = served_chain(model, pack.ids[row:row_end], pack.taps[row:row_end], start, min(4, room))
            torch.testing.assert_close(states[: len(served), m], served, rtol=1e-9, atol=1e-9)
            checked += len(served)
    assert checked == 22


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_equal_a_plain_loop(variant: dict[str, Any]) -> None:
    """The whole step, loss and every parameter's gradient, against the slow float64 drafter that shares no code."""
    config = toy_config(own_embedding=True, **variant)
    model = toy_draft(config, dtype=torch.float64)
    model.lm_head.weight.requires_grad_(True)
    pack = toy_pack(config, MASKS, dtype=torch.float64)
    head = torch.randn(
        config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    weights = (1.0, 0.8, 0.5)
    objective = Objective(Teacher(Head(head), draft_ids(model)), "kl", weights, chunk=3)
    loss = objective(Unroll(model)(pack, 3), model.lm_head.weight, pack.labels_final(), pack.layout.room).loss
    loss.backward()

    leaves = {
        n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in model.state_dict().items()
    }
    plain = PlainDrafter(config, leaves)
    # Means run over the pack, so the documents are one loss: each contributes its share of every step's count.
    counts = [int((pack.layout.room > s).sum()) for s in range(3)]
    total = torch.zeros((), dtype=torch.float64)
    for (row, row_end, _, _), mask in zip(documents(pack), MASKS, strict=True):
        own = [sum(all(mask[p + 1 : p + 3 + s]) for p in range(len(mask) - 2 - s)) for s in range(3)]
        scaled = [w * o / c for w, o, c in zip(weights, own, counts, strict=True)]
        where = slice(row, row_end)
        ids = pack.ids[where].tolist()
        total = total + plain.loss(
            ids, mask, pack.taps[where], pack.final[where], head, draft_ids(model).tolist(), scaled
        )
    torch.testing.assert_close(loss, total, rtol=1e-10, atol=1e-12)
    total.backward()
    for name, parameter in model.named_parameters():
        expected = leaves[name].grad
        assert parameter.grad is not None, name
        assert expected is not None and expected.abs().max() > 1e-8, name
        torch.testing.assert_close(
            parameter.grad, expected, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )
