"""The target's side of speculative decoding: one forward pass verifies a whole proposal of every sequence in a batch.

Shapes: B sequences, Q tokens of each in one forward, V vocabulary, T taps, H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.evaluate import slots
from headrace.taps import ResidualTaps
from headrace.types import Tap

_MASKED_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Seen:
    """What one forward pass of the target gave."""

    logits: Tensor
    """[B, Q, V] in the model's dtype; after :meth:`Verifier.begin` the last token's alone, [B, 1, V]."""
    states: Tensor
    """[T, B, Q, H] the taps, in the drafter's order; left-padded after :meth:`Verifier.begin`."""


class Verifier:
    """A transformers causal language model with a key-value memory that can be rolled back for each sequence.

    :attr:`lengths` [B] counts the tokens whose keys and values are kept. The token after them, the *root*, is known and
    not yet processed: a verification processes the root and the proposed nodes together.
    """

    def __init__(
        self, model: nn.Module, num_layers: int, taps: Sequence[Tap], *, final_normed: bool = True
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self._num_layers = num_layers
        self._taps = ResidualTaps(model, num_layers, taps, final_normed=final_normed)
        self._cache_name = (
            "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        )
        config: Any = model.config
        self._config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._types = set(getattr(self._config, "layer_types", None) or ())
        self._window: int | None = getattr(self._config, "sliding_window", None)
        if self._types - _MASKED_TYPES:
            raise ConfigError(
                f"{type(model).__name__} has layers of kind {sorted(self._types - _MASKED_TYPES)}, whose state cannot be rolled back; "
                "measure its drafter through a serving engine with --server"
            )
        self.lengths = torch.zeros(0, dtype=torch.long, device=self.device)
        self._plan = slots.SlotPlan(0)
        self._cache: Any = None

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return int(getattr(self._config, "max_position_embeddings", 0) or 1 << 30)

    @property
    def junk(self) -> int:
        """The slot that padding is written to."""
        return self._plan.junk

    def begin(self, prompts: Sequence[Sequence[int]], room: int) -> Seen:
        """Forget everything and process B prompts, leaving ``room`` slots behind the longest."""
        longest = max(map(len, prompts))
        self._plan = slots.SlotPlan(longest + room)
        self._cache = slots.slot_cache(self._plan, self._num_layers)
        tokens, places = left_padded(prompts, self.junk)
        tokens, places = tokens.to(self.device), places.to(self.device)
        positions = torch.where(places == self.junk, 0, places)
        seen = slots.causal(places, longest, self.junk)
        out = self._forward(tokens, positions, places, longest, seen, keep=1)
        self.lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        return out

    def verify(self, tokens: Tensor, ancestors: Tensor, depths: Tensor) -> Seen:
        """Process the roots and their proposed nodes: ``tokens`` [B, Q], the root first.

        ``ancestors`` [B, Q, Q] tells which nodes each sees (itself included), ``depths`` [B, Q] how far each is from the
        root. Nothing is kept until :meth:`commit`.
        """
        queries = tokens.shape[1]
        limit = int(self.lengths.max()) + queries
        places = self.lengths[:, None] + torch.arange(queries, device=self.device)
        positions = self.lengths[:, None] + depths
        return self._forward(tokens, positions, places, limit, slots.tree(self.lengths, ancestors, limit))

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep the root and the accepted nodes of the last verification.

        ``path`` [B, M] holds their places in ``tokens``, the root's 0 first; ``counts`` [B] how many of them count.
        """
        steps = torch.arange(path.shape[1], device=self.device)
        used = steps < counts[:, None]
        source = torch.where(used, self.lengths[:, None] + path, self.junk)
        target = torch.where(used, self.lengths[:, None] + steps, self.junk)
        if bool((source != target).any()):  # a chain is already in place
            for layer in self._cache.layers:
                layer.memory.move(source, target)
        self.lengths = self.lengths + counts

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences alone."""
        self.lengths = self.lengths[rows]
        for layer in self._cache.layers:
            layer.memory.keep(rows)

    def _forward(
        self, tokens: Tensor, positions: Tensor, places: Tensor, limit: int, seen: Tensor, keep: int = 0
    ) -> Seen:
        self._plan.slots, self._plan.limit = places, limit
        with torch.inference_mode(), self._taps:
            out = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._masks(seen, positions, places),
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_name: self._cache},
            )
        return Seen(out.logits, self._taps.stacked() if self._taps.taps else tokens.new_empty(0))

    def _masks(self, seen: Tensor, positions: Tensor, places: Tensor) -> Any:
        full = slots.additive(seen, self.dtype)
        if self._window is None or self._types == {"full_attention"}:
            return full
        at = torch.arange(self._plan.capacity + 1, device=self.device).repeat(len(places), 1)
        at = at.scatter(1, places, positions)[:, : seen.shape[2]]
        windowed = slots.additive(slots.within_window(seen, positions, at, self._window), self.dtype)
        if "full_attention" in self._types:
            return {"full_attention": full, "sliding_attention": windowed}
        return windowed


def left_padded(rows: Sequence[Sequence[int]], junk: int) -> tuple[Tensor, Tensor]:
    """Token ids and slots [B, longest] of rows of different lengths, aligned at their last tokens; padding gets ``junk``."""
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    places = torch.full((len(rows), longest), junk)
    for index, row in enumerate(rows):
        tokens[index, longest - len(row) :] = torch.tensor(row)
        places[index, longest - len(row) :] = torch.arange(len(row))
    return tokens, places
