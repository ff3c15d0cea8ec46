"""Progress that can be believed: what is done, how fast, and when it ends, counted in tokens on a clock that pauses do not move."""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

MINUTE: Final = 60.0
ENOUGH_LOOKS: Final = 300
"""Looks at the backlog, at most ten a second, before they are judged."""
LOOKS_KEPT: Final = 3000
"""Looks that count: of a run of days, the last minutes."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a run; goes into the event log, the progress line, the status and the web page."""

    elapsed: float
    """Seconds since the session began (monotonic)."""
    rows_total: int
    rows_done: int
    """Written to the store, rows of earlier sessions included."""
    rows_failed: int
    tokens_total: int
    tokens_done: int
    tokens_failed: int
    rows_in_flight: int
    """With the engine."""
    tokens_in_flight: int
    rows_behind: int
    """Answered by the engine, not yet written."""
    tokens_per_second: float
    """Over the last minute."""
    tokens_per_second_overall: float
    """Over this session, pauses left out."""
    eta_seconds: float | None
    """None until there is something to judge by."""
    bytes_raw: int
    """Of all captures written, before the codec."""
    bytes_stored: int
    """Of the sealed shards; lags behind by the open one."""
    staging_bytes: int
    disk_free: int
    errors: dict[str, int] = field(default_factory=dict)
    """kind → failures seen, retried ones included."""
    paused: str = ""
    """Why admission is held back, empty when it is not."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, floats rounded to what a person reads."""
        out = asdict(self)
        for key, value in out.items():
            if isinstance(value, float):
                out[key] = round(value, 2)
        return out


class Meter:
    """Tokens a second, over any stretch of the past, from a bounded history of (seconds, tokens) points."""

    MAX_POINTS: Final = 4096
    GRAIN: Final = 0.05

    def __init__(self) -> None:
        self._times: list[float] = []
        self._tokens: list[int] = []

    def add(self, now: float, tokens: int) -> None:
        """Note that ``tokens`` in all were done at ``now``; both never fall."""
        if len(self._times) > 1 and now - self._times[-2] < self.GRAIN:
            self._times[-1], self._tokens[-1] = now, tokens
            return
        self._times.append(now)
        self._tokens.append(tokens)
        if len(self._times) > self.MAX_POINTS:
            # Older history needs no fine grain: every second point of its first half goes.
            half = self.MAX_POINTS // 2
            self._times[:half] = self._times[:half:2]
            self._tokens[:half] = self._tokens[:half:2]

    def rate(self, now: float, seconds: float) -> float:
        """Mean rate over the last ``seconds`` before ``now``; 0.0 while fewer than two points are known.

        It is counted from the first completion in the stretch, whose own tokens took an unknown time before it.
        """
        if not self._times:
            return 0.0
        start = min(bisect.bisect_left(self._times, now - seconds), len(self._times) - 1)
        if start > 0 and self._times[start] > now - seconds:
            start -= 1
        span = now - self._times[start]
        return (self._tokens[-1] - self._tokens[start]) / span if span > 0 else 0.0


