"""Chain drafting: K tokens one after the other, each from the state that the one before it left."""

from __future__ import annotations

import torch

from headrace.evaluate.drafter import Drafter
from headrace.evaluate.proposal import Proposal
from headrace.evaluate.sampling import Rule


def draft_chain(drafter: Drafter, steps: int, rule: Rule) -> Proposal:
    """Propose ``steps`` tokens for every sequence of ``drafter``."""
    batch = len(drafter.lengths)
    state, logits = drafter.state[:, None], drafter.logits
    tokens, probs = [], []
    for step in range(steps):
        drafted, distribution = rule.draw(logits)
        tokens.append(drafter.model.to_target(drafted))
        if distribution is not None:
            probs.append(in_target_vocabulary(drafter, distribution))
        if step + 1 < steps:
            seen = torch.ones(batch, 1, step + 1, dtype=torch.bool, device=drafter.device)
            state, scores = drafter.draft(tokens[-1][:, None], state, step + 1, step, seen)
            logits = scores[:, 0]
    return Proposal.chain(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None)


def in_target_vocabulary(drafter: Drafter, probs: torch.Tensor) -> torch.Tensor:
    """A distribution [B, draft vocabulary] over the target's vocabulary: 0 for what cannot be drafted."""
    config = drafter.model.config
    ids = drafter.model.to_target(torch.arange(config.draft_vocab_size, device=probs.device))
    return probs.new_zeros(len(probs), config.vocab_size).index_copy(1, ids, probs)
