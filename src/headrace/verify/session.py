"""What every step of one verification shares: the store, the rows, the target, the budgets, and a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from headrace.data.rows import RowFolder
from headrace.store import Store
from headrace.target import Target
from headrace.types import FINAL, Capture, CaptureSpec, Row
from headrace.verify.config import VerifyConfig

Say = Callable[[str], None]
Watch = Callable[..., AbstractContextManager[Callable[[int, int], None]]]
"""``watch(what, bytes_unit=...)`` shows progress: inside the block, call what it gives with (done, total)."""
NEIGHBOURS = 8  # captures on either side
EVERY = 5.0  # seconds between progress lines


class Clock:
    """Time and token budgets of one run."""

    def __init__(self, minutes: float = 0.0, tokens: int = 0) -> None:
        self.start = time.monotonic()
        self._minutes = minutes
        self._tokens = tokens
        self.spent = 0
        """Tokens re-extracted so far."""

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self.start

    @property
    def half_over(self) -> bool:
        """Half of the time is gone: reading stops, so that re-extraction has the other half."""
        return bool(self._minutes) and self.seconds >= 30 * self._minutes

    def affordable(self, lengths: Iterable[int]) -> int:
        """How many captures of these lengths the budget of tokens pays for (the last may overdraw it)."""
        if not self._tokens:
            return sum(1 for _ in lengths)
        left, count = self._tokens - self.spent, 0
        for length in lengths:
            if left <= 0:
                break
            left -= length
            count += 1
        return count

    @property
    def over(self) -> bool:
        """A budget is used up: nothing more is re-extracted."""
        late = bool(self._minutes) and self.seconds >= 60 * self._minutes
        return late or (bool(self._tokens) and self.spent >= self._tokens)


@dataclass
class Session:
    """One run of ``verify``."""

    config: VerifyConfig
    say: Say
    watch: Watch
    store: Store
    target: Target
    rows: RowFolder | None
    clock: Clock
    unreadable: set[str] = field(default_factory=set)
    """Captures whose bytes are damaged: they are faults already and cannot be compared."""
    _mates: dict[str, list[str]] = field(default_factory=dict)

    @property
    def spec(self) -> CaptureSpec:
        """The store's spec."""
        return self.store.spec

    def shards(self) -> dict[str, list[str]]:
        """Readable captures by shard, in stored order."""
        found: dict[str, list[str]] = {}
        for key in self.store:
            if key not in self.unreadable:
                found.setdefault(str(self.store.entry(key).shard), []).append(key)
        return found

    def row(self, key: str) -> Row:
        """The row of a capture, from the rows if they have it, else as the store holds it."""
        if self.rows is not None and key in self.rows:
            return self.rows.get(key)
        return Row(*self.store.tokens_of(key), key)

    def stored(self, key: str) -> Capture:
        """The capture itself; final states that the store leaves out (:meth:`kept`) are NaN."""
        return self.store.get(key, missing="nan")

    def kept(self, key: str) -> np.ndarray:
        """bool [taps, tokens]: the states that the store keeps (all, unless it leaves out final states without a target)."""
        tokens = self.store.entry(key).tokens
        kept = np.ones((len(self.spec.taps), tokens), dtype=bool)
        if FINAL in self.spec.taps and self.store.final_positions != "all":
            kept[self.spec.tap_index(FINAL)] = self.store.final_kept(key)
        return kept

    def neighbours(self, key: str) -> list[Row]:
        """Rows of the captures stored beside this one: what was in flight with it."""
        shard = self.store.entry(key).shard
        mates = self._mates.setdefault(
            shard, sorted(self.shards().get(shard, []), key=lambda k: self.store.entry(k).slot)
        )
        place = mates.index(key)
        near = mates[max(0, place - NEIGHBOURS) : place] + mates[place + 1 : place + 1 + NEIGHBOURS]
        return [self.row(other) for other in near]


@contextlib.contextmanager
def lines(say: Say, what: str, *, bytes_unit: bool) -> Iterator[Callable[[int, int], None]]:
    """The plain watch: a line every few seconds."""
    began = last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY or not done:
            return
        last = now
        left = (now - began) * (total - done) / done
        amount = (
            f"{done / 1e9:.2f} of {total / 1e9:.2f} GB" if bytes_unit else f"{done:,} of {total:,} captures"
        )
        say(f"{what}: {amount}, {left:,.0f} s left")

    yield update
