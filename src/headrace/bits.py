"""Tensors as bit patterns: the store moves states as integers, so that NaN payloads and signed zeros survive.

What looks at every state that passes is numpy here, not torch, which would share each look among threads of its own, one set
for each of ours that asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
SAFETENSORS_DTYPES: dict[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Bits of +infinity: a magnitude at or above it is an infinity or a NaN.
_INFINITY: dict[str, int] = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
NAN_BITS: dict[str, int] = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC0_0000}
Bits = np.ndarray[Any, np.dtype[Any]]
"""uint16 (bfloat16, float16) or uint32 (float32) array holding the bits of states."""


def bits_of(tensor: torch.Tensor) -> Bits:
    """The bits of a contiguous CPU tensor, sharing its memory; shape kept."""
    if tensor.dtype == torch.float32:
        return tensor.detach().view(torch.int32).numpy().view(np.uint32)
    return tensor.detach().view(torch.int16).numpy().view(np.uint16)


def tensor_of(bits: Bits, dtype: str) -> torch.Tensor:
    """The inverse of :func:`bits_of`, sharing memory. ``bits`` must be writable."""
    signed = bits.view(np.int32 if dtype == "float32" else np.int16)
    return torch.from_numpy(signed).view(TORCH_DTYPES[dtype])


def floats_of(
    bits: Bits, dtype: str, out: np.ndarray[Any, np.dtype[np.float32]] | None = None
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The values of ``bits`` in float32, exactly; shape kept. In ``out`` when it is given."""
    if dtype == "bfloat16":
        target = None if out is None else out.view(np.uint32)
        return np.left_shift(bits, 16, out=target, dtype=np.uint32).view(np.float32)
    values = bits.view(np.float16 if dtype == "float16" else np.float32)
    if out is None:
        return values.astype(np.float32, copy=False)
    np.copyto(out, values)
    return out


def norms_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Euclidean norms over the last axis, in the dtype of ``values``; what overflows it is infinite."""
    with np.errstate(over="ignore"):
        norms: np.ndarray[Any, Any] = np.sqrt(np.einsum("...h,...h->...", values, values))
    return norms


def bits_dtype(dtype: str) -> type[np.uint16] | type[np.uint32]:
    """Unsigned integer type as wide as ``dtype``."""
    return np.uint32 if dtype == "float32" else np.uint16


def magnitudes(bits: Bits, dtype: str) -> Bits:
    """Largest absolute value of each row of ``bits`` [rows, hidden], as bits [rows]; monotone in the value, NaN on top.

    Works in blocks that stay in cache, and of a size that is worth giving up the GIL for: every state that passes is looked at.
    """
    rows, hidden = bits.shape
    mask = bits.dtype.type(0x7FFF_FFFF if dtype == "float32" else 0x7FFF)
    step = max(1, (1 << 21) // (hidden * bits.itemsize))
    scratch = np.empty((min(step, rows), hidden), bits.dtype)
    out = np.empty(rows, bits.dtype)
    for start in range(0, rows, step):
        block = bits[start : start + step]
        part = np.bitwise_and(block, mask, out=scratch[: len(block)])
        part.max(axis=1, out=out[start : start + step])
    return out


def first_bad_row(bits: Bits, dtype: str, must_differ: Bits | None = None) -> tuple[int, str] | None:
    """First row of ``bits`` [rows, hidden] that cannot be a state, and what it holds: NaN, an infinity, or only zeros.

    Zeros count as bad only where ``must_differ`` (bool [rows]) says so.
    """
    top = magnitudes(bits, dtype)
    bad = top >= _INFINITY[dtype]
    if bad.any():
        row = int(bad.argmax())
        return row, "NaN" if int(top[row]) > _INFINITY[dtype] else "an infinity"
    if must_differ is not None and not top.all():
        zero = (top == 0) & must_differ
        return (int(zero.argmax()), "only zeros") if zero.any() else None
    return None
