"""The event log: what an extraction did, as JSON lines that survive a kill and that any shell can read while they grow.

Each event is one ``write`` of one line to a file opened for appending, so lines of a killed process are whole except
at most the last; a later session starts on a fresh line, and a reader skips what does not parse. When the file
has grown large it is renamed to ``events.1.jsonl`` (older ones to 2, 3, ...) and a new one begun.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from headrace.files import FULL_ERRNOS

MAX_BYTES: Final = 8 << 20
KEEP: Final = 24
"""Rotated files kept: with 8 MiB each, weeks of a run."""


class EventLog:
    """Appends events. Not thread-safe: the supervisor alone writes."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.keep = keep
        self._fd = self._open()
        self._cut = self._torn()
        """Whether the file ends within a line, which the next event must not continue."""

    def write(self, kind: str, /, *, durable: bool = False, **fields: Any) -> None:
        """Append one event; ``durable`` also waits until it is on the disk. On a full disk the event is lost and the run goes on."""
        record = {"time": round(time.time(), 3), "event": kind, **fields}
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            if os.fstat(self._fd).st_size + len(line) > self.max_bytes:
                self._rotate()
            if self._cut:
                line = b"\n" + line
            self._cut = os.write(self._fd, line) < len(line)
            if durable:
                os.fsync(self._fd)
        except OSError as exc:
            if exc.errno not in FULL_ERRNOS:
                raise
            self._cut = True

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _torn(self) -> bool:
        size = os.fstat(self._fd).st_size
        if not size:
            return False
        with open(self.path, "rb") as file:
            file.seek(size - 1)
            return file.read(1) != b"\n"

    def _rotate(self) -> None:
        os.close(self._fd)
        rotated(self.path, self.keep).unlink(missing_ok=True)
        for number in range(self.keep - 1, 0, -1):
            if rotated(self.path, number).exists():
                rotated(self.path, number).replace(rotated(self.path, number + 1))
        self.path.replace(rotated(self.path, 1))
        self._fd = self._open()


def rotated(path: Path, number: int) -> Path:
    """Name of the ``number``-th rotated file: 1 is the youngest."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def read_events(path: Path, *, rotated_only: bool = False) -> Iterator[dict[str, Any]]:
    """All events that are left, oldest first; lines that do not parse are skipped."""
    numbers: list[int] = []
    while rotated(path, len(numbers) + 1).exists():
        numbers.append(len(numbers) + 1)
    files = [rotated(path, n) for n in reversed(numbers)]
    for file in files if rotated_only else [*files, path]:
        try:
            with open(file, "rb") as handle:
                for line in handle:
                    if (event := parse_event(line)) is not None:
                        yield event
        except FileNotFoundError:
            continue  # rotated away this moment, or nothing was written yet


def tail_events(path: Path, count: int = 200) -> list[dict[str, Any]]:
    """The last ``count`` events, oldest first, at a cost that does not grow with the log."""
    out: list[dict[str, Any]] = []
    number = 0
    while len(out) < count:
        file = path if number == 0 else rotated(path, number)
        try:
            out = _last_events(file, count - len(out)) + out
        except FileNotFoundError:
            break
        number += 1
    return out


def _last_events(file: Path, count: int) -> list[dict[str, Any]]:
    with open(file, "rb") as handle:
        place = handle.seek(0, os.SEEK_END)
        data = b""
        events: list[dict[str, Any]] = []
        step = 1 << 16
        while place > 0 and len(events) < count:
            step = min(2 * step, place)
            place -= step
            handle.seek(place)
            data = handle.read(step) + data
            lines = data.splitlines()[1 if place else 0 :]  # the first line of a block may begin before it
            events = [event for line in lines if (event := parse_event(line)) is not None]
    return events[-count:]


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One line as an event; None for anything else."""
    try:
        value = json.loads(line)
    except ValueError:  # torn by a kill, or still being written
        return None
    return value if isinstance(value, dict) and "event" in value and "time" in value else None
