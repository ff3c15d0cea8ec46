"""The workers of a distributed extraction as the driver sees them: hired, ready, lost, hired again with patience, let go.

What they run on is behind :class:`Cluster` (Ray, processes of this host, or threads in a test). Workers join whenever the cluster has room for
more than there are, and leave by dying; each gets a new number, so that nothing late is mistaken for its successor's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    HeadraceError,
    PreflightError,
    StorageFullError,
    UsageError,
)
from headrace.extract.remote_worker import Order, Ready, Report

FRUITLESS_DEATHS = 5
"""A place whose workers died so often with no row between is given up."""
MOST_DELAY = 30.0
LOOK_AT_CLUSTER = 2.0
CLOSE_SECONDS = 10.0


class LostError(EngineUnavailableError):
    """A worker's process is gone."""

    def __init__(self, message: str, host: bool = False) -> None:
        super().__init__(message)
        self.host = host
        """Whether its whole host is gone: then no row is to blame."""


class Handle(Protocol):
    """One worker process, with one call in it at a time."""

    def open(self) -> None:
        """Call :meth:`RemoteWorker.open`."""

    def exchange(self, order: Order) -> None:
        """Call :meth:`RemoteWorker.exchange`."""

    def result(self) -> Any:
        """What the call returned; raises what it raised, or LostError."""

    def kill(self) -> None:
        """End the process; idempotent."""


class Cluster(Protocol):
    """Where workers run."""

    hint: str
    """What to do when no worker becomes ready, for messages."""

    def wanted(self) -> int:
        """Workers there should be now."""

    def start(self, place: int) -> Handle:
        """A new worker for the ``place``-th of them; it may take long until it has room to run."""

    def wait(self, handles: Collection[Handle], seconds: float) -> list[Handle]:
        """Those whose call has ended, at the latest after ``seconds``."""

    def close(self) -> None:
        """Leave the cluster; idempotent."""


def options_of(options: dict[str, Any], urls: list[str], workers: int, place: int) -> dict[str, Any]:
    """The engine options of the ``place``-th of ``workers``, with its share of ``urls``, or the one that it shares with others.

    Raises ConfigError when it has several and its engine takes one.
    """
    if not urls:
        return dict(options)
    mine = urls[place::workers] if workers < len(urls) else [urls[place % len(urls)]]
    if isinstance(options["url"], list):
        return {**options, "url": mine}
    if len(mine) > 1:
        raise ConfigError(
            f"--url: the engine takes one URL, so {len(urls)} of them need as many workers, and there are {workers}"
        )
    return {**options, "url": mine[0]}


@dataclass(slots=True, eq=False)
class Member:
    """One worker."""

    number: int
    place: int
    handle: Handle
    ready: Ready | None = None
    called: float = 0.0
    """When its present call began."""
    report: Report = field(default_factory=Report)
    """Its latest one."""
    stopping: bool = False
    successes: int = 0


@dataclass(slots=True)
class Place:
    """Where workers follow one another."""

    fruitless: int = 0
    due: float = 0.0
    """When the next one may be hired."""
    given_up: bool = False


