"""What runs in each worker of a distributed extraction: one engine, one pipeline, one writer, and orders from the driver.

A plain class: Ray makes an actor of it, a process of its own may serve it, a test may put it in a thread. It captures what it is handed, writes its own
shards, and reports each row written, sealed or failed; it decides nothing about rows, the driver does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from headrace._version import __version__
from headrace.engines.base import Check, Engine, EngineInfo, open_engine
from headrace.errors import EngineError, HeadraceError, PreflightError, SpecMismatchError
from headrace.extract import checks
from headrace.extract.admission import Budget, Portions
from headrace.extract.config import ExtractConfig
from headrace.extract.norms import NormCounts
from headrace.extract.parts import limits_of, make_guard, make_writer
from headrace.extract.pipeline import Pipeline
from headrace.extract.progress import Progress
from headrace.extract.worker import Worker
from headrace.store import StoreWriter
from headrace.target import Target
from headrace.types import CaptureSpec, Failure, Row

if TYPE_CHECKING:
    from headrace.extract.own_server import OwnServer

NEVER = 1 << 60
LOOK_SECONDS = 0.02
REPORT_SECONDS = 0.1
"""Between two reports, at least: what came together travels together."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that a worker must know before it opens its engine; plain values."""

    config: dict[str, Any]
    """The extraction's config, dumped."""
    options: dict[str, Any]
    """The engine's own options, this worker's URLs among them."""
    spec: dict[str, Any]
    codec: str
    longest: int
    """Tokens of the longest row."""
    version: str = __version__


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker's engine is open."""

    info: EngineInfo
    checks: list[Check]
    want: int
    """Tokens of rows it wants to hold unanswered."""
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the driver says to a worker."""

    rows: list[Row] = field(default_factory=list)
    drain: bool = False
    """There is nothing more for now: answer what you have without waiting for more rows."""
    give_back: int = 0
    """Rows to return, of those not begun with."""
    seal: bool = False
    """Seal what is written."""
    stop: bool = False
    """No row will follow: finish and close."""
    writers: int = 1
    """Workers that write to the same disk."""
    expected: int | None = None
    """Tokens still to come, about, where that is known: what it has and its part of what is left. Its last shards get smaller and
    smaller with it, so that little is left to write when the last state has come."""
    wait: float = 0.5
    """Seconds to wait for something to report, at most."""


@dataclass(kw_only=True)
class Report:
    """What a worker says to the driver."""

    written: list[tuple[str, int]] = field(default_factory=list)
    """Key and raw bytes of rows that are in the open shard now."""
    sealed: list[str] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    norms: NormCounts | None = None
    gauges: dict[str, float] = field(default_factory=dict)
    queued: int = 0
    """Rows not begun with."""
    free: int = 0
    """Bytes free where it writes."""
    paused: str = ""
    """Why it admits nothing, if so."""
    ended: bool = False
    error: HeadraceError | None = None
    """What ended it, if that was an error."""


class RemoteWorker:
    """One worker. :meth:`open` once, then :meth:`exchange` again and again until a report says that it has ended."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._stack = contextlib.ExitStack()
        self._server: OwnServer | None = None
        self._outbox = Report()
        self._lock = threading.Condition()
        self._unsealed: deque[str] = deque()
        self._paused = ""
        self._writers = 1
        self._thread: Worker | None = None
        self._budget = Budget(0)
        self._portions = Portions(self._budget.wake)

    # --- opening ------------------------------------------------------------------------------------------------------------

    def open(self) -> Ready:
        """Open the engine. Raises what the engine raises, SpecMismatchError when this host has another target."""
        if self.setup.version != __version__:
            raise PreflightError(
                f"host {socket.gethostname()} has Headrace {__version__}, the driver {self.setup.version}; install one version everywhere"
            )
        self.config = ExtractConfig.model_validate(self.setup.config)
        self.spec = CaptureSpec.from_dict(self.setup.spec)
        target = Target.open(self.config.model, self.config.revision)
        here = target.spec(self.config.taps, dtype=self.config.dtype, final_normed=self.config.final_normed)
        if here != self.spec:
            raise SpecMismatchError(
                f"host {socket.gethostname()} has another target at {self.config.model} ({'; '.join(self.spec.differences(here))}); "
                "give every host the same files"
            )
        self.engine = self._open_engine(target)
        want = checks.budget_tokens(self.config, self.engine, self.setup.longest)
        self._budget.limit = want
        return Ready(
            info=self.engine.info,
            checks=self.engine.preflight(),
            want=want,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def _open_engine(self, target: Target) -> Engine:
        options = dict(self.setup.options)
        if self.config.engine == "sglang" and not options.get("url"):
            from headrace.extract.own_server import OwnServer

            self._server = OwnServer(self.config, target)
            self._stack.callback(self._server.stop)
            options["url"] = [self._server.start()]
        engine = open_engine(self.config.engine, target, self.spec, options)
        self._stack.callback(engine.close)
        return engine

    def abandon(self) -> None:
        """The driver is gone: end what would outlive this process. May be called by any thread, whatever others do here."""
        if self._server is not None:
            self._server.stop()

    def _begin(self) -> None:
        """Open the writer and start the pipeline: from the first order on, when the driver has accepted this worker."""
        writer = make_writer(self.config, self.spec, self.setup.codec, self.engine)
        self._stack.callback(writer.close)
        progress = Progress(rows=0, tokens=NEVER)
        # Every writer sees the same free space, and each of them has as much on its way there.
        guard = make_guard(self.config, self.spec, self._budget, progress, share=lambda: self._writers)
        limits = limits_of(self.config, tries=1, failures_in_a_row=NEVER, failed_share=1.0)
        self.pipeline = Pipeline(
            self.engine,
            Reporting(writer, self),
            budget=self._budget,
            guard=guard,
            progress=progress,
            limits=limits,
        )
        self.pipeline.on_note = self._note
        self._writer = writer
        self._thread = Worker("remote", self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            with self._stack:
                self.pipeline.serve(self._portions)
        finally:
            with self._lock:
                self._lock.notify_all()

    # --- what the pipeline tells ------------------------------------------------------------------------------------------

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        with self._lock:
            if kind == "set_aside":
                self._outbox.failed.append(
                    Failure(fields["key"], fields["kind"], fields["message"], fields["retryable"])
                )
                self._lock.notify_all()
            elif kind == "pause":
                self._paused = fields["message"]
            elif kind == "unpause":
                self._paused = ""
            elif kind != "failure":  # the driver makes its own of a failure
                self._outbox.notes.append((kind, fields))

    def wrote(self, key: str, raw_bytes: int) -> None:
        """The writer has ``key``."""
        with self._lock:
            self._outbox.written.append((key, raw_bytes))
            self._unsealed.append(key)
            self._lock.notify_all()

    # --- orders and reports -----------------------------------------------------------------------------------------------

    def exchange(self, order: Order) -> Report:
        """Do as ``order`` says; what has happened since the last call, at the latest after ``order.wait`` seconds."""
        if self._thread is None:
            self._begin()
        self._writers = order.writers
        if order.expected is not None:
            self._writer.expect(order.expected * self.spec.bytes_per_token)
        back = self._portions.give_back(order.give_back)
        self._portions.add(order.rows, drain=order.drain)
        if order.seal:
            self.pipeline.seal_soon()
        if order.stop:
            self._portions.close()
        self._wait(REPORT_SECONDS, lambda: self._ended)
        self._wait(order.wait - REPORT_SECONDS, lambda: self._ended or self._has_news() or bool(back))
        return self._report([row.key for row in back])

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        """Wait until ``over``. It is looked at now and then too: the end of a thread or of a seal wakes nobody."""
        until = time.monotonic() + seconds
        with self._lock:
            while not over() and (left := until - time.monotonic()) > 0:
                self._lock.wait(min(left, LOOK_SECONDS))

    @property
    def _ended(self) -> bool:
        return self._thread is not None and self._thread.ended

    def _has_news(self) -> bool:
        self._see_sealed()
        box = self._outbox
        return bool(box.written or box.sealed or box.failed)

    def _see_sealed(self) -> None:
        done = self._writer.done
        while self._unsealed and self._unsealed[0] in done:
            self._outbox.sealed.append(self._unsealed.popleft())

    def _report(self, returned: list[str]) -> Report:
        assert self._thread is not None
        ended = self._ended  # before the outbox is emptied: nothing may come after the last report
        with self._lock:
            self._see_sealed()
            report, self._outbox = self._outbox, Report()
        report.returned = returned
        report.norms = self.pipeline.verifier.norms.take()
        report.queued = len(self._portions)
        report.free = self.pipeline.guard.last.free
        report.paused = self._paused
        report.ended = ended
        if ended:
            report.error = as_ours(self._thread.error)
        else:
            report.gauges = self.engine.gauges()
        return report


class Reporting:
    """The store's writer, telling the worker of every row that it has taken."""

    def __init__(self, writer: StoreWriter, worker: RemoteWorker) -> None:
        self._writer, self._worker = writer, worker

    def add(self, row: Row, states: torch.Tensor) -> None:
        """See :class:`headrace.extract.stages.Sink`. A row that the store has already counts as written: it is there."""
        self._writer.add(row, states)
        self._worker.wrote(row.key, states.numel() * states.element_size())

    def seal(self) -> None:
        """See :class:`headrace.extract.stages.Sink`."""
        self._writer.seal()


def as_ours(error: BaseException | None) -> HeadraceError | None:
    """``error`` as one of ours: what a bug raised travels as its traceback, since its class may not exist elsewhere."""
    if error is None or isinstance(error, HeadraceError):
        return error
    lines = "".join(traceback.format_exception(error))
    return EngineError(f"a worker on {socket.gethostname()} failed:\n{lines}")
