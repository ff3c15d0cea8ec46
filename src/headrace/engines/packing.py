"""Many rows in one forward without padding: an attention function for transformers that keeps documents apart.

transformers lets anyone register an attention implementation. Ours gets the packed documents' borders through the keyword
arguments that its flash-attention code uses (``cu_seq_lens_q``), runs one variable-length kernel on CUDA in half precision,
and one causal attention a document elsewhere. Everything else of the model works token by token and needs no mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from headrace.errors import EngineError

NAME = "headrace_packed"


def register() -> None:
    """Make :func:`packed_attention` known to transformers as the ``attn_implementation`` :data:`NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def pack(documents: Sequence[torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Model inputs for ``documents`` (1-D id tensors) laid end to end: one batch row, positions restarting in each."""
    lengths = [len(document) for document in documents]
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    on_device = borders.to(device)
    return {
        "input_ids": torch.cat(list(documents)).long().to(device)[None],
        "position_ids": positions.to(device)[None],
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document.

    query [1, heads, tokens, dim], key and value [1, kv heads, tokens, dim] → [1, tokens, heads, dim]. ``scaling`` and
    ``sliding_window`` are honoured. Raises EngineError when the model does not hand the documents' borders down, or asks
    for something (soft caps, sinks) that this cannot give.
    """
    borders = kwargs.get("cu_seq_lens_q")
    refused = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if borders is None or refused:
        what = f"needs {refused[0]}" if refused else "hands no document borders to its attention"
        raise EngineError(f"{type(module).__name__} {what}; use the engine option packing=off")
    scale = kwargs.get("scaling")
    window = kwargs.get("sliding_window")
    same_width = query.shape[-1] == value.shape[-1] <= 256
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and same_width:
        longest = int(kwargs["max_length_q"])
        out = torch.ops.aten._flash_attention_forward(
            query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), borders, borders, longest, longest,
            0.0, True, False, scale=scale, window_size_left=window - 1 if window else None, window_size_right=0,
        )[0]  # fmt: skip
        return out[None], None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts = []
    edges = borders.tolist()
    for start, end in itertools.pairwise(edges):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        mask = _window_mask(end - start, window, query.device) if window and end - start > window else None
        parts.append(
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
            )
        )
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _window_mask(tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """[tokens, tokens]: True where a query sees a key, at most ``window`` positions back."""
    rows = torch.arange(tokens, device=device)
    distance = rows[:, None] - rows[None, :]
    return (distance >= 0) & (distance < window)
