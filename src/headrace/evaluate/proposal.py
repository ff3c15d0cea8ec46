"""What a drafter proposes and what the target makes of it, for chains and trees alike.

A proposal is a tree under the *root*, the last token that is certain. Places count the root as 0 and the nodes from 1, in an
order in which a parent comes before its children; a chain is the tree in which every node has one child.

Shapes: B sequences, N nodes, V target vocabulary, M accepted nodes at most plus the root.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """Nodes under the root of each sequence."""

    tokens: Tensor
    """[B, N] target ids."""
    parents: Tensor
    """[B, N] places of the parents."""
    depths: Tensor
    """[B, N] edges to the root, from 1."""
    probs: Tensor | None = None
    """[B, N, V] the distribution each node of a chain was sampled from; None when nodes are the drafter's best tokens."""

    @classmethod
    def chain(cls, tokens: Tensor, probs: Tensor | None = None) -> Proposal:
        """A chain of ``tokens`` [B, N]."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens, places, places + 1, probs)

    @classmethod
    def nothing(cls, batch: int, device: torch.device) -> Proposal:
        """No node at all: verifying it is plain decoding."""
        return cls.chain(torch.empty(batch, 0, dtype=torch.long, device=device))

    def ancestors(self) -> Tensor:
        """bool [B, N + 1, N + 1]: which places each place descends from, itself included."""
        batch, nodes = self.tokens.shape
        root = self.parents.new_zeros(batch, 1)
        parents = torch.cat([root, self.parents], 1)[:, :, None].expand(batch, nodes + 1, nodes + 1)
        own = torch.eye(nodes + 1, dtype=torch.bool, device=self.tokens.device).expand(batch, -1, -1)
        seen = own
        for _ in range(int(self.depths.max()) if nodes else 0):
            seen = own | seen.gather(1, parents)
        return seen

    def with_root(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and depths [B, N + 1] of one verification: the root first."""
        return torch.cat([roots[:, None], self.tokens], 1), torch.cat(
            [torch.zeros_like(roots)[:, None], self.depths], 1
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification accepted."""

    path: Tensor
    """[B, M] places of the accepted nodes, the root first; 0 behind the end."""
    counts: Tensor
    """[B] how many places of ``path`` count: accepted nodes + 1."""
    tokens: Tensor
    """[B, M] the new certain tokens: the accepted nodes', then the one the target adds; ``counts`` of them count."""


def walk(proposal: Proposal, choices: Tensor) -> Verdict:
    """Follow the target's ``choices`` [B, N + 1] (its token after each place) from the root as far as nodes agree.

    The token the target chose where no node agrees is the last new one.
    """
    batch, nodes = proposal.tokens.shape
    deepest = int(proposal.depths.max()) if nodes else 0
    current = torch.zeros(batch, dtype=torch.long, device=choices.device)
    alive = torch.ones(batch, dtype=torch.bool, device=choices.device)
    counts = torch.ones_like(current)
    path = [current]
    wanted = choices.gather(1, current[:, None])
    tokens = [wanted[:, 0]]
    for _ in range(deepest):
        matches = (proposal.parents == current[:, None]) & (proposal.tokens == wanted)
        alive = alive & matches.any(1)
        # argmax of bools: the first match; siblings have distinct tokens, so there is at most one.
        current = torch.where(alive, matches.int().argmax(1) + 1, current)
        wanted = choices.gather(1, current[:, None])
        counts = counts + alive
        path.append(torch.where(alive, current, 0))
        tokens.append(wanted[:, 0])
    return Verdict(torch.stack(path, 1), counts, torch.stack(tokens, 1))
