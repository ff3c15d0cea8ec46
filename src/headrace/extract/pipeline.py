"""The pipeline: admit → in flight → verify → encode → write, each stage bounded, every row accounted for.

Threads only move rows along; every decision (next round, dead engine, pause, stop) is taken by the supervisor, the
thread that calls :meth:`Pipeline.run`. From admission until it is written a row's tokens count against one budget,
so a slow disk holds back admission and memory stays flat.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.engines.base import Engine
from headrace.errors import EngineError, EngineUnavailableError, HeadraceError, StorageFullError
from headrace.extract.admission import Budget, Feed, Portions, RowSource
from headrace.extract.disk import DiskGuard
from headrace.extract.progress import Progress
from headrace.extract.stages import Flight, Limits, Notes, Sink, Verifier, Writer, drive
from headrace.extract.worker import Worker
from headrace.types import Failure, Row

TICK = 0.1
LOOK_AT_DISK = 0.5
ROW_OVERHEAD = 512
FRUITLESS_DEATHS = 5
"""An engine that died so often with no success between is not brought back again."""


@dataclass(slots=True)
class Session:
    """One ``capture`` call: its input, its thread, and whether its answers still count."""

    feed: Feed
    worker: Worker | None = None
    alive: bool = True
    pulled: int = 0


class Pipeline:
    """Takes rows through an engine into a sink. Used once: :meth:`run`, in the thread that takes the signals."""

    def __init__(
        self,
        engine: Engine,
        sink: Sink,
        *,
        budget: Budget,
        guard: DiskGuard,
        progress: Progress,
        limits: Limits,
    ) -> None:
        self.engine = engine
        self.budget, self.guard, self.progress, self.limits = budget, guard, progress, limits
        self.reopen: Callable[[], Engine] | None = None
        """How to get a new engine when this one is dead; None: its death ends the run."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called by the supervisor about ten times a second."""
        self.on_note: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None
        """Receives every event, in the supervisor's thread."""
        self.stopping = ""
        """Why admission has ended early, empty while it has not. Set it (a signal handler may) to stop gracefully."""
        self.aborted = False
        """Set it before raising from a signal handler: nothing is waited for any more."""
        self._flight = Flight()
        self._notes: Notes = queue.SimpleQueue()
        self.verifier = Verifier(engine.spec, self._flight, budget, progress, limits, self._notes)
        self._writer = Writer(sink, self.verifier.checked, budget, progress, limits.seal_seconds)
        self._stages = [Worker("verify", self.verifier.run), Worker("write", self._writer.run)]
        self._session: Session | None = None
        self._deaths: Counter[str] = Counter()
        self._fruitless = 0
        self._successes_at_death = -1
        self._looked_at_disk = 0.0

    def row_bytes(self, tokens: int) -> int:
        """What a row of ``tokens`` takes on disk at most: its states, ids and mask, and its entries in the shard's tables."""
        return tokens * (self.engine.spec.bytes_per_token + 8) + ROW_OVERHEAD

    def run(self, rows: Iterable[Row], get: Callable[[str], Row]) -> None:
        """Capture ``rows``, then those that failed again (fetched with ``get``), then seal.

        Returns when all are stored or set aside, or when :attr:`stopping` was set and the rows in flight are done.
        Raises what a stage raised, EngineError for a dead engine, StorageFullError for a disk that stays full,
        IncompleteError for too many failures. Whatever was verified by then is sealed first, if the disk lets it.
        """
        with self._stages_running():
            self._capture(RowSource(rows))
            self._retry(get)

    def serve(self, source: Portions) -> None:
        """Capture what ``source`` is handed, portion after portion, until it is closed; then seal. Returns and raises as :meth:`run`.

        Nothing is tried again here: whoever hands the rows over decides what becomes of those that failed.
        """
        with self._stages_running():
            while True:
                self._until(lambda: bool(len(source)) or source.closed or bool(self.stopping))
                if self.stopping or not len(source):
                    return
                self._capture(source)

    @contextlib.contextmanager
    def _stages_running(self) -> Iterator[None]:
        self._look_at_disk()
        for stage in self._stages:
            stage.start()
        try:
            yield
        finally:
            self._finish()

    def seal_soon(self) -> None:
        """Have everything written so far sealed at the next moment; from any thread."""
        self._writer.seal_soon.set()

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _retry(self, get: Callable[[str], Row]) -> None:
        number = 0
        while self.verifier.retry and not self.stopping:
            keys, self.verifier.retry = self.verifier.retry, []
            self._note("round", rows=len(keys), number=number + 2)
            self._sleep(min(60.0, self.limits.retry_pause_seconds * 2**number))
            # Rows that were in flight at two deaths of the engine go one by one: the one that kills it is then known.
            alone = [key for key in keys if self._deaths[key] >= 2]
            crowd = [key for key in keys if self._deaths[key] < 2]
            self._capture(RowSource(map(get, crowd)))
            for key in alone:
                self._capture(RowSource([get(key)]), alone=True)
            number += 1

    def _capture(self, source: RowSource, alone: bool = False) -> None:
        """Take every row of ``source`` through the engine, through as many engines as it needs."""
        while not self.stopping:
            session = self._start(source)
            error = self._follow(session)
            self._until(lambda: not self.verifier.answers.unfinished_tasks)
            unanswered = self._flight.take_all()
            if error is None:
                for row in unanswered:
                    self.progress.answered(len(row))
                    self.verifier.fail(
                        row, Failure(row.key, "no_answer", "the engine ended without answering this row")
                    )
                with source.lock:
                    if source.peek() is None:
                        return
                if not session.pulled and not session.feed.dry and not self.stopping:
                    raise EngineError(
                        f"engine {self.engine.info.name} ended although there are rows left; restart it and run the command again"
                    )
                continue
            for row in unanswered:
                self._died_with(row, error, alone)
            if not isinstance(error, EngineUnavailableError) or self.reopen is None:
                raise error
            if not self.stopping:
                self._bring_back(error, self.reopen)

    def _start(self, source: RowSource) -> Session:
        def admitted(row: Row) -> None:
            session.pulled += 1
            self._flight.add(row)
            self.progress.admitted(len(row))

        feed = Feed(source, self.budget, lambda row: self.guard.take(self.row_bytes(len(row))), admitted)
        session = Session(feed)
        engine, answers = self.engine, self.verifier.answers
        session.worker = Worker(
            "engine", lambda: drive(lambda: engine.capture(feed), answers, lambda: session.alive)
        )
        self._session = session
        session.worker.start()
        return session

    def _follow(self, session: Session) -> BaseException | None:
        """Wait for the session's end; the error that ended it, if one did."""
        assert session.worker is not None
        while not session.worker.ended:
            self._tick(session.worker)
            if self._stalled():
                session.alive = False
                session.feed.close()
                minutes = self.limits.stall_seconds / 60
                return EngineUnavailableError(
                    f"engine {self.engine.info.name} has {len(self._flight)} rows and answered none for {minutes:g} minutes; look at it and restart it"
                )
        return session.worker.error

    def _stalled(self) -> bool:
        waiting = bool(len(self._flight)) and self.verifier.answers.empty()
        return waiting and time.monotonic() - self.progress.last_answer > self.limits.stall_seconds

    def _died_with(self, row: Row, error: BaseException, alone: bool) -> None:
        """The engine died while it held ``row``: it is innocent until it has done that alone."""
        self.budget.give(len(row))
        self.progress.returned(len(row))
        self._deaths[row.key] += 1
        if alone:
            failure = Failure(
                row.key, "engine_died", f"the engine died on this row alone: {error}", retryable=False
            )
            self.verifier.set_aside(row, failure)
        else:
            self.verifier.retry.append(row.key)

    def _bring_back(self, error: BaseException, reopen: Callable[[], Engine]) -> None:
        """Open the engine again, with patience. Raises ``error`` when it stays dead."""
        self._note("engine_lost", message=str(error))
        self.progress.error("engine_lost")
        self._fruitless = self._fruitless + 1 if self.verifier.successes == self._successes_at_death else 1
        self._successes_at_death = self.verifier.successes
        if self._fruitless >= FRUITLESS_DEATHS:
            raise error
        deadline = time.monotonic() + self.limits.engine_wait_seconds
        delay = 1.0
        while not self.stopping:
            opened: list[Engine] = []
            worker = Worker("reopen", lambda opened=opened: opened.append(reopen()))  # type: ignore[misc]
            worker.start()
            self._until(lambda worker=worker: worker.ended or time.monotonic() > deadline)  # type: ignore[misc]
            if opened:
                self.engine = opened[0]
                self._note("engine_back")
                return
            foreign = worker.error is not None and not isinstance(worker.error, HeadraceError)
            if foreign or time.monotonic() + delay > deadline:
                raise error from worker.error
            self._sleep(delay)
            delay = min(30.0, 2 * delay)

    # --- supervision -------------------------------------------------------------------------------------------------

    def _tick(self, wait_for: Worker | None = None) -> None:
        """One moment of the supervisor: sleeps a little (less when ``wait_for`` ends), then looks at everything."""
        if wait_for is not None:
            wait_for.join(TICK)
        else:
            time.sleep(TICK)
        if self._session is not None:
            if self.stopping:
                self._session.feed.close()
            if not self.guard.paused:
                self.progress.looked(self.verifier.backlog)
        now = time.monotonic()
        if now - self._looked_at_disk > LOOK_AT_DISK:
            self._looked_at_disk = now
            self._look_at_disk()
        self._pass_notes()
        self.on_tick()
        for stage in self._stages:
            if stage.error is not None:
                raise stage.error
        if self.verifier.fatal is not None:
            raise self.verifier.fatal

    def _look_at_disk(self) -> None:
        said = self.guard.look()
        if said is not None:
            paused = self.guard.paused
            self.progress.pause("disk full" if paused else "")
            self._note("pause" if paused else "unpause", message=said, free=self.guard.last.free)
        if self.guard.paused_seconds > self.limits.pause_seconds:
            raise StorageFullError(
                28,
                f"no space for {self.guard.folder} for {self.limits.pause_seconds / 60:g} minutes; free some and run the command again, it goes on",
            )

    def _pass_notes(self) -> None:
        while not self._notes.empty():
            self.on_note(*self._notes.get())

    def _note(self, kind: str, **fields: Any) -> None:
        self._notes.put((kind, fields))

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end or bool(self.stopping))

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._tick()

    def _finish(self) -> None:
        """End the stages: what is verified is written and sealed. Not when aborted, and no longer than they live."""
        if self._session is not None:
            self._session.feed.close()
            if self._session.worker is not None and not self._session.worker.ended:
                self._session.alive = False
        verify, write = self._stages
        if self.aborted or write.error is not None:
            self.verifier.abandoned = self._writer.abandoned = True
        if verify.error is None:
            self.verifier.answers.put(None)
        else:  # nobody reads the answers any more; what was already judged right is still written
            self.verifier.checked.put(None)
        if self.verifier.abandoned:
            self._pass_notes()
            return
        while not write.ended:
            write.join(TICK)
            self._pass_notes()
            self.on_tick()
        self._pass_notes()
        if write.error is not None:
            raise write.error
