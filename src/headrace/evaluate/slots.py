"""Key-value memory for speculative decoding: tokens are written to slots, and only what an attention mask shows exists.

Every sequence of a batch has its own length, and what a verification rejects must vanish. With one slot a position,
rolling back is forgetting a number, a tree is a mask, and moving an accepted branch into place is a copy of a few slots.
The same memory serves the target (through :class:`SlotLayer`, a transformers cache layer) and the drafter.

Shapes: B sequences, Q new tokens of each, S slots, H key-value heads, D their width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotPlan:
    """Where the next forward pass writes, shared by all layers of one model."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Slots of a sequence. One more, the last, takes the keys of padding and is never seen."""
        self.slots = torch.empty(0, 0, dtype=torch.long)
        """[B, Q] slots of the tokens of the next forward pass."""
        self.limit = 0
        """How many slots the next forward pass looks at."""

    @property
    def junk(self) -> int:
        """The slot that padding is written to."""
        return self.capacity


class SlotMemory:
    """Keys and values of one layer, ``[B, H, S + 1, D]`` each; allocated on the first write."""

    def __init__(self, plan: SlotPlan) -> None:
        self.plan = plan
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put ``[B, H, Q, D]`` into the planned slots; returns all visible slots ``[B, H, limit, D]`` as views."""
        if self.keys is None or self.values is None:
            # Zeros, not garbage: masked slots still take part in 0 * value.
            self.keys = keys.new_zeros(keys.shape[0], keys.shape[1], self.plan.capacity + 1, keys.shape[3])
            self.values = values.new_zeros(
                values.shape[0], values.shape[1], self.plan.capacity + 1, values.shape[3]
            )
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        self.keys[rows, :, self.plan.slots] = keys.transpose(1, 2)
        self.values[rows, :, self.plan.slots] = values.transpose(1, 2)
        return self.keys[:, :, : self.plan.limit], self.values[:, :, : self.plan.limit]

    def move(self, source: Tensor, to: Tensor) -> None:
        """Copy slots ``source`` to slots ``to``, both [B, M]; all are read before any is written."""
        if self.keys is None or self.values is None:
            return
        rows = torch.arange(source.shape[0], device=source.device)[:, None]
        self.keys[rows, :, to] = self.keys[rows, :, source]
        self.values[rows, :, to] = self.values[rows, :, source]

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences of the batch."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """A transformers cache layer over a :class:`SlotMemory`; masks and positions are always given explicitly."""

    is_sliding = False

    def __init__(self, plan: SlotPlan) -> None:
        super().__init__()
        self.memory = SlotMemory(plan)
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the memory allocates itself."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the attention of the model."""
        return self.memory.write(key_states, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """Used by models only to make up positions and masks, which are given."""
        return 0

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Used by models only to make up masks, which are given."""
        return self.memory.plan.limit, 0

    def get_max_length(self) -> int:
        """Slots of a sequence (transformers 5)."""
        return self.memory.plan.capacity

    def get_max_cache_shape(self) -> int:
        """Slots of a sequence (transformers 4)."""
        return self.memory.plan.capacity


def slot_cache(plan: SlotPlan, num_layers: int) -> Any:
    """A transformers cache of ``num_layers`` slot layers."""
    return Cache(layers=[SlotLayer(plan) for _ in range(num_layers)])


# --- which slots a new token sees; all return bool [B, Q, limit] ----------------------------------------------------


def causal(slots: Tensor, limit: int, junk: int) -> Tensor:
    """Each token sees every slot up to its own. Padding sees slot 0 alone, so that its softmax is not empty."""
    own = torch.where(slots == junk, 0, slots)
    return torch.arange(limit, device=slots.device) <= own[:, :, None]


def tree(base: Tensor, ancestors: Tensor, limit: int) -> Tensor:
    """Tokens of a tree that starts at slot ``base`` [B]: the committed slots, their ancestors and themselves.

    ``ancestors`` is bool [B, Q, M]: query q sees node m, at slot ``base + m``; M may exceed Q when older nodes of the
    same tree were written before.
    """
    batch, queries, nodes = ancestors.shape
    seen = (torch.arange(limit, device=base.device) < base[:, None])[:, None].repeat(1, queries, 1)
    slots = (base[:, None] + torch.arange(nodes, device=base.device))[:, None].expand(batch, queries, nodes)
    return seen.scatter(2, slots, ancestors)


def within_window(seen: Tensor, query_positions: Tensor, slot_positions: Tensor, window: int) -> Tensor:
    """``seen`` without the slots whose position [B, limit] is ``window`` or more before the query's [B, Q]."""
    distance = query_positions[:, :, None] - slot_positions[:, None, :]
    return seen & (distance < window)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that attention adds to its scores, [B, 1, Q, limit]. Finite, so that no row becomes NaN."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]
