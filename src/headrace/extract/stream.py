"""Captures on demand: rows go to the workers of a crew, their states come back through Ray's object store or a pipe, nothing touches a disk.

Whoever asks decides how much is asked for at a time, and that is all there is in flight: a slow reader holds the engines
back, a slow engine its reader. Workers verify as they always do; a dead one's rows are asked of the others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.bits import Bits, bits_of, tensor_of
from headrace.errors import CaptureError, HeadraceError, Interrupted
from headrace.extract.checks import engine_provenance
from headrace.extract.crew import CLOSE_SECONDS, LostError, Member
from headrace.extract.crew_engine import CrewEngine
from headrace.extract.disk import DiskGuard
from headrace.extract.leases import Leases
from headrace.extract.parts import limits_of, make_writer
from headrace.extract.pipeline import Pipeline
from headrace.extract.progress import Progress
from headrace.extract.remote_worker import NEVER, Order, RemoteWorker, Report, Setup
from headrace.extract.worker import Worker
from headrace.store import StoreWriter
from headrace.types import Failure, Row

TICK = 0.1
WAIT = 0.15
"""Seconds that a worker with nothing to report lets the next order wait."""
TRIES = 3


@dataclass(kw_only=True)
class StreamReport(Report):
    """A report with the captures themselves."""

    captures: list[tuple[str, Bits]] = field(default_factory=list)
    """Key and the bits of its states [taps, tokens, hidden]; Ray keeps such arrays in its object store, read where they lie."""


class StreamWorker(RemoteWorker):
    """A worker that hands its captures to the driver, and writes them to the store at ``config.out`` only when told to keep them."""

    def __init__(self, setup: StreamSetup) -> None:
        super().__init__(setup.setup)
        self._keep = setup.keep
        self._captures: list[tuple[str, Bits]] = []

    def _begin(self) -> None:
        writer = make_writer(self.config, self.spec, self.setup.codec, self.engine) if self._keep else None
        if writer is not None:
            self._stack.callback(writer.close)
        self.pipeline = Pipeline(
            self.engine,
            Handing(self, writer),
            budget=self._budget,
            guard=DiskGuard(Path.cwd(), 0, lambda: 0, holds_states=False),
            progress=Progress(rows=0, tokens=NEVER),
            limits=limits_of(self.config, tries=1, failures_in_a_row=NEVER, failed_share=1.0),
        )
        self.pipeline.on_note = self._note
        self._thread = Worker("remote", self._work)
        self._thread.start()

    def hand(self, key: str, bits: Bits) -> None:
        """``bits`` go out with the next report."""
        with self._lock:
            self._captures.append((key, bits))
            self._lock.notify_all()

    def _see_sealed(self) -> None:
        """Nothing is sealed that the driver would wait for."""

    def _has_news(self) -> bool:
        return bool(self._captures or self._outbox.failed)

    def _report(self, returned: list[str]) -> StreamReport:
        report = super()._report(returned)
        with self._lock:
            captures, self._captures = self._captures, []
        return StreamReport(**vars(report), captures=captures)


@dataclass(frozen=True)
class StreamSetup:
    """A worker's setup, and whether it keeps what it captures."""

    setup: Setup
    keep: bool


class Handing:
    """Where a stream worker's pipeline ends."""

    def __init__(self, worker: StreamWorker, writer: StoreWriter | None) -> None:
        self._worker, self._writer = worker, writer

    def add(self, row: Row, states: torch.Tensor) -> None:
        """See :class:`headrace.extract.stages.Sink`."""
        if self._writer is not None:
            self._writer.add(row, states)
        self._worker.hand(row.key, bits_of(states.contiguous()))

    def seal(self) -> None:
        """See :class:`headrace.extract.stages.Sink`."""
        if self._writer is not None:
            self._writer.seal()


