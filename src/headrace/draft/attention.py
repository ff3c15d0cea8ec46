"""Attention of test-time training: a chain sees the step-0 rows up to its start and, of later steps, its own rows only.

Two exact paths, neither of which holds a T x T matrix: ``eager`` walks documents and blocks of queries (CPU, or anywhere),
``flex`` is flex_attention over the packed prefix with the own rows merged in by their log-sum-exp (CUDA).

Shapes: T rows, M chains, A query heads, K key/value heads, D head_dim, J places for own rows (one a later step).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.draft.compiling import compile_static
from headrace.draft.layout import Layout
from headrace.errors import ConfigError

QUERY_BLOCK = 512  # queries at a time in the eager path: bounds its scores at A x 512 x length
FLEX_BLOCK = 128


class Own(NamedTuple):
    """The rows of steps 1.. of every chain. All J places are there from the first on, so that compiled code sees one shape."""

    keys: Tensor
    """[M, J, K, D]"""
    values: Tensor
    """[M, J, K, D]"""
    filled: Tensor
    """bool [J]: the steps that have been run; the other places are not looked at."""


class Attend(Protocol):
    """Attention over one pack, made for its layout once and called at every step."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, own: Own | None) -> Tensor:
        """queries [M, A, D]; keys and values of step 0 [T, K, D]; own: each chain's later rows → [M, A, D]."""


def make_attend(kind: str, layout: Layout, compiled: Compiled | None = None) -> Attend:
    """The attention named ``kind`` ("eager" or "flex") for ``layout``. Raises ConfigError for another name."""
    if kind == "eager":
        return EagerAttend(layout)
    if kind == "flex":
        return FlexAttend(layout, compiled or Compiled())
    raise ConfigError(f"attention {kind!r} is not one of auto, eager, flex")


class EagerAttend:
    """Documents one after another, queries in blocks, softmax over prefix and own scores together, float32 inside."""

    def __init__(self, layout: Layout) -> None:
        self.spans = layout.spans
        self.starts = layout.starts

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, own: Own | None) -> Tensor:
        parts: list[Tensor] = []
        done = 0
        for row, row_end, first, after in self.spans:
            for begin in range(first, after, QUERY_BLOCK):
                end = min(begin + QUERY_BLOCK, after)
                rows = self.starts[begin:end]
                reach = int(rows[-1]) + 1
                mine = None if own is None else Own(own.keys[begin:end], own.values[begin:end], own.filled)
                late = torch.arange(row, reach, device=rows.device) > rows[:, None]
                block = (queries[begin:end], keys[row:reach], values[row:reach], late, mine)
                # A long document would keep A x M x length scores for the backward pass; it recomputes them instead.
                if row_end - row > 4 * QUERY_BLOCK and torch.is_grad_enabled():
                    parts.append(checkpoint(_attend_block, *block, use_reentrant=False))
                else:
                    parts.append(_attend_block(*block))
            done = after
        if done < queries.shape[0]:  # padding chains, which count nowhere
            parts.append(queries.new_zeros(queries.shape[0] - done, *queries.shape[1:]))
        return torch.cat(parts) if parts else queries


def _attend_block(queries: Tensor, keys: Tensor, values: Tensor, late: Tensor, own: Own | None) -> Tensor:
    """queries [M, A, D] over keys [L, K, D], ``late`` bool [M, L] for those not to see, own [M, J, K, D] → [M, A, D]."""
    count, heads, dim = queries.shape
    length, kv_heads = keys.shape[:2]
    with torch.autocast(queries.device.type, enabled=False):
        exact = torch.promote_types(queries.dtype, torch.float32)
        q = queries.to(exact).view(count, kv_heads, -1, dim).permute(1, 2, 0, 3) * dim**-0.5  # [K, G, M, D]
        k, v = keys.to(exact).permute(1, 0, 2), values.to(exact).permute(1, 0, 2)  # [K, L, D]
        scores = torch.matmul(q.flatten(1, 2), k.transpose(1, 2)).view(kv_heads, -1, count, length)
        scores = scores.masked_fill(late, float("-inf"))
        if own is None:
            out = torch.matmul(scores.softmax(-1).flatten(1, 2), v).view(q.shape)
        else:
            own_k, own_v = (t.to(exact).permute(2, 0, 1, 3) for t in (own.keys, own.values))  # [K, M, J, D]
            own_scores = torch.einsum("kgmd,kmjd->kgmj", q, own_k).masked_fill(~own.filled, float("-inf"))
            weights = torch.cat([scores, own_scores], dim=-1).softmax(-1)
            out = torch.matmul(weights[..., :length].flatten(1, 2), v).view(q.shape)
            out = out + torch.einsum("kgmj,kmjd->kgmd", weights[..., length:], own_v)
    return out.permute(2, 0, 1, 3).reshape(count, heads, dim).to(queries.dtype)


