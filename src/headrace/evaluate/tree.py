"""Dynamic tree drafting, as in EAGLE-2 (arXiv:2406.16858): spend the verified nodes where the drafter believes in them.

Level by level the ``topk`` most credible nodes are expanded into their ``topk`` best children; a node's credibility is the product
of the drafter's probabilities on the way to it. In the end the most credible nodes of all levels are verified. Because
a parent is at least as credible as its child, they form a tree.

Shapes: B sequences, F frontier nodes, C candidates, k topk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.evaluate.drafter import Drafter
from headrace.evaluate.proposal import Proposal

# Log-probabilities can be 0 exactly, and then a child ties with its parent; this makes the parent win, in float64.
_LEVEL_COST = 1e-9


def draft_tree(drafter: Drafter, depth: int, topk: int, nodes: int) -> Proposal:
    """Propose a tree of at most ``nodes`` nodes and ``depth`` levels for every sequence of ``drafter``."""
    growing = _Growing(drafter, topk)
    for level in range(2, depth + 1):
        growing.grow(level)
    return growing.best(nodes)


class _Growing:
    """All candidates so far. Candidate c has place c + 1; place 0 is the root."""

    def __init__(self, drafter: Drafter, topk: int) -> None:
        self.drafter = drafter
        batch = len(drafter.lengths)
        self.topk = min(topk, drafter.logits.shape[-1])
        scores, drafted = self._children(drafter.logits)
        self.scores = [scores - _LEVEL_COST]
        self.tokens = [drafter.model.to_target(drafted)]
        self.parents = [torch.zeros_like(drafted)]
        self.depths = [torch.ones_like(drafted)]
        # The frontier: candidates of the last level that will be expanded.
        self.frontier = torch.arange(self.topk, device=drafter.device).expand(batch, -1)
        self.states = drafter.state[:, None].expand(-1, self.topk, -1)
        self.ancestors = torch.zeros(batch, self.topk, 0, dtype=torch.bool, device=drafter.device)

    def _children(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and draft ids [..., k] of the best tokens."""
        best, drafted = torch.log_softmax(logits.float(), -1).topk(self.topk, -1)
        return best.double(), drafted

    def _candidates(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, 1)

    def grow(self, level: int) -> None:
        """Expand the frontier into candidates at ``level``, and choose the next frontier among them."""
        total = sum(part.shape[1] for part in self.tokens)
        batch, width = self.frontier.shape
        written = self.ancestors.shape[2]
        own = torch.eye(width, dtype=torch.bool, device=self.frontier.device).expand(batch, -1, -1)
        seen = torch.cat([self.ancestors, own], 2)
        tokens = self._candidates(self.tokens).gather(1, self.frontier)
        states, logits = self.drafter.draft(tokens, self.states, level - 1, written, seen)
        gains, drafted = self._children(logits)
        scores = self._candidates(self.scores).gather(1, self.frontier)[:, :, None] + gains - _LEVEL_COST
        self.scores.append(scores.flatten(1))
        self.tokens.append(self.drafter.model.to_target(drafted).flatten(1))
        self.parents.append((self.frontier + 1)[:, :, None].expand_as(drafted).flatten(1))
        self.depths.append(torch.full_like(self.tokens[-1], level))
        chosen = scores.flatten(1).topk(min(self.topk, width * self.topk), 1).indices
        parent = chosen // self.topk
        self.frontier = total + chosen
        self.states = states.gather(1, parent[:, :, None].expand(-1, -1, states.shape[2]))
        self.ancestors = seen.gather(1, parent[:, :, None].expand(-1, -1, seen.shape[2]))

    def best(self, nodes: int) -> Proposal:
        """The most credible candidates as a proposal, parents before children."""
        scores, parents = self._candidates(self.scores), self._candidates(self.parents)
        count = min(nodes, scores.shape[1])
        # Candidates were made level by level, so their order already puts parents first.
        chosen = scores.topk(count, 1).indices.sort(1).values
        places = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.long, device=scores.device)
        new = torch.arange(1, count + 1, device=scores.device).expand(len(scores), -1)
        places.scatter_(1, chosen + 1, new)
        return Proposal(
            tokens=self._candidates(self.tokens).gather(1, chosen),
            parents=places.gather(1, parents.gather(1, chosen)),
            depths=self._candidates(self.depths).gather(1, chosen),
        )
