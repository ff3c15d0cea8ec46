"""The two stages behind the engine: verify (is this answer right?) and write (encode and append), each a loop over a bounded queue."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from headrace.errors import IncompleteError
from headrace.extract.admission import Budget
from headrace.extract.check import check_capture, sampled_norms
from headrace.extract.ledger import FailedRow
from headrace.extract.norms import NormStats
from headrace.extract.progress import Progress
from headrace.types import Capture, CaptureSpec, Failure, Row

Answers = queue.Queue["Capture | Failure | None"]
Checked = queue.Queue[tuple[Row, torch.Tensor] | None]
Notes = queue.SimpleQueue[tuple[str, dict[str, Any]]]
"""Events on their way to the supervisor, which alone writes the log."""

Item = TypeVar("Item")
QUEUE_ITEMS = 256
SHARE_AFTER = 200
"""Answers before the share of failures is judged."""


class Sink(Protocol):
    """What the last stage writes to; a :class:`headrace.store.StoreWriter` is one."""

    def add(self, row: Row, states: torch.Tensor) -> Any:
        """Take one verified capture; blocks while the disk is behind."""

    def seal(self) -> Any:
        """Make everything taken so far durable."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When the pipeline gives up, and on what."""

    tries: int = 3
    failures_in_a_row: int = 50
    failed_share: float = 0.05
    engine_wait_seconds: float = 600.0
    stall_seconds: float = 3600.0
    pause_seconds: float = 3600.0
    seal_seconds: float = 600.0
    retry_pause_seconds: float = 1.0


class Flight:
    """Rows between admission and answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """``row`` goes to the engine."""
        with self._lock:
            self._rows[row.key] = row

    def take(self, key: str) -> Row | None:
        """The row that ``key`` answers; None when nobody waits for such an answer (any more)."""
        with self._lock:
            return self._rows.pop(key, None)

    def take_all(self) -> list[Row]:
        """Every row left."""
        with self._lock:
            rows = list(self._rows.values())
            self._rows.clear()
            return rows


class Verifier:
    """Judges answers: right ones go on to the writer, wrong ones count against their row and the run."""

    def __init__(
        self,
        spec: CaptureSpec,
        flight: Flight,
        budget: Budget,
        progress: Progress,
        limits: Limits,
        notes: Notes,
    ) -> None:
        self.spec, self.flight, self.budget = spec, flight, budget
        self.progress, self.limits, self.notes = progress, limits, notes
        self.norms = NormStats(spec.taps)
        self.answers: Answers = queue.Queue(QUEUE_ITEMS)
        self.checked: Checked = queue.Queue(QUEUE_ITEMS)
        self.retry: list[str] = []
        """Keys to try again in the next round."""
        self.failed: dict[str, FailedRow] = {}
        self.fatal: IncompleteError | None = None
        """Set when there are too many failures; the supervisor raises it."""
        self.successes = 0
        self.abandoned = False
        """Set when nobody will write any more: what still comes is let go, so that the threads can end."""
        self._tries: Counter[str] = Counter()
        self._in_a_row = 0
        self._bad = 0

    @property
    def backlog(self) -> bool:
        """Whether an answer waits for this stage or the next."""
        return not (self.answers.empty() and self.checked.empty())

    def run(self) -> None:
        """The stage's thread: until None comes through the queue."""
        while (answer := self.answers.get()) is not None:
            self._judge(answer)
            self.answers.task_done()
        self.answers.task_done()
        offer(self.checked, None, lambda: not self.abandoned)

    def _judge(self, answer: Capture | Failure) -> None:
        row = self.flight.take(answer.key)
        if row is None:
            # Answered twice, or never asked: whatever it is, it belongs to no row that waits, so nothing may use it.
            self.progress.error("stray_answer")
            self.notes.put(("stray_answer", {"key": answer.key}))
            return
        self.progress.answered(len(row))
        failure = answer if isinstance(answer, Failure) else check_capture(answer, row, self.spec)
        if failure is not None:
            self.fail(row, failure)
        elif isinstance(answer, Capture):
            self._accept(row, answer.states)

    def _accept(self, row: Row, states: torch.Tensor) -> None:
        self.succeeded()
        self.norms.add(sampled_norms(states))
        offer(self.checked, (row, states), lambda: not self.abandoned)

    def succeeded(self) -> None:
        """Count a right answer."""
        self._in_a_row = 0
        self.successes += 1

    def fail(self, row: Row, failure: Failure) -> None:
        """Count a bad answer; the row is tried again in a later round or, after its last try, set aside."""
        self.budget.give(len(row))
        self.progress.refused(failure.kind)
        if self.fatal is not None:
            return  # the run is about to stop because of the engine; no row is blamed for that
        self._tries[row.key] += 1
        tries = self._tries[row.key]
        self.notes.put(
            ("failure", {"key": row.key, "kind": failure.kind, "message": failure.message, "try": tries})
        )
        if tries == 1:
            # Later rounds hold only rows that failed before: there, failures in a row say nothing of the engine.
            self._judge_engine(failure)
        if failure.retryable and tries < self.limits.tries:
            self.retry.append(row.key)
        else:
            self.set_aside(row, failure)

    def _judge_engine(self, failure: Failure) -> None:
        self._bad += 1
        self._in_a_row += 1
        answers = self._bad + self.successes
        last = f"the last with {failure.kind}: {failure.message}. Mend the engine and run the command again, it goes on"
        if self._in_a_row >= self.limits.failures_in_a_row:
            self.fatal = IncompleteError(f"{self._in_a_row} rows in a row failed, {last}")
        elif answers >= SHARE_AFTER and self._bad > self.limits.failed_share * answers:
            self.fatal = IncompleteError(
                f"{self._bad} of {answers} answers failed (--max-failed-share {self.limits.failed_share:g}), {last}"
            )

    def set_aside(self, row: Row, failure: Failure) -> None:
        """Give ``row`` up for this run."""
        failed = FailedRow(failure, max(1, self._tries[row.key]), len(row), _origin(row))
        self.failed[row.key] = failed
        self.progress.given_up(len(row))
        self.notes.put(("set_aside", failed.to_json()))


