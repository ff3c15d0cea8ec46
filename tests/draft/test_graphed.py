"""A pack's work replayed instead of run: the same gradients, added as plain runs add them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.draft.data import Document, MemoryPacks, Placing
from headrace.draft.graphed import WARM, GraphedLoss, _copied, _Recording
from headrace.draft.options import TrainOptions
from headrace.draft.teacher import Teacher
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.ttt import Pack
from headrace.draft.workers import Workers
from headrace.target import Head

from .toys import draft_ids, toy_config, toy_draft, toy_pack

MASK = [False, True, True, True, True, True]


class Rerun(GraphedLoss):
    """As a CUDA graph does it, on a CPU: the same work on the same tensors, into the same tensors."""

    replays = 0

    def _record(self, pack: Pack) -> _Recording:
        inputs = _copied(pack)
        for parameter in self.parameters:
            parameter.grad = None
        sums, counts = self._run(inputs)
        gradients = [p.grad for p in self.parameters]
        outer = self

        class Again:
            def replay(self) -> None:
                outer.replays += 1
                for parameter in outer.parameters:
                    parameter.grad = None
                for mine, new in zip((sums, counts), outer._run(inputs), strict=True):
                    mine.copy_(new)
                for mine, parameter in zip(gradients, outer.parameters, strict=True):
                    if mine is not None and parameter.grad is not None:
                        mine.copy_(parameter.grad)

        return _Recording(Again(), inputs, sums, counts, gradients)


def make_packs(count: int) -> list[Pack]:
    """Packs of one size, and every fifth of another."""
    return [
        toy_pack(toy_config(), [MASK] * (3 if i % 5 == 4 else 2), seed=i, starts_multiple=8)
        for i in range(count)
    ]


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_gradients_of_replays_are_those_of_plain_runs(rounds: int) -> None:
    model = toy_draft(toy_config())
    teacher = Teacher(Head(torch.randn(30, 16)), draft_ids(model))
    packs = make_packs(24)
    options = TrainOptions.model_validate({"ttt_steps": 3, "packs_per_step": rounds})
    machine = Machine(torch.device("cpu"), False, "eager", False)
    trainer = Trainer(model, teacher, Once(packs), options, machine, Workers())
    parameters = trainer.optimizers.parameters
    replayed = Rerun(trainer.loss_of, parameters, 1 / rounds)

    def gradients(run: Any, update: list[Pack]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        model.zero_grad(set_to_none=True)
        facts = [tuple(t.clone() for t in run(pack)) for pack in update]
        return [p.grad.clone() for p in parameters if p.grad is not None], facts  # type: ignore[return-value]

    for begin in range(0, len(packs) - rounds + 1, rounds):
        update = packs[begin : begin + rounds]
        plain, plain_facts = gradients(trainer.add_gradients, update)
        again, again_facts = gradients(replayed, update)
        for one, other in zip(plain, again, strict=True):
            torch.testing.assert_close(one, other)
        for one, other in zip(plain_facts, again_facts, strict=True):
            torch.testing.assert_close(one, other)
    assert replayed.replays > len(packs) - 3 * WARM


class Once:
    """Packs in the order given."""

    def __init__(self, packs: list[Pack]) -> None:
        self.packs = packs

    def __iter__(self) -> Iterator[Pack]:
        return iter(self.packs)

    def per_epoch(self) -> int:
        return len(self.packs)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_cuda_graph_gives_the_same_gradients(rounds: int) -> None:
    config = toy_config(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128)
    device = torch.device("cuda")
    machine = Machine(device, True, "flex", True, True)
    rng = np.random.default_rng(0)
    documents = [
        Document(
            rng.integers(0, 30, n).astype(np.int32),
            np.arange(n) > n // 3,
            torch.randn(4, n, 64, device=device, dtype=torch.bfloat16),
        )
        for n in rng.integers(8, 120, 200).tolist()
    ]
    options = TrainOptions.model_validate({"ttt_steps": 3, "packs_per_step": rounds, "tokens_per_pack": 256})
    model = toy_draft(config).to(device)
    model.lm_head.weight.data = model.lm_head.weight.data.to(torch.bfloat16)
    model.embed_tokens.weight.data = model.embed_tokens.weight.data.to(torch.bfloat16)
    model.embed_tokens.weight.requires_grad_(False)
    teacher = Teacher(Head(torch.randn(30, 64)), draft_ids(model).cpu()).to(device, torch.bfloat16)
    packs = MemoryPacks(documents, Placing(device, torch.bfloat16, padded=True), token_budget=256)
    trainer = Trainer(model, teacher, packs, options, machine, Workers())
    assert trainer.graphed is not None
    stream, parameters = iter(packs), trainer.optimizers.parameters
    for _ in range(WARM + 6):
        update = [next(stream) for _ in range(rounds)]
        found = []
        for run in (trainer.graphed._run, trainer.graphed):
            model.zero_grad(set_to_none=True)
            facts = [tuple(t.clone() for t in run(pack)) for pack in update]  # type: ignore[operator]
            found.append(([p.grad.clone() for p in parameters if p.grad is not None], facts))
        for one, other in zip(found[0][0], found[1][0], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
        for (sums, counts), (sums_again, counts_again) in zip(found[0][1], found[1][1], strict=True):
            torch.testing.assert_close(sums, sums_again, rtol=1e-3, atol=1e-3)
            assert torch.equal(counts, counts_again)
    assert trainer.graphed._recorded