class Compiled:
    """The functions of the flex path, compiled on first use when ``on``; kept for a whole run so each compiles once."""

    def __init__(self, on: bool = False) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self.on = on
        self.flex: Callable[..., Any] = self.wrap(flex_attention)
        self.merge: Callable[..., Tensor] = self.wrap(merge)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` compiled for static shapes, or as it is."""
        return compile_static(function, self.on)


class FlexAttend:
    """flex_attention over step-0 rows; its log-sum-exp lets each chain's own rows join the same softmax."""

    def __init__(self, layout: Layout, compiled: Compiled) -> None:
        self.compiled = compiled
        self.mask = block_mask(layout)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, own: Own | None) -> Tensor:
        from torch.nn.attention.flex_attention import AuxRequest

        q, k, v = (t.transpose(0, 1)[None].contiguous() for t in (queries, keys, values))
        out, aux = self.compiled.flex(
            q,
            k,
            v,
            block_mask=self.mask,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        out, lse = out[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
        return out if own is None else self.compiled.merge(out, lse, queries, own)


def merge(out: Tensor, lse: Tensor, queries: Tensor, own: Own) -> Tensor:
    """Join own rows to a finished attention.

    out [M, A, D] and lse [M, A] (natural log) of the prefix, queries [M, A, D] → [M, A, D].
    """
    count, heads, dim = queries.shape
    kv_heads = own.keys.shape[2]
    exact = torch.promote_types(queries.dtype, torch.float32)
    q = queries.to(exact).view(count, 1, kv_heads, heads // kv_heads, dim)
    scores = (q * own.keys.to(exact)[:, :, :, None]).sum(-1) * dim**-0.5  # [M, J, K, G]
    scores = scores.masked_fill(~own.filled[:, None, None], float("-inf"))
    everything = torch.cat([lse.to(exact).view(count, 1, kv_heads, heads // kv_heads), scores], dim=1)
    weights = everything.softmax(1)[..., None]  # [M, 1 + J, K, G, 1]
    prefix = out.to(exact).reshape(count, kv_heads, heads // kv_heads, dim) * weights[:, 0]
    mixed = prefix + (own.values.to(exact)[:, :, :, None] * weights[:, 1:]).sum(1)
    return mixed.reshape(count, heads, dim).to(queries.dtype)


def block_mask(layout: Layout) -> Any:
    """The BlockMask of chains over rows: same document and not later. Built block by block, never as M x T.

    A block of queries needs the row blocks from its first document's begin to its last start; those inside one document
    and wholly before its first start need no mask inside.
    """
    from torch.nn.attention.flex_attention import BlockMask

    starts, document = layout.starts, layout.document
    rows = layout.tokens
    begin = torch.arange(rows, device=starts.device) - layout.positions  # a row's document's first row
    size = FLEX_BLOCK
    padded = torch.nn.functional.pad(starts, (0, -len(starts) % size), value=rows - 1).view(-1, size)
    low, high = padded[:, :1], padded[:, -1:]
    columns = torch.arange(0, rows, size, device=starts.device)
    ends = (columns + size - 1).clamp(max=rows - 1)
    needed = (ends >= begin[low]) & (columns <= high)
    whole = (begin[low] == begin[high]) & (columns >= begin[low]) & (ends <= low)
    partial_counts, partial_blocks = _ordered(needed & ~whole)
    full_counts, full_blocks = _ordered(needed & whole)

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row = starts[q]
        return (document[row] == document[kv]) & (kv <= row)

    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_blocks,
        full_counts,
        full_blocks,
        BLOCK_SIZE=size,
        mask_mod=visible,
        seq_lengths=(len(starts), rows),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [Q, C] → counts int32 [1, 1, Q] and the true columns first, int32 [1, 1, Q, C]."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]
