"""The drafter's side of speculative decoding, run as serving engines run it.

After every verification the accepted positions are computed again from the target's own states and overwrite what drafting
left behind; drafting itself goes on from the drafter's own outputs, in slots behind the last certain row.

Shapes: B sequences, N rows of one call, T taps, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.draft.model import DraftCache, Eagle3Draft
from headrace.evaluate import slots
from headrace.evaluate.verifier import left_padded


class Drafter:
    """A drafter in the middle of decoding B sequences.

    :attr:`lengths` [B] counts certain rows; :attr:`state` [B, H] and :attr:`logits` [B, V] are what the last of them gave:
    the state that the first drafted row is fed, and the scores of the first proposal.
    """

    def __init__(self, model: Eagle3Draft) -> None:
        self.model = model
        self.device = model.fc.weight.device
        self.lengths = torch.zeros(0, dtype=torch.long, device=self.device)
        self.state = torch.zeros(0, 0, device=self.device)
        self.logits = torch.zeros(0, 0, device=self.device)
        self._cache = DraftCache.allocate(model, 0, 1)

    def begin(self, prompts: Sequence[Sequence[int]], roots: Tensor, states: Tensor, room: int) -> None:
        """Run all rows of B prompts. ``states`` [T, B, longest, H] are left-padded taps, ``roots`` [B] the first new tokens."""
        capacity = max(map(len, prompts)) + room
        self._cache = DraftCache.allocate(self.model, len(prompts), capacity + 1)
        following = [[*prompt[1:], root] for prompt, root in zip(prompts, roots.tolist(), strict=True)]
        tokens, places = left_padded(following, capacity)
        self.lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        self._certain(tokens.to(self.device), places.to(self.device), states)

    def extend(self, tokens: Tensor, states: Tensor, counts: Tensor) -> None:
        """Run the rows that a verification made certain.

        ``tokens`` [B, M] are the new certain tokens and ``states`` [T, B, M, H] the taps of the positions before them; of
        each sequence ``counts`` [B] count, from the left.
        """
        width = int(counts.max())
        # Aligned at the right: the last certain row of every sequence then stands in the last column.
        index = torch.arange(width, device=self.device) - (width - counts[:, None])
        places = torch.where(index >= 0, self.lengths[:, None] + index, self._junk)
        index = index.clamp_min(0)
        picked = states.gather(2, index[None, :, :, None].expand(states.shape[0], -1, -1, states.shape[3]))
        self.lengths = self.lengths + counts
        self._certain(tokens.gather(1, index), places, picked)

    def draft(
        self, tokens: Tensor, states: Tensor, depth: int, first: int, ancestors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run drafted rows: ``tokens`` [B, N] at ``depth`` edges below the root, fed ``states`` [B, N, H].

        They are kept as the rows ``first``, ``first + 1``, ... behind the certain ones; ``ancestors`` [B, N, first + N] tells which
        of those each sees, itself included. Returns the states [B, N, H] to feed their children and the logits [B, N, V].
        """
        count = tokens.shape[1]
        places = self.lengths[:, None] + first + torch.arange(count, device=self.device)
        positions = (self.lengths + depth - 1)[:, None].expand_as(tokens)
        limit = int(self.lengths.max()) + first + count
        seen = slots.tree(self.lengths, ancestors, limit)
        out = self.model.step(tokens, states, positions, self._cache, slots=places, mask=seen)
        return self.model.feedback(out), self.model.logits(out)

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences alone."""
        self.lengths, self.state, self.logits = self.lengths[rows], self.state[rows], self.logits[rows]
        self._cache = DraftCache(self._cache.keys[rows], self._cache.values[rows])

    @property
    def _junk(self) -> int:
        return self._cache.slots - 1

    def _certain(self, tokens: Tensor, places: Tensor, states: Tensor) -> None:
        fused = self.model.fuse(states.permute(1, 2, 0, 3).flatten(2).to(self.model.fc.weight.dtype))
        limit = int(self.lengths.max())
        positions = torch.where(places == self._junk, 0, places)
        seen = slots.causal(places, limit, self._junk)
        out = self.model.step(tokens, fused, positions, self._cache, slots=places, mask=seen)[:, -1]
        self.state, self.logits = self.model.feedback(out), self.model.logits(out)
