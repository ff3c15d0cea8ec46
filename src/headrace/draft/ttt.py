"""Test-time training: every chain of a pack unrolled over S steps, each step fed the state of the one before, as serving does.

In training the tokens are the row's own at every step (teacher forcing) and only states are fed back; a drafter that
runs freely reads the tokens it proposed itself. Either way a plain loop over :meth:`Eagle3Draft.step` gives the same
numbers; the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.draft.attention import Attend, Compiled, Own, make_attend
from headrace.draft.layout import Layout
from headrace.draft.model import DraftLayer, Eagle3Draft


@dataclass(frozen=True)
class Pack:
    """Documents laid end to end, ready for a step of training. T rows, n taps."""

    ids: Tensor
    """int64 [T]"""
    taps: Tensor
    """[T, n * H], boundaries in the drafter's order."""
    final: Tensor
    """[T, H], after the target's final norm."""
    layout: Layout

    @property
    def tokens(self) -> int:
        """Rows without padding."""
        return self.layout.spans[-1][1] if self.layout.spans else 0

    def to(self, device: torch.device | str) -> Pack:
        """The same on ``device``."""
        ids, taps, final = (t.to(device, non_blocking=True) for t in (self.ids, self.taps, self.final))
        return Pack(ids, taps, final, self.layout.to(device))

    def labels_final(self) -> Tensor:
        """[M, H]: the final state that judges step 0 of each start."""
        return self.final[self.layout.label_rows]


class Unroll:
    """Runs packs through a drafter. Holds what is compiled, so make one for a whole run."""

    def __init__(self, model: Eagle3Draft, *, attention: str = "eager", compiled: bool = False) -> None:
        self.model = model
        self.attention = attention
        self.compiled = Compiled(compiled) if attention == "flex" or compiled else None
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = (
            self.compiled.wrap if self.compiled else lambda f: f
        )
        self._first, self._next, self._leave = wrap(_first), wrap(_next), wrap(_leave)

    def __call__(self, pack: Pack, steps: int, choose: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The drafter's normed output at every step of every chain, [S, M, H]: what ``lm_head`` reads.

        ``choose`` turns a step's outputs [M, H] into the tokens [M] that the next step reads; the row's own when absent.
        """
        model, layout = self.model, pack.layout
        attend: Attend = make_attend(self.attention, layout, self.compiled)
        embeds = model.embed_tokens(pack.ids[layout.next_rows])
        queries, keys, values, residual = self._first(
            model, embeds, pack.taps, layout.positions, layout.starts
        )
        out, normed = self._leave(model, attend(queries, keys, values, None), residual)
        outs = [normed]
        own = _Growing(steps - 1, layout.starts.device)
        positions = layout.positions[layout.starts]
        for step in range(1, steps):
            tokens = pack.ids[layout.chain_rows(step)] if choose is None else choose(normed)
            embeds = model.embed_tokens(tokens)
            state = normed if model.config.normed_feedback else out
            queries, key, value, residual = self._next(model, embeds, state, positions + step)
            out, normed = self._leave(model, attend(queries, keys, values, own.add(key, value)), residual)
            outs.append(normed)
        return torch.stack(outs)


class _Growing:
    """The own rows of all chains, step by step."""

    def __init__(self, places: int, device: torch.device) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.places = torch.arange(places, device=device)

    def add(self, key: Tensor, value: Tensor) -> Own:
        """Take one step's key and value [M, K, D]."""
        self.keys.append(key)
        self.values.append(value)
        empty = [torch.zeros_like(key)] * (len(self.places) - len(self.keys))
        return Own(
            torch.stack([*self.keys, *empty], 1),
            torch.stack([*self.values, *empty], 1),
            self.places < len(self.keys),
        )


def _first(
    model: Eagle3Draft, embeds: Tensor, taps: Tensor, positions: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 0: keys and values of every row, queries and residual of the starts alone: other rows are only looked at."""
    layer: DraftLayer = model.layer
    mixed, residual = layer.mix(embeds, model.fuse(taps))
    cos, sin = model.rotary(positions)
    keys, values = layer.self_attn.keys_values(mixed, cos, sin)
    queries = layer.self_attn.queries(mixed[starts], cos[starts], sin[starts])
    return queries, keys, values, residual[starts]


def _next(
    model: Eagle3Draft, embeds: Tensor, states: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A later step of every chain: its queries, its own key and value, its residual."""
    mixed, residual = model.layer.mix(embeds, states)
    cos, sin = model.rotary(positions)
    keys, values = model.layer.self_attn.keys_values(mixed, cos, sin)
    return model.layer.self_attn.queries(mixed, cos, sin), keys, values, residual


def _leave(model: Eagle3Draft, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's output and the same after the last norm."""
    out = model.layer.finish(attended, residual)
    return out, model.norm(out)
