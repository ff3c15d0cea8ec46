"""The driver of a distributed extraction: hands out leases, keeps the account, and has the face of a :class:`Pipeline`.

Workers verify, encode and write; here a row only changes hands. It is done when its shard is sealed, wherever; a worker
that dies costs what it had not sealed. Failures, rounds of retries and their limits are those of one process.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from headrace.errors import HeadraceError
from headrace.extract.admission import Budget
from headrace.extract.crew import CLOSE_SECONDS, LostError, Member
from headrace.extract.crew_engine import TICK, CrewEngine
from headrace.extract.disk import DiskGuard
from headrace.extract.leases import Leases
from headrace.extract.progress import Progress
from headrace.extract.remote_worker import Order, Report
from headrace.extract.stages import Flight, Limits, Notes, Verifier
from headrace.types import Failure, Row

LEAD_SECONDS = 0.5
"""Rows are handed out so far ahead of the engine's own wishes, by the rate of late."""
LATE = 4.0
"""A row counts as late when it takes so many times longer than rows do, and a worker is idle."""
LATE_SECONDS = 2.0
MOMENT = 1.0
"""How long a worker is waited for at the end whose engine still works on rows that nobody needs any more."""
UNLIMITED = 1 << 62


class CrewPipeline:
    """Takes rows through a crew into a store. Used once: :meth:`run`, in the thread that takes the signals."""

    def __init__(
        self,
        engine: CrewEngine,
        *,
        guard: DiskGuard,
        progress: Progress,
        limits: Limits,
        tokens: int,
        lease_seconds: float,
    ) -> None:
        """``guard`` is looked at for the free space alone: each worker guards its own writing. ``tokens`` are to do."""
        self.engine, self.crew = engine, engine.crew
        self.guard, self.progress, self.limits = guard, progress, limits
        self.tokens, self.lease_seconds = tokens, lease_seconds
        self.on_tick: Callable[[], None] = lambda: None
        """See :class:`Pipeline`, as for the next three."""
        self.on_note: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None
        self.stopping = ""
        self.aborted = False
        self._budget = Budget(UNLIMITED)
        self._notes: Notes = queue.SimpleQueue()
        self.verifier = Verifier(engine.spec, Flight(), self._budget, progress, limits, self._notes)
        self._deaths: Counter[str] = Counter()
        self._alone: deque[str] = deque()
        self._on_trial: str | None = None
        """The row that is out alone, because a worker died twice while it had it."""
        self._round = 1
        self._paused = ""
        self._rates: dict[int, float] = {}
        """Tokens a second that each worker answers, lately."""
        self._heard: dict[int, float] = {}
        self._idle: dict[int, Member] = {}
        """Workers whose last call has ended, waiting for an order."""

    def run(self, rows: Iterable[Row], get: Callable[[str], Row]) -> None:
        """As :meth:`Pipeline.run`; StorageFullError when a worker's disk stays full."""
        self._get = get
        self.leases = Leases(rows, get, self.tokens)
        self.crew.on_ready, self.crew.on_report, self.crew.on_lost = self._ready, self._report, self._lost
        try:
            for member in self.crew.ready:
                self._ready(member)
            self._work()
        finally:
            self._finish()

    def _work(self) -> None:
        while True:
            while self.leases.unsettled or self._alone:
                if self.stopping and not self.leases.unanswered:
                    return
                self._tick()
            if not self.verifier.retry or self.stopping:
                return
            self._next_round()

    def _next_round(self) -> None:
        keys, self.verifier.retry = self.verifier.retry, []
        self._round += 1
        self._note("round", rows=len(keys), number=self._round)
        until = time.monotonic() + min(60.0, self.limits.retry_pause_seconds * 2 ** (self._round - 2))
        while time.monotonic() < until and not self.stopping:
            self._tick()
        self.leases.again(keys)

    def _tick(self) -> None:
        self._give_orders()
        self.crew.wait(TICK)
        self._look_at_pauses()
        self._pass_notes()
        self.on_tick()
        if self.verifier.fatal is not None:
            raise self.verifier.fatal

    def _look_at_pauses(self) -> None:
        self.guard.look()
        paused = [member.report.paused for member in self.crew.ready]
        now = paused[0] if paused and all(paused) else ""
        if bool(now) != bool(self._paused):
            self.progress.pause("disk full" if now else "")
            self._note(
                "pause" if now else "unpause",
                message=now or "there is space again; going on",
                free=self.guard.last.free,
            )
        self._paused = now

    # --- orders -------------------------------------------------------------------------------------------------------------

    def _give_orders(self) -> None:
        """Every worker whose call has ended gets its next one."""
        waiting, self._idle = self._idle, {}
        # Those with the least to do come first: the last rows go to them.
        for member in sorted(waiting.values(), key=lambda m: self.leases.out_tokens(m.number)):
            if member.number in self.crew.members:
                self.crew.send(member, self._order(member))

    def _order(self, member: Member) -> Order:
        number, writers = member.number, max(1, len(self.crew.ready))
        mine = self.leases.out(number)
        rows: list[Row] = []
        if not self.stopping:
            rows = self._rows_for(member)
        for row in rows:
            self._budget.take(len(row))
            self.progress.admitted(len(row))
        nothing_more = self.stopping != "" or self.leases.dry or self._share() < self.engine.want
        back = 0
        if self.stopping:
            back = member.report.queued
        elif not rows and self.leases.dry and self._someone_idle(number):
            back = (member.report.queued + 1) // 2
        idle = not rows and not mine
        return Order(
            rows=rows,
            drain=nothing_more,
            give_back=back,
            seal=idle and bool(self.leases.open(number)),
            writers=writers,
            expected=self.leases.left // writers + self.leases.out_tokens(number),
        )

    def _rows_for(self, member: Member) -> list[Row]:
        number = member.number
        # What its engine wants, and what it gets through until it is heard of again.
        wanted = self.engine.want + int(LEAD_SECONDS * self._rates.get(number, 0.0))
        room = min(wanted, self._share()) - self.leases.out_tokens(number)
        if self._on_trial is not None:
            return []
        if self.leases.dry:
            if self.leases.out(number) == 0 and self._alone and not self.leases.unanswered:
                self._on_trial = self._alone.popleft()
                self.leases.again([self._on_trial])
                return self.leases.take(number, 1)
            return self._late_rows(number, room)
        rows = self.leases.take(number, room)
        return rows or self._late_rows(number, room, patience=self.lease_seconds)

    def _share(self) -> int:
        """Tokens a worker may hold: near the end, its part of what is left, so that all end together."""
        if self.leases.dry:
            return self.engine.want
        # Those still on their way count: else the first one there would take a short run's rows for itself.
        return max(1, self.leases.left // max(1, len(self.crew.members)))

    def _late_rows(self, number: int, room: int, patience: float | None = None) -> list[Row]:
        """Rows that others have had for too long: for anyone after the lease's end, sooner for a worker with nothing to do."""
        if patience is None:
            patience = self.lease_seconds
            # Before the first answer nobody knows how long a row takes: one that holds all rows of a short run is not late.
            if self.leases.out(number) == 0 and self.leases.typical:
                patience = min(patience, max(LATE_SECONDS, LATE * self.leases.typical))
        rows = self.leases.copies(number, room, patience)
        if rows:
            self._note("lease_copied", worker=number, rows=len(rows))
        return rows

    def _someone_idle(self, but: int) -> bool:
        return any(m.number != but and not self.leases.out(m.number) for m in self.crew.ready)

    # --- what workers say ---------------------------------------------------------------------------------------------------

    def _ready(self, member: Member) -> None:
        self.engine.accept(member)
        assert member.ready is not None
        self._idle[member.number] = member
        self._note("worker_joined", worker=member.number, host=member.ready.host, pid=member.ready.pid)

    def _report(self, member: Member, report: Report) -> None:
        number = member.number
        for key in report.returned:
            self._came_back(self.leases.returned(number, key))
        before = self.leases.out_tokens(number)
        for key, raw_bytes in report.written:
            self._written(number, key, raw_bytes)
        self._measure(number, before - self.leases.out_tokens(number))
        for failure in report.failed:
            self._failed(number, failure)
        for key in report.sealed:
            self.leases.sealed(number, key)
        if report.norms is not None:
            self.verifier.norms.merge(report.norms)
        for kind, fields in report.notes:
            if kind == "stray_answer":
                self.progress.error(kind)
            self._note(kind, worker=number, **fields)
        if not report.ended:
            self._idle[number] = member

    def _measure(self, number: int, tokens: int) -> None:
        now = time.monotonic()
        if number in self._heard and tokens:
            rate = tokens / max(1e-3, now - self._heard[number])
            self._rates[number] = 0.5 * (self._rates.get(number, rate) + rate)
        self._heard[number] = now

    def _came_back(self, tokens: int) -> None:
        if tokens:
            self._budget.give(tokens)
            self.progress.returned(tokens)

    def _written(self, number: int, key: str, raw_bytes: int) -> None:
        found = self.leases.written(number, key, raw_bytes)
        if found is None:
            return
        tokens, first = found
        if not first:
            self._came_back(tokens)
            return
        self._tried(key)
        self._budget.give(tokens)
        self.progress.answered(tokens)
        self.verifier.succeeded()
        self.progress.written(tokens, raw_bytes)

    def _failed(self, number: int, failure: Failure) -> None:
        found = self.leases.failed(number, failure.key)
        if found is None:
            return
        tokens, counts = found
        if not counts:
            self._came_back(tokens)
            return
        self._tried(failure.key)
        self.progress.answered(tokens)
        self.verifier.fail(self._get(failure.key), failure)
        if failure.key in self.verifier.failed:
            self.leases.settle(failure.key)

    def _tried(self, key: str) -> None:
        if key == self._on_trial:
            self._on_trial = None

    def _lost(self, member: Member, error: HeadraceError) -> None:
        """Its rows go to others; those that were with it at two deaths go one by one, and a row that kills alone is set aside."""
        lost = self.leases.lose(member.number)
        self._idle.pop(member.number, None)
        unsealed = [key for key in lost.unsealed if not self.leases.held_elsewhere(key)]
        if member.ready is not None:
            self._note(
                "worker_lost", worker=member.number, message=str(error), rows=len(lost.again) + len(unsealed)
            )
            self.progress.error("worker_lost")
        for held in lost.out.values():
            self._came_back(held.tokens)
        for written in lost.unsealed.values():
            self.progress.lost(written.tokens, written.raw_bytes)
        blameless = isinstance(error, LostError) and error.host
        self.leases.again(unsealed)
        for key in lost.again:
            self._blame(key, error, blameless)

    def _blame(self, key: str, error: HeadraceError, blameless: bool) -> None:
        on_trial = key == self._on_trial
        self._tried(key)
        if not blameless:
            self._deaths[key] += 1
        if on_trial and not blameless:
            message = f"a worker died on this row alone: {error}"
            self.verifier.set_aside(self._get(key), Failure(key, "engine_died", message, retryable=False))
            self.leases.settle(key)
        elif self._deaths[key] >= 2:
            self._alone.append(key)
        else:
            self.leases.again([key])

    # --- the end ------------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Have every worker seal and end. Not when aborted; who is stuck, or holds only copies of settled rows, is let go."""
        self.crew.hiring = False
        if self.aborted:
            self._pass_notes()
            return
        asked: dict[int, float] = {}
        while self.crew.members:
            now = time.monotonic()
            for member in list(self._idle.values()):
                # Rows in its engine that others have settled are waited for no longer than a moment.
                self.crew.send(
                    member, Order(give_back=member.report.queued, drain=True, seal=True, stop=True)
                )
                asked.setdefault(member.number, now)
            self._idle.clear()
            for member in list(self.crew.members.values()):
                patience = MOMENT if self.leases.out(member.number) else CLOSE_SECONDS
                late = now - asked.get(member.number, now) > patience
                if member.ready is None or (late and not self.leases.open(member.number)):
                    self._let_go(member)
            self.crew.wait(TICK)
            self._pass_notes()
            self.on_tick()

    def _let_go(self, member: Member) -> None:
        """End ``member`` without waiting: what it still has is needed by nobody, or not reached in this run."""
        for held in self.leases.lose(member.number).out.values():
            self._came_back(held.tokens)
        self.crew.let_go(member)

    def _pass_notes(self) -> None:
        while not self._notes.empty():
            self.on_note(*self._notes.get())

    def _note(self, kind: str, **fields: Any) -> None:
        self._notes.put((kind, fields))
