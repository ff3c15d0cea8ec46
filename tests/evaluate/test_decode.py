"""The fast loop against the plain one: same tokens, and the same accepted count in every single verification."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from headrace.draft.checkpoint import load_draft
from headrace.engines.hf import load_model
from headrace.evaluate.acceptance import Acceptance
from headrace.evaluate.chain import draft_chain
from headrace.evaluate.decode import Answer, Limits, speculate
from headrace.evaluate.drafter import Drafter
from headrace.evaluate.sampling import Greedy
from headrace.evaluate.tree import draft_tree
from headrace.evaluate.verifier import Verifier
from headrace.target import Target

from .reference import greedy_chain

STOP = frozenset({2})
STEPS, NEW = 4, 40


def prompts(count: int = 7) -> list[list[int]]:
    """Prompts of lengths 1, 2, 5, 9, ...: every batch holds padding."""
    rng = random.Random(5)
    return [[rng.randrange(3, 96) for _ in range(length)] for length in [1, 2, 5, 9, 14, 20, 33][:count]]


class Setup:
    def __init__(self, target_folder: Path, draft_folder: Path) -> None:
        self.target = Target.open(str(target_folder))
        self.model = load_model(self.target, "float32", "cpu")
        self.draft = load_draft(draft_folder, self.target).model

    def speculate(
        self, rows: list[list[int]], steps: int = STEPS, topk: int = 1, nodes: int = 0
    ) -> list[Answer]:
        verifier = Verifier(self.model, self.target.num_layers, self.draft.config.taps)
        rule = Greedy()
        if topk == 1:
            drafting = partial(draft_chain, steps=steps, rule=rule)
        else:
            drafting = partial(draft_tree, depth=steps, topk=topk, nodes=nodes)
        room = NEW + max(nodes, steps * topk) + 2
        return speculate(verifier, Drafter(self.draft), drafting, rule, rows, Limits(NEW, STOP), room)


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path], tiny_draft: Callable[..., Path]) -> Setup:
    return Setup(tiny("llama"), tiny_draft("llama", 80))


def test_batched_chain_equals_the_plain_loop_verification_by_verification(llama: Setup) -> None:
    rows = prompts()
    answers = llama.speculate(rows)
    for row, answer in zip(rows, answers, strict=True):
        truth = greedy_chain(
            llama.model, llama.target.num_layers, llama.draft, row, steps=STEPS, max_new=NEW, stop=STOP
        )
        assert answer.accepted == truth.accepted
        assert answer.tokens == truth.tokens
    pooled = Acceptance.count([a for x in answers for a in x.accepted], STEPS)
    assert min(pooled.reached) > 5, (
        "the drafter must be accepted at every position for this test to mean something"
    )
    assert pooled.reached[0] < pooled.verifications
