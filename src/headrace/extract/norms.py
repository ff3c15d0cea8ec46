"""Statistics of the states' norms, tap by tap, as they pass: a broken layer shows here long before anyone trains on it."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from headrace.types import Tap

_LOW: Final = -24.0
_STEP: Final = 0.125
_GATHER: Final = 4096
_BINS: Final = 512  # 2**-24 .. 2**40 in eighths of an octave: quantiles are right to 9 %


@dataclass(frozen=True, slots=True)
class TapNorms:
    """Quantiles of the norm of one tap's states."""

    tap: Tap
    states: int
    mean: float
    low: float
    """1st percentile."""
    quartile: float
    median: float
    third_quartile: float
    high: float
    """99th percentile."""
    largest: float
    recent_median: float
    """Of about the last tenth of the session: a median that has moved away tells of a change on the way."""

    def to_json(self) -> dict[str, Any]:
        """Plain values with seven significant digits, as float32 has."""
        return {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True, eq=False)
class NormCounts:
    """Norms counted in one place, on their way to another."""

    counts: np.ndarray
    """int64 [taps, bins]"""
    sums: np.ndarray
    """float64 [taps]"""
    largest: np.ndarray
    """float64 [taps]"""


class NormStats:
    """Histograms of log2(norm), one a tap. Thread-safe."""

    def __init__(self, taps: tuple[Tap, ...]) -> None:
        self.taps = taps
        self._lock = threading.Lock()
        self._counts = np.zeros((len(taps), _BINS), dtype=np.int64)
        self._recent = np.zeros((len(taps), _BINS), dtype=np.float64)
        self._sum = np.zeros(len(taps), dtype=np.float64)
        self._largest = np.zeros(len(taps), dtype=np.float64)
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._offsets = (np.arange(len(taps)) * _BINS)[:, None]

    def add(self, norms: np.ndarray) -> None:
        """``norms``: float32 [taps, tokens] of one capture. Short captures are gathered, so that each costs little."""
        with self._lock:
            self._pending.append(norms)
            self._pending_tokens += norms.shape[1]
            if self._pending_tokens >= _GATHER:
                self._flush()

    def take(self) -> NormCounts | None:
        """What was added since the last call, for :meth:`merge` elsewhere; None when nothing was."""
        with self._lock:
            self._flush()
            if not self._counts.any():
                return None
            taken = NormCounts(self._counts, self._sum, self._largest)
            self._counts, self._recent = np.zeros_like(self._counts), np.zeros_like(self._recent)
            self._sum, self._largest = np.zeros_like(self._sum), np.zeros_like(self._largest)
            return taken

    def merge(self, counts: NormCounts) -> None:
        """Add what another process counted."""
        with self._lock:
            self._counts += counts.counts
            self._recent += counts.counts
            self._sum += counts.sums
            self._largest = np.maximum(self._largest, counts.largest)
            self._forget()

    def summary(self) -> list[TapNorms]:
        """One entry a tap, empty before the first capture."""
        with self._lock:
            self._flush()
            total = int(self._counts[0].sum())
            if not total:
                return []
            return [self._tap(index, total) for index in range(len(self.taps))]

    def _flush(self) -> None:
        if not self._pending:
            return
        norms = np.concatenate(self._pending, axis=1)
        self._pending, self._pending_tokens = [], 0
        with np.errstate(divide="ignore"):
            place = (np.log2(norms) - _LOW) / _STEP
        bins = np.clip(place, 0, _BINS - 1).astype(np.int64) + self._offsets
        counts = np.bincount(bins.ravel(), minlength=self._counts.size).reshape(self._counts.shape)
        self._counts += counts
        self._recent += counts
        self._sum += norms.sum(axis=1, dtype=np.float64)
        self._largest = np.maximum(self._largest, norms.max(axis=1))
        self._forget()

    def _forget(self) -> None:
        if self._recent[0].sum() > 0.1 * self._counts[0].sum() + _GATHER:
            self._recent *= 0.5

    def _tap(self, index: int, total: int) -> TapNorms:
        low, quartile, median, third, high = (
            _quantile(self._counts[index], q) for q in (0.01, 0.25, 0.5, 0.75, 0.99)
        )
        return TapNorms(
            tap=self.taps[index],
            states=total,
            mean=float(self._sum[index] / total),
            low=low,
            quartile=quartile,
            median=median,
            third_quartile=third,
            high=high,
            largest=float(self._largest[index]),
            recent_median=_quantile(self._recent[index], 0.5),
        )


def tap_name(tap: Tap) -> str:
    """``boundary 15`` or ``the final state``, for messages."""
    return "the final state" if tap == "final" else f"boundary {tap}"


def _quantile(counts: np.ndarray, q: float) -> float:
    """Middle of the bin in which the ``q``-quantile lies."""
    place = int(np.searchsorted(np.cumsum(counts), q * counts.sum()))
    return float(2.0 ** (_LOW + (min(place, _BINS - 1) + 0.5) * _STEP))