class Writer:
    """Hands verified captures to the sink, and seals what has lain open too long."""

    def __init__(
        self, sink: Sink, checked: Checked, budget: Budget, progress: Progress, seal_seconds: float
    ) -> None:
        self.sink, self.checked, self.budget, self.progress = sink, checked, budget, progress
        self.seal_seconds = seal_seconds
        self.abandoned = False
        """Set to end the stage without sealing."""
        self.seal_soon = threading.Event()
        """Set to have what is written sealed before its time."""
        self._open_since: float | None = None
        """Since when the oldest capture not yet surely durable waits."""

    def run(self) -> None:
        """The stage's thread: until None comes through the queue; then everything is sealed."""
        while True:
            item = self._next()
            if item is None:
                break
            row, states = item
            self.sink.add(row, states)
            self.progress.written(len(row), states.numel() * states.element_size())
            self.budget.give(len(row))
            if self._open_since is None:
                self._open_since = time.monotonic()
            self._seal_if_old()
        if not self.abandoned:
            self.sink.seal()

    def _next(self) -> tuple[Row, torch.Tensor] | None:
        while not self.abandoned:
            try:
                return self.checked.get(timeout=0.25)
            except queue.Empty:
                self._seal_if_old()
        return None

    def _seal_if_old(self) -> None:
        if self._open_since is None:
            return
        if self.seal_soon.is_set() or time.monotonic() - self._open_since > self.seal_seconds:
            self.seal_soon.clear()
            self.sink.seal()
            self._open_since = None


def offer(to: queue.Queue[Item], item: Item, wanted: Callable[[], bool]) -> bool:
    """Put ``item``, waiting for room for as long as it is wanted; whether it went in."""
    while wanted():
        try:
            to.put(item, timeout=1.0)
            return True
        except queue.Full:
            continue
    return False


def drive(
    capture: Callable[[], Iterator[Capture | Failure]], answers: Answers, alive: Callable[[], bool]
) -> None:
    """The engine's thread: passes its answers on for as long as the session counts."""
    for answer in capture():
        if not offer(answers, answer, alive):
            return  # given up as hung: its rows have gone elsewhere


def _origin(row: Row) -> str:
    origin = row.origin
    return f"{origin.source}:{origin.line}" if origin.line else origin.source