class Stream:
    """States by key, from whichever worker is free. :meth:`ask` may be called by any number of threads."""

    def __init__(
        self, engine: CrewEngine, get: Callable[[str], Row], close_seconds: float = CLOSE_SECONDS
    ) -> None:
        """``get`` finds a row by its key; the stream closes ``engine``, and waits ``close_seconds`` for its workers to end."""
        self._close_seconds = close_seconds
        self._engine, self._get = engine, get
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: dict[str, Future[torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._leases = Leases((), get, 0)
        self._idle: dict[int, Member] = {}
        self._tries: Counter[str] = Counter()
        self._error: HeadraceError | None = None
        self._closed = False
        self.provenance = engine_provenance(engine)
        """What a store remembers of the engine."""
        self.captured = 0
        """Captures handed out so far."""
        crew = engine.crew
        crew.on_ready, crew.on_report, crew.on_lost = self._ready, self._reported, self._lost
        for member in crew.ready:
            self._ready(member)
        self._thread = Worker("stream", self._run)
        self._thread.start()

    def ask(self, key: str) -> Future[torch.Tensor]:
        """The states of ``key`` [taps, tokens, hidden], some time. One who asks again while they are awaited gets the same."""
        with self._lock:
            if self._closed or self._error is not None:
                raise self._error or Interrupted("the stream of captures is closed")
            if key not in self._waiting:
                self._waiting[key] = Future()
                self._asked.put(key)
            return self._waiting[key]

    def close(self) -> None:
        """End the workers (kept captures are sealed first) and everyone's waiting; idempotent."""
        with self._lock:
            self._closed = True
        self._thread.join()
        self._engine.close()
        if self._thread.error is not None and self._error is None:
            raise self._thread.error

    # --- the stream's thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: HeadraceError = Interrupted("the stream of captures is closed")
        try:
            while not self._closed:
                self._step()
            self._let_go()
        except HeadraceError as exc:
            self._error = error = exc
        finally:
            with self._lock:
                self._closed = True  # nobody answers any more, whatever ended it
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(error)

    def _step(self) -> None:
        while not self._asked.empty():
            self._leases.again([self._asked.get()])
        idle, self._idle = self._idle, {}
        for member in sorted(idle.values(), key=lambda m: self._leases.out_tokens(m.number)):
            if member.number in self._engine.crew.members:
                room = self._engine.want - self._leases.out_tokens(member.number)
                # Nobody knows what will be asked for next: an engine must never wait for more rows before it answers.
                order = Order(rows=self._leases.take(member.number, room), drain=True, wait=WAIT)
                self._engine.crew.send(member, order)
        self._engine.crew.wait(TICK)

    def _let_go(self) -> None:
        """Have every worker seal what it keeps."""
        crew = self._engine.crew
        crew.hiring = False
        until = time.monotonic() + self._close_seconds
        while crew.ready and time.monotonic() < until:
            for member in self._idle.values():
                crew.send(member, Order(drain=True, give_back=member.report.queued, stop=True, wait=WAIT))
            self._idle.clear()
            crew.wait(TICK)

    def _ready(self, member: Member) -> None:
        self._engine.accept(member)
        self._idle[member.number] = member

    def _reported(self, member: Member, report: Report) -> None:
        assert isinstance(report, StreamReport)
        for key in report.returned:
            self._leases.returned(member.number, key)
        for key, bits in report.captures:
            if self._leases.written(member.number, key, bits.nbytes) is not None:
                self._leases.sealed(member.number, key)
                self._leases.forget(key)
                self._hand(key, tensor_of(np.array(bits), self._engine.spec.dtype))
        for failure in report.failed:
            if self._leases.failed(member.number, failure.key) is not None:
                self._again(failure)
        if not report.ended:
            self._idle[member.number] = member

    def _hand(self, key: str, states: torch.Tensor) -> None:
        self._tries.pop(key, None)
        with self._lock:
            future = self._waiting.pop(key, None)
        if future is not None:
            self.captured += 1
            future.set_result(states)

    def _again(self, failure: Failure) -> None:
        """Ask once more, or tell who waits that it is in vain: a trainer must not silently learn from fewer rows."""
        self._tries[failure.key] += 1
        if failure.retryable and self._tries[failure.key] < TRIES:
            self._leases.again([failure.key])
            return
        with self._lock:
            future = self._waiting.pop(failure.key, None)
        if future is not None:
            future.set_exception(
                CaptureError(
                    f"row {failure.key} gave no capture in {self._tries[failure.key]} tries ({failure.kind}: {failure.message}); "
                    "take it out of the rows, or extract first and train from the store"
                )
            )

    def _lost(self, member: Member, error: HeadraceError) -> None:
        lost = self._leases.lose(member.number)
        self._idle.pop(member.number, None)
        for key in lost.again:
            if isinstance(error, LostError) and error.host:
                self._leases.again([key])
            else:
                self._again(Failure(key, "engine_died", str(error)))
