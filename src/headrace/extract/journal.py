"""What a run leaves in writing: its manifest (config, spec, engine, one entry a session) and its event log."""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import UTC, datetime
from typing import Any

from headrace._version import __version__
from headrace.data.rows import RowFolder
from headrace.engines.base import EngineInfo
from headrace.errors import HeadraceError, StorageFullError
from headrace.extract.config import ExtractConfig
from headrace.extract.events import EventLog
from headrace.extract.files import RunFiles
from headrace.extract.norms import TapNorms
from headrace.extract.progress import Snapshot
from headrace.files import read_json, write_json
from headrace.types import CaptureSpec

log = logging.getLogger(__name__)
KIND = "headrace.extraction"
FORMAT = 1


class Journal:
    """Opened at the start of a session, closed at its end; the supervisor alone writes to it."""

    def __init__(
        self,
        files: RunFiles,
        config: ExtractConfig,
        spec: CaptureSpec,
        engine: EngineInfo,
        rows: RowFolder,
        codec: str,
    ) -> None:
        self.files = files
        self.place = config.place
        before = read_json(files.manifest) if files.manifest.is_file() else {}
        self._session: dict[str, Any] = {
            "started": _now(),
            "ended": None,
            "outcome": "running",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
        }
        self.manifest: dict[str, Any] = {
            "kind": KIND,
            "format": FORMAT,
            "config": config.model_dump(mode="json"),
            "spec": spec.to_dict(),
            "codec": codec,
            "engine": {"name": engine.name, "version": engine.version, "settings": engine.settings},
            "rows": {
                "path": str(config.rows),
                "rows": rows.manifest.get("rows"),
                "tokens": rows.manifest.get("tokens"),
                "content_hash": rows.manifest.get("content_hash", ""),
            },
            "sessions": [*_ended(before.get("sessions", [])), self._session],
        }
        write_json(files.manifest, self.manifest)
        self._events = EventLog(files.events)
        self._started = time.monotonic()
        self.event(
            "start",
            durable=True,
            session=len(self.manifest["sessions"]),
            pid=os.getpid(),
            engine=engine.name,
            engine_version=engine.version,
        )

    def event(self, kind: str, /, *, durable: bool = False, **fields: Any) -> None:
        """One line of the log."""
        self._events.write(kind, durable=durable, **fields)

    def progress(self, snapshot: Snapshot) -> None:
        """The state of the run at this moment."""
        self.event("progress", **snapshot.to_json())

    def norms(self, taps: list[TapNorms]) -> None:
        """Norm statistics so far."""
        if taps:
            self.event("norms", taps=[tap.to_json() for tap in taps])

    def end(self, result: dict[str, Any], error: HeadraceError | None) -> None:
        """The session is over: how, and with what figures."""
        outcome = "finished" if error is None else "interrupted" if error.exit_code == 130 else "failed"
        self._session.update(
            ended=_now(),
            outcome=outcome,
            error=None if error is None else {"kind": type(error).__name__, "message": str(error)},
            seconds=round(time.monotonic() - self._started, 2),
            result=result,
        )
        try:
            write_json(self.files.manifest, self.manifest)
        except StorageFullError as exc:  # the store is the ledger; this only tells of it
            log.warning("the end of this session is not recorded: %s", exc)
        self.event(
            "end", durable=True, outcome=outcome, error=None if error is None else str(error), result=result
        )

    def close(self) -> None:
        """Close the log; idempotent."""
        self._events.close()


def _ended(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier sessions: one that never said how it ended was killed, since the lock is ours now."""
    return [{**s, "outcome": "crashed"} if s["outcome"] == "running" else s for s in sessions]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
