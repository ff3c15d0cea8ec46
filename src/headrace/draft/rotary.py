"""Rotary positions: the frequencies of the four rope types and their application, equal to `transformers` to the bit in float32.

Kept here, not imported, because a drafter must load where only torch is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.draft.shape import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on cos and sin."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.type == "yarn":
        factor = rope.attention_factor
        if factor is None:
            factor = 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0
        return _yarn(rope, head_dim), factor
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between are blended (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    blend = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """NTK-by-parts: a ramp between the dimensions that turn ``beta_fast`` and ``beta_slow`` times in the old context."""

    def dimension(rotations: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_positions / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    powers = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return (1.0 / (rope.factor * powers)) * ramp + (1.0 / powers) * (1 - ramp)


class Rotary(torch.nn.Module):
    """cos and sin of positions. Holds no weights; the frequencies move with the module and stay float32."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        inverse, self.scale = frequencies(rope, head_dim)
        self.inverse: Tensor
        self.register_buffer("inverse", inverse, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        exact = self.inverse  # .to(bfloat16) of the whole drafter must not round the frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inverse = exact.to(self.inverse.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] → cos and sin, float32 [..., head_dim]."""
        angles = positions[..., None].float() * self.inverse.float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads: x [..., heads, head_dim] by cos and sin [..., head_dim] (halves convention of Llama)."""
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos[..., None, :].to(x.dtype) + swapped * sin[..., None, :].to(x.dtype)