class Progress:
    """Counts one session. Thread-safe; the clock is an argument so that a test can run days in a moment."""

    def __init__(
        self,
        *,
        rows: int,
        tokens: int,
        rows_before: int = 0,
        tokens_before: int = 0,
        bytes_before: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rows`` and ``tokens`` are to do; what is named ``before`` was in the store when the session began."""
        self._rows, self._tokens = rows, tokens
        self._rows_before, self._tokens_before = rows_before, tokens_before
        self._clock = clock
        self._lock = threading.Lock()
        self._start = clock()
        self._paused_since: float | None = None
        self._paused_total = 0.0
        self._paused_why = ""
        self._meter = Meter()
        self._flight: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._behind = 0
        self._redone = 0
        self._errors: Counter[str] = Counter()
        self.bytes_raw = bytes_before
        """Raw bytes of everything written so far."""
        self.last_answer = self._start
        """When the engine last answered (or was last given a row while it had none)."""
        self._looks, self._waiting = 0, 0.0

    # --- what the stages report -------------------------------------------------------------------------------

    def admitted(self, tokens: int) -> None:
        """A row went to the engine."""
        with self._lock:
            if not self._flight["rows"]:
                self.last_answer = self._clock()
            self._flight.update({"rows": 1, "tokens": tokens})

    def answered(self, tokens: int) -> None:
        """The engine gave a row back, well or not."""
        with self._lock:
            self.last_answer = self._clock()
            self._flight.subtract({"rows": 1, "tokens": tokens})
            self._behind += 1

    def returned(self, tokens: int) -> None:
        """A row came back unanswered because the engine died."""
        with self._lock:
            self._flight.subtract({"rows": 1, "tokens": tokens})

    def written(self, tokens: int, raw_bytes: int) -> None:
        """A row is in the store's open shard."""
        with self._lock:
            self._behind -= 1
            self._done.update({"rows": 1, "tokens": tokens})
            self.bytes_raw += raw_bytes
            self._meter.add(self._active(), self._done["tokens"] + self._redone)

    def lost(self, tokens: int, raw_bytes: int) -> None:
        """A row that was written is gone with its open shard; it will be done again."""
        with self._lock:
            self._done.subtract({"rows": 1, "tokens": tokens})
            self._redone += tokens
            self.bytes_raw -= raw_bytes

    def refused(self, kind: str) -> None:
        """An answer was no good; the row may be tried again."""
        with self._lock:
            self._behind -= 1
            self._errors[kind] += 1

    def error(self, kind: str) -> None:
        """Something went wrong that is no answer to a row."""
        with self._lock:
            self._errors[kind] += 1

    def given_up(self, tokens: int) -> None:
        """A row is failed for this run."""
        with self._lock:
            self._failed.update({"rows": 1, "tokens": tokens})

    def pause(self, why: str) -> None:
        """Admission is held back: ``why`` in a few words, empty when it goes on. The rate and the ETA leave pauses out."""
        with self._lock:
            now = self._clock()
            if self._paused_since is not None:
                self._paused_total += now - self._paused_since
            self._paused_since = now if why else None
            self._paused_why = why

    def looked(self, backlog: bool) -> None:
        """The supervisor looked whether answers wait to be checked or written."""
        self._looks = min(self._looks + 1, LOOKS_KEPT)
        self._waiting += (backlog - self._waiting) / self._looks

    # --- what it comes to ---------------------------------------------------------------------------------------

    def _active(self) -> float:
        now = self._clock()
        paused = self._paused_total + (now - self._paused_since if self._paused_since is not None else 0.0)
        return now - self._start - paused

    @property
    def backlog_share(self) -> float | None:
        """Share of the latest looks at which answers waited: near 1, this process is slower than the engine. None before there are enough."""
        return self._waiting if self._looks >= ENOUGH_LOOKS else None

    @property
    def rows_in_flight(self) -> int:
        """With the engine now."""
        return self._flight["rows"]

    @property
    def rows_out(self) -> int:
        """Admitted and not yet written."""
        return self._flight["rows"] + self._behind

    @property
    def tokens_done(self) -> int:
        """Written in this session."""
        return self._done["tokens"]

    def eta(self) -> float | None:
        """Seconds of work left, from the tokens left and the rate over the last half of the session.

        That half is at least ten minutes (shorter stretches are noise) and at most two hours (longer ones hide a lasting
        change). None before two completions. Pauses are left out on both sides.
        """
        with self._lock:
            return self._eta(self._active())

    def _eta(self, now: float) -> float | None:
        rate = self._meter.rate(now, min(max(10 * MINUTE, now / 2), 120 * MINUTE))
        left = self._tokens - self._done["tokens"] - self._failed["tokens"]
        return left / rate if rate > 0 else 0.0 if left <= 0 else None

    def snapshot(self, *, bytes_stored: int, staging_bytes: int, disk_free: int) -> Snapshot:
        """The present moment."""
        with self._lock:
            now = self._active()
            return Snapshot(
                elapsed=self._clock() - self._start,
                rows_total=self._rows + self._rows_before,
                rows_done=self._done["rows"] + self._rows_before,
                rows_failed=self._failed["rows"],
                tokens_total=self._tokens + self._tokens_before,
                tokens_done=self._done["tokens"] + self._tokens_before,
                tokens_failed=self._failed["tokens"],
                rows_in_flight=self._flight["rows"],
                tokens_in_flight=self._flight["tokens"],
                rows_behind=self._behind,
                tokens_per_second=self._meter.rate(now, MINUTE),
                tokens_per_second_overall=self._done["tokens"] / now if now > 0 else 0.0,
                eta_seconds=self._eta(now),
                bytes_raw=self.bytes_raw,
                bytes_stored=bytes_stored,
                staging_bytes=staging_bytes,
                disk_free=disk_free,
                errors=dict(self._errors),
                paused=self._paused_why,
            )
