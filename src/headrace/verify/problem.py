"""The bad states of one capture, and what an explanation of them looks like: shared by every step of the diagnosis.

Shapes: K taps, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from headrace.types import FINAL, Row, Tap
from headrace.verify.measure import token_errors

MAX_TOKENS = 512  # bad tokens looked at; a fault that needs more to show itself is not one of ours
FIT = 0.15  # the largest median relative error at which a candidate can be the explanation
BETTER = 0.5  # and it must be at least this much nearer than what the spec claims


@dataclass(frozen=True, slots=True)
class Finding:
    """One explanation of some taps and tokens of one capture."""

    code: str
    detail: str
    key: str
    taps: tuple[Tap, ...]
    first: int
    """First bad token."""
    last: int
    """Last bad token."""
    count: int
    """Bad tokens."""
    error: float = 0.0
    """Median relative error to what explains it."""
    claimed: float = 0.0
    """Median relative error to what the spec claims."""
    value: int | None = None
    """Offset found, where the kind has one."""
    what: str = ""
    """What a tap holds, to follow "holds": findings of one capture with one ``what`` are one."""
    holds: Tap | None = None
    """The tap (or boundary) it holds instead, where it holds one of the same tokens."""
    other: str = ""
    """Key of the other capture, where the kind has one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The bad states of one capture, and the right ones."""

    row: Row
    stored: torch.Tensor
    """float32 [K, T, H]"""
    claimed: torch.Tensor
    """float32 [K, T, H]: what the reference says."""
    bad: np.ndarray
    """bool [K, T]"""
    taps: tuple[Tap, ...]

    def tokens(self, tap: int) -> np.ndarray:
        """Places of the bad tokens of one tap, at most MAX_TOKENS, evenly spread."""
        return thin(np.flatnonzero(self.bad[tap]))

    def error(self, tap: int, states: torch.Tensor, tokens: np.ndarray) -> float:
        """Median relative error of one tap's ``tokens`` against ``states`` [T, H]."""
        return fit(self.stored[tap, tokens], states[tokens])

    def finding(self, code: str, detail: str, taps: Iterable[int], **more: object) -> Finding:
        """A finding about the bad tokens of ``taps`` (places in the spec)."""
        chosen = list(taps)
        where = np.flatnonzero(self.bad[chosen].any(axis=0))
        claimed = float(np.median([self.error(k, self.claimed[k], self.tokens(k)) for k in chosen]))
        return Finding(
            code,
            detail,
            self.row.key,
            tuple(self.taps[k] for k in chosen),
            int(where[0]),
            int(where[-1]),
            len(where),
            claimed=claimed,
            **more,  # type: ignore[arg-type]
        )


def tap_names(taps: Sequence[Tap]) -> str:
    """``tap 2``, ``taps 2, 4 and the final state``."""
    numbers = [str(tap) for tap in taps if tap != FINAL]
    parts = [f"tap{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"] if numbers else []
    return " and ".join([*parts, *(["the final state"] if FINAL in taps else [])])


def thin(places: np.ndarray) -> np.ndarray:
    """At most MAX_TOKENS of ``places``, evenly spread."""
    if len(places) <= MAX_TOKENS:
        return places
    some: np.ndarray = places[np.linspace(0, len(places) - 1, MAX_TOKENS).astype(int)]
    return some


def fit(stored: torch.Tensor, reference: torch.Tensor) -> float:
    """Median relative error over the tokens of two [tokens, H]."""
    return float(np.median(token_errors(stored, reference).relative))


def explains(error: float, claimed: float) -> bool:
    """Whether a candidate at ``error`` is a better account than the spec's own at ``claimed``."""
    return error <= FIT and error < BETTER * claimed


def ranges(places: np.ndarray, noun: str = "token") -> str:
    """``tokens 3..7, 9`` of places in any order, at most three stretches."""
    ordered = sorted({int(p) for p in places})
    runs = [
        [v for _, v in group] for _, group in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    ]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    more = f" and {len(parts) - 3} more stretches" if len(parts) > 3 else ""
    return f"{noun if len(ordered) == 1 else noun + 's'} {', '.join(parts[:3])}{more}"
