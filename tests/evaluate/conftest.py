"""Tiny targets of every family, with drafters fitted to them: acceptance is non-trivial at every position."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.draft.checkpoint import save_draft
from headrace.engines.hf import load_model
from headrace.target import Target
from headrace.testing.drafts import Fitting, fit_draft
from headrace.testing.models import make_tiny_model

VOCAB = 96
TAPS = (1, 2, 3)
# Windows shorter than the sequences, so that sliding layers really forget.
OVERRIDES = {"gemma3": {"sliding_window": 12}}


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def some_prompts(count: int = 7) -> list[list[int]]:
    """Prompts of lengths 1, 2, 5, 9, ...: every batch holds padding."""
    return random_prompts([1, 2, 5, 9, 14, 20, 33][:count], seed=5)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once) a tiny target of a family."""
    made: dict[str, Path] = {}

    def make(family: str = "llama") -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("targets") / family
            made[family] = make_tiny_model(
                folder, family, vocab=VOCAB, layers=4, seed=3, **OVERRIDES.get(family, {})
            )
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny_draft(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once) a drafter folder for a tiny target, fitted to its greedy text."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str = "llama", draft_vocab: int = 0) -> Path:
        key = (family, draft_vocab)
        if key not in made:
            target = Target.open(str(tiny(family)))
            model = load_model(target, "float32", "cpu")
            # All but the last two of the prompts that tests use: a random target teaches nothing that generalizes.
            prompts = some_prompts()[:-2]
            draft = fit_draft(target, model, prompts, TAPS, draft_vocab=draft_vocab, how=Fitting(rounds=40))
            made[key] = tmp_path_factory.mktemp("drafts") / f"{family}-{draft_vocab}"
            save_draft(made[key], draft, target.spec([*TAPS]), {"made for": "tests"})
        return made[key]

    return make
