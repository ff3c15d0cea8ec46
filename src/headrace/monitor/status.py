"""How an extraction stands, read from its records alone: works from any shell, on a running, finished or crashed run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.extract.events import tail_events
from headrace.extract.files import RunFiles
from headrace.extract.ledger import FailureFile
from headrace.extract.lock import is_live, read_owner
from headrace.files import read_json
from headrace.monitor.health import norm_warnings

State = Literal["starting", "running", "paused", "finished", "failed", "interrupted", "crashed"]
RECENT_EVENTS = 40
SHOWN_FAILURES = 200


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a run."""

    run: str
    state: State
    model: str
    engine: str
    codec: str
    taps: list[Any]
    sessions: int
    started: str
    """Start of the latest session (UTC)."""
    age_seconds: float | None
    """Since the last sign of life, by the file server's clock; None when there is none."""
    progress: dict[str, Any] | None
    """The latest snapshot (see :class:`headrace.extract.progress.Snapshot`)."""
    norms: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What the norms say is wrong."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Rows without a capture and why, newest last."""
    failures_total: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    """What happened lately, progress left out, oldest first."""
    error: str = ""
    """What ended the latest session, if it ended badly."""
    result: dict[str, Any] | None = None
    """The account of the latest session, once it has ended."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def read_status(path: Path) -> Status:
    """Read the run at ``path``. Raises InputError when there is none."""
    files = RunFiles.find(path)
    manifest = read_json(files.manifest)
    session = manifest["sessions"][-1]
    events = _of_session(tail_events(files.events, 400))
    progress = next((e for e in reversed(events) if e["event"] == "progress"), None)
    norms: list[dict[str, Any]] = next((e["taps"] for e in reversed(events) if e["event"] == "norms"), [])
    failures = [row.to_json() for row in FailureFile(files.failures).rows.values()]
    spec, engine = manifest["spec"], manifest["engine"]
    return Status(
        run=str(files.store),
        state=_state(files, session, progress),
        model=spec["target"],
        engine=f"{engine['name']} {engine['version']}",
        codec=manifest["codec"],
        taps=spec["taps"],
        sessions=len(manifest["sessions"]),
        started=session["started"],
        age_seconds=_age(files),
        progress=progress,
        norms=norms,
        warnings=norm_warnings(norms),
        failures=failures[-SHOWN_FAILURES:],
        failures_total=len(failures),
        events=[e for e in events if e["event"] not in ("progress", "norms")][-RECENT_EVENTS:],
        error=(session.get("error") or {}).get("message", ""),
        result=session.get("result"),
    )


def _of_session(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events since the latest start, if that is among them."""
    for place in range(len(events) - 1, -1, -1):
        if events[place]["event"] == "start":
            return events[place:]
    return events


def _state(files: RunFiles, session: dict[str, Any], progress: dict[str, Any] | None) -> State:
    owner = read_owner(files.lock)
    if session["outcome"] != "running":
        outcome: State = session["outcome"]
        return outcome
    if owner is None or not is_live(files.lock, owner):
        return "crashed"
    if progress is None:
        return "starting"
    return "paused" if progress["paused"] else "running"


def _age(files: RunFiles) -> float | None:
    try:
        return round(max(0.0, time.time() - files.events.stat().st_mtime), 1)
    except FileNotFoundError:
        return None
