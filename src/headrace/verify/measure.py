"""How far stored states are from a reference, and how far they may be: relative error a token, noise, tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from headrace.types import CaptureSpec

# Median relative error between two right captures of one model, by the coarsest dtype involved: the least that is allowed
# whatever the measured noise (kernels of another engine differ more than two batch sizes of one do), and the most that
# measured noise may raise it to. Real engines against transformers: bf16 0.004 to 0.017, fp32 3e-7 to 2e-6.
_MEDIAN_LIMITS = {"float32": (1e-4, 2e-3), "float16": (4e-3, 2e-2), "bfloat16": (2.5e-2, 6e-2)}
# A single token may be this far off before it counts as wrong.
_TOKEN_LIMITS = {"float32": (5e-3, 5e-2), "float16": (5e-2, 0.2), "bfloat16": (0.2, 0.35)}
_NOISE_FACTOR = 6.0
_FP8_EXTRA = 0.05  # e4m3 with a scale a token: about 2.5 % of relative error, twice that allowed


@dataclass(frozen=True, slots=True)
class TokenErrors:
    """Distance of stored states from a reference, a value a tap and token."""

    relative: np.ndarray
    """float32 [taps, tokens]: |stored - reference| / |reference|; inf where a value is not finite."""
    cosine: np.ndarray
    """float32 [taps, tokens]; 0 where a state is all zeros."""


def token_errors(states: torch.Tensor, reference: torch.Tensor) -> TokenErrors:
    """Errors of ``states`` [..., tokens, hidden] against ``reference`` of the same shape, computed in float32."""
    a, b = states.float(), reference.float()
    norm = b.norm(dim=-1).clamp_min(1e-30)
    relative = (a - b).norm(dim=-1) / norm
    cosine = (a * b).sum(-1) / (a.norm(dim=-1).clamp_min(1e-30) * norm)
    relative = torch.nan_to_num(relative, nan=float("inf"), posinf=float("inf"))
    return TokenErrors(relative.numpy(), torch.nan_to_num(cosine, nan=0.0).numpy())


@dataclass(frozen=True, slots=True)
class Noise:
    """What the reference engine itself varies by, batch size n against batch size 1, over one sample."""

    captures: int
    tokens: int
    median: float
    """Median relative error over tokens, of the worst tap."""
    maximum: float
    """Largest relative error of any token and tap."""
    taps: dict[str, float]
    """Median relative error of each tap."""

    @classmethod
    def of(cls, errors: Sequence[TokenErrors], taps: Sequence[Any]) -> Noise:
        """Pool the errors of several captures."""
        if not errors:
            return cls(0, 0, 0.0, 0.0, {})
        relative = np.concatenate([e.relative for e in errors], axis=1)
        medians = np.median(relative, axis=1)
        return cls(
            captures=len(errors),
            tokens=relative.shape[1],
            median=float(medians.max()),
            maximum=float(relative.max()),
            taps={str(tap): float(m) for tap, m in zip(taps, medians, strict=True)},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When a capture of one tap counts as wrong."""

    median: float
    """Largest allowed median relative error over the tokens of a capture."""
    token: float
    """Largest allowed relative error of one token."""

    @classmethod
    def derive(cls, spec: CaptureSpec, codec: str, noise: Noise, override: float = 0.0) -> Tolerance:
        """From the store's dtype and codec, raised by the measured noise within limits, or set by ``override``."""
        low, high = _MEDIAN_LIMITS[spec.dtype]
        median = min(max(low, _NOISE_FACTOR * noise.median), high)
        low, high = _TOKEN_LIMITS[spec.dtype]
        token = min(max(low, 2 * noise.maximum, 4 * median), high)
        if codec.startswith("fp8"):
            median, token = median + _FP8_EXTRA, max(token, 0.2) + _FP8_EXTRA
        if override:
            median, token = override, max(4 * override, token)
        return cls(median, token)


@dataclass(frozen=True, slots=True)
class TapError:
    """Errors of one tap of one capture, as the journal keeps them."""

    median: float
    maximum: float
    cosine: float
    """Smallest cosine of any token."""
    bad: int
    """Tokens beyond the tolerance."""

    @classmethod
    def summarize(cls, relative: np.ndarray, cosine: np.ndarray, tolerance: Tolerance) -> TapError:
        """Summarize one tap's [tokens] of errors; none at all is no error."""
        if not len(relative):
            return cls(0.0, 0.0, 1.0, 0)
        median = float(np.median(relative))
        bad = bad_tokens(relative, tolerance)
        return cls(median, float(relative.max()), float(cosine.min()), int(bad.sum()))


def bad_tokens(relative: np.ndarray, tolerance: Tolerance, kept: np.ndarray | None = None) -> np.ndarray:
    """bool [tokens]: the tokens that are wrong, given one tap's errors; only those ``kept`` are judged.

    When the whole tap is off (its median is), every token above the median's limit counts; else only tokens that are far off.
    """
    judged = relative if kept is None else relative[kept]
    whole = len(judged) > 0 and float(np.median(judged)) > tolerance.median
    bad: np.ndarray = relative > (tolerance.median if whole else tolerance.token)
    return bad if kept is None else bad & kept
