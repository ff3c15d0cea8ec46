"""The decoding loops: speculative, and plain as the truth and the time it is compared with.

Both run a batch of prompts through the same target forward; plain decoding is speculative decoding with nothing proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.draft.method import DraftMethod
from headrace.evaluate.drafter import Drafter
from headrace.evaluate.proposal import Proposal, Verdict
from headrace.evaluate.sampling import Rule
from headrace.evaluate.verifier import Seen, Verifier

Draft = Callable[[Any], Proposal]
"""Makes a proposal of what follows each sequence of the drafter it is given: a chain or a tree."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When an answer ends."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    """Tokens that end an answer; they are part of it."""
    room: int = 0
    """How many slots behind its prompt's end a sequence may touch when drafting: the answer, a verification past its end,
    and what drafting writes meanwhile."""


@dataclass(slots=True)
class Answer:
    """One decoded answer."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    """Accepted drafted tokens of each verification."""
    gaps: list[float] = field(default_factory=list)
    """Plain decoding only: how far the best logit was above the second, token by token."""

    def take(self, new: Sequence[int], limits: Limits) -> bool:
        """Append tokens up to the end of the answer; returns whether it has ended."""
        for token in new:
            self.tokens.append(token)
            if token in limits.stop_ids or len(self.tokens) >= limits.max_new_tokens:
                return True
        return False


@torch.inference_mode()
def speculate(
    verifier: Verifier,
    drafter: Drafter | DraftMethod,
    draft: Draft,
    rule: Rule,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
) -> list[Answer]:
    """Decode B prompts speculatively."""
    answers = [Answer() for _ in prompts]
    seen = verifier.begin(prompts, limits.room)
    roots = rule.choose(seen.logits[:, -1])
    drafter.begin(prompts, roots, seen.states, limits.room)
    alive = [i for i, root in enumerate(roots.tolist()) if not answers[i].take([root], limits)]
    roots = _keep(alive, len(prompts), roots, verifier, drafter)
    while alive:
        proposal = draft(drafter)
        verdict, seen = _verify(verifier, proposal, rule, roots)
        going = []
        for row, (count, new) in enumerate(
            zip(verdict.counts.tolist(), verdict.tokens.tolist(), strict=True)
        ):
            answer = answers[alive[row]]
            answer.accepted.append(count - 1)
            if not answer.take(new[:count], limits):
                going.append(row)
        roots = verdict.tokens.gather(1, verdict.counts[:, None] - 1)[:, 0]
        path = verdict.path[None, :, :, None].expand(seen.states.shape[0], -1, -1, seen.states.shape[3])
        drafter.extend(verdict.tokens, seen.states.gather(2, path), verdict.counts)
        roots = _keep(going, len(alive), roots, verifier, drafter)
        alive = [alive[row] for row in going]
    return answers


@torch.inference_mode()
def decode_plainly(
    verifier: Verifier, prompts: Sequence[Sequence[int]], rule: Rule, limits: Limits
) -> list[Answer]:
    """Decode B prompts one token at a time; fills :attr:`Answer.gaps`."""
    answers = [Answer() for _ in prompts]
    logits = verifier.begin(prompts, limits.max_new_tokens + 1).logits[:, -1]
    alive = list(range(len(prompts)))
    while alive:
        roots = rule.choose(logits)
        best = logits.float().topk(2, -1).values
        going = []
        for row, (token, gap) in enumerate(
            zip(roots.tolist(), (best[:, 0] - best[:, 1]).tolist(), strict=True)
        ):
            answer = answers[alive[row]]
            answer.gaps.append(gap)
            if not answer.take([token], limits):
                going.append(row)
        roots = _keep(going, len(alive), roots, verifier)
        alive = [alive[row] for row in going]
        if alive:
            nothing = Proposal.nothing(len(alive), verifier.device)
            logits = _verify(verifier, nothing, rule, roots)[1].logits[:, 0]
    return answers


def _verify(verifier: Verifier, proposal: Proposal, rule: Rule, roots: Tensor) -> tuple[Verdict, Seen]:
    tokens, depths = proposal.with_root(roots)
    seen = verifier.verify(tokens, proposal.ancestors(), depths)
    verdict = rule.judge(proposal, seen.logits)
    verifier.commit(verdict.path, verdict.counts)
    return verdict, seen


def _keep(
    rows: list[int], of: int, roots: Tensor, verifier: Verifier, drafter: Drafter | DraftMethod | None = None
) -> Tensor:
    """Go on with some sequences of the batch; returns their roots."""
    if len(rows) == of:
        return roots
    index = torch.tensor(rows, dtype=torch.long, device=roots.device)
    verifier.keep(index)
    if drafter is not None:
        drafter.keep(index)
    return roots[index]