class Crew:
    """Hires and follows workers. :meth:`wait` is called again and again and calls the three functions below."""

    def __init__(self, cluster: Cluster, *, patience: float, silence: float) -> None:
        """``patience``: seconds without any ready worker after which hope is given up; ``silence``: seconds that a call may take."""
        self.cluster = cluster
        self.patience, self.silence = patience, silence
        self.members: dict[int, Member] = {}
        self.on_ready: Callable[[Member], None] = lambda member: None
        """A worker's engine is open; raising a HeadraceError refuses it."""
        self.on_report: Callable[[Member, Report], None] = lambda member, report: None
        self.on_lost: Callable[[Member, HeadraceError], None] = lambda member, error: None
        self.hiring = True
        self._places: dict[int, Place] = {}
        self._number = 0
        self._looked = float("-inf")
        self._wanted = 0
        self._nobody_since: float | None = None
        self._last_error: HeadraceError | None = None
        self._ever_ready = False

    @property
    def ready(self) -> list[Member]:
        """Workers that can be given orders or have some."""
        return [member for member in self.members.values() if member.ready is not None]

    def send(self, member: Member, order: Order) -> None:
        """Give ``member``, whose last call has ended, its next order."""
        member.called = time.monotonic()
        member.stopping = member.stopping or order.stop
        member.handle.exchange(order)

    def wait(self, seconds: float) -> None:
        """Follow everyone for a moment. Raises the error that leaves no hope of another worker."""
        if self.hiring:
            self._hire()
        handles = {id(member.handle): member for member in self.members.values()}
        if handles:
            done = self.cluster.wait([member.handle for member in handles.values()], seconds)
        else:
            time.sleep(seconds)
            done = []
        for handle in done:
            self._ended(handles[id(handle)])
        now = time.monotonic()
        for member in list(self.members.values()):
            if member.ready is not None and now - member.called > self.silence:
                self._lose(
                    member, LostError(f"it has said nothing for {self.silence / 60:g} minutes", host=True)
                )

    # --- hiring -------------------------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        now = time.monotonic()
        if now - self._looked > LOOK_AT_CLUSTER:
            self._looked = now
            self._wanted = self.cluster.wanted()
        taken = {member.place for member in self.members.values()}
        for number in range(self._wanted):
            place = self._places.setdefault(number, Place())
            if number in taken or place.given_up or now < place.due:
                continue
            self._number += 1
            member = Member(self._number, number, self.cluster.start(number), called=now)
            member.handle.open()
            self.members[member.number] = member
        self._give_up_hope(now)

    def _give_up_hope(self, now: float) -> None:
        """Raises when no place is left that a worker could live in, or nobody has been ready for too long."""
        if self.ready:
            self._nobody_since = None
            return
        self._nobody_since = self._nobody_since or now
        all_given_up = bool(self._places) and all(place.given_up for place in self._places.values())
        if all_given_up or now - self._nobody_since > self.patience:
            raise self._last_error or EngineUnavailableError(
                f"no worker became ready within {self.patience / 60:g} minutes; {self.cluster.hint}, then run the command again"
            )

    # --- what becomes of them -----------------------------------------------------------------------------------------------

    def _ended(self, member: Member) -> None:
        """A call has returned or failed."""
        try:
            result = member.handle.result()
            if isinstance(result, Ready):
                self._accept(member, result)
                return
        except HeadraceError as exc:
            self._lose(member, exc)
            return
        member.report = result
        member.successes += len(result.written)
        if result.written:
            self._places[member.place].fruitless = 0
        self.on_report(member, result)
        if not result.ended:
            return
        if result.error is not None:
            self._lose(member, result.error)
        elif member.stopping:
            self.let_go(member)
        else:
            self._lose(member, EngineError("its pipeline ended by itself; please report this"))

    def _accept(self, member: Member, ready: Ready) -> None:
        member.ready = ready
        self._ever_ready = True
        member.called = time.monotonic()
        self.on_ready(member)

    def _lose(self, member: Member, error: HeadraceError) -> None:
        """Raises ``error`` where another worker would meet the same one."""
        self.let_go(member)
        place, now = self._places[member.place], time.monotonic()
        if not (isinstance(error, LostError) and error.host):
            place.fruitless += 1
        place.due = now + min(MOST_DELAY, 2.0 ** (place.fruitless - 1)) if place.fruitless else now
        place.given_up = place.fruitless >= FRUITLESS_DEATHS
        self._last_error = error
        self.on_lost(member, error)
        hopeless = isinstance(error, UsageError | PreflightError) and not self._ever_ready
        if hopeless or isinstance(error, StorageFullError):
            raise error

    def let_go(self, member: Member) -> None:
        """End ``member`` without waiting for it."""
        self.members.pop(member.number, None)
        member.handle.kill()

    def close(self) -> None:
        """Let everyone go at once, and leave the cluster; idempotent."""
        self.hiring = False
        for member in list(self.members.values()):
            self.let_go(member)
        self.cluster.close()
