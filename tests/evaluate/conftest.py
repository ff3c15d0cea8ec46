"""Tiny targets with drafters that know them: a few seconds of training make acceptance non-trivial at every position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from headrace.draft.checkpoint import save_draft
from headrace.draft.config import DraftConfig
from headrace.draft.model import DraftCache, Eagle3Draft
from headrace.engines.hf import load_model
from headrace.taps import ResidualTaps
from headrace.target import Target
from headrace.testing.models import make_tiny_model

VOCAB = 96


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once) a tiny target of a family."""
    made: dict[str, Path] = {}

    def make(family: str = "llama") -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("targets") / family
            made[family] = make_tiny_model(folder, family, vocab=VOCAB, layers=4, seed=3)
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny_draft(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once) a drafter folder for a tiny target, trained for a few seconds on the target's own text."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str = "llama", draft_vocab: int = VOCAB) -> Path:
        key = (family, draft_vocab)
        if key not in made:
            target = Target.open(str(tiny(family)))
            draft = fit_draft(target, draft_vocab)
            made[key] = tmp_path_factory.mktemp("drafts") / f"{family}-{draft_vocab}"
            save_draft(made[key], draft, target.spec(list(draft.config.taps)), {"test": True})
        return made[key]

    return make


def fit_draft(target: Target, draft_vocab: int, rounds: int = 60) -> Eagle3Draft:
    """A drafter fitted to predict one token ahead, and one more from its own state, on greedy text of the target."""
    torch.manual_seed(1)
    model = load_model(target, "float32", "cpu")
    config = DraftConfig.for_target(target, (1, 2, 3), draft_vocab)
    draft = Eagle3Draft(config)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.embedding)
        for module in (
            draft.layer.input_layernorm,
            draft.layer.hidden_norm,
            draft.layer.post_attention_layernorm,
            draft.norm,
        ):
            module.weight.uniform_(0.6, 1.4)
        kept = (
            torch.arange(config.vocab_size) % 8 != 5
            if draft_vocab < config.vocab_size
            else torch.ones(config.vocab_size, dtype=torch.bool)
        )
        ids = kept.nonzero()[:draft_vocab, 0]
        assert len(ids) == draft_vocab
        draft.d2t.copy_(ids - torch.arange(draft_vocab))
        draft.t2d.zero_()[ids] = True
        draft.lm_head.weight.copy_(target.head.weight[ids])
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=2e-3)
    starts = torch.randint(3, VOCAB, (64, 6))
    text = model.generate(
        starts,
        attention_mask=torch.ones_like(starts),
        max_new_tokens=40,
        min_new_tokens=40,
        do_sample=False,
        pad_token_id=0,
    )
    with torch.no_grad(), ResidualTaps(model, target.num_layers, config.taps) as taps:
        logits = model(input_ids=text).logits[..., ids]
    states = torch.cat([taps.states[t] for t in config.taps], -1)
    labels = (3 * logits[:, 1:]).softmax(-1)  # sharper: the target is followed greedily
    rows = text.shape[1] - 1
    positions = torch.arange(rows).expand(len(text), -1)
    for _ in range(rounds):
        first = draft.step(
            text[:, 1:], draft.fuse(states[:, :-1]), positions, DraftCache.allocate(draft, len(text), rows)
        )
        # Approximates the second drafted row: fed the drafter's own states throughout.
        second = draft.step(
            text[:, 2:],
            draft.feedback(first)[:, :-1],
            positions[:, 1:],
            DraftCache.allocate(draft, len(text), rows),
        )
        loss = F.cross_entropy(draft.logits(first).flatten(0, 1), labels.flatten(0, 1))
        loss = loss + F.cross_entropy(draft.logits(second).flatten(0, 1), labels[:, 1:].flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)
