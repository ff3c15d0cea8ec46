"""The course of a run as short series for charts: follows the growing event log, thins old points, never rereads it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

from headrace.extract.events import parse_event, read_events

SERIES: Final = (
    "tokens_per_second",
    "tokens_done",
    "rows_in_flight",
    "rows_behind",
    "staging_bytes",
    "disk_free",
    "bytes_stored",
)
MAX_POINTS: Final = 1500


class History:
    """Series of the progress events of one run; :meth:`update` takes in what was written since the last call.

    Thread-safe. Times are seconds since the first event, and never fall although a wall clock may.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._start: float | None = None
        self._points: list[list[float]] = []
        self._norms: list[list[float]] = []
        self._sessions: list[float] = []
        self._inode = -1
        self._offset = 0
        self._step = 1
        self._seen = 0

    def update(self) -> None:
        """Read what is new. The first call, and one after the log was rotated unseen, reads all there is."""
        with self._lock:
            try:
                stat = self.path.stat()
            except FileNotFoundError:
                return
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._start_over(stat.st_ino)
            self._read_on()

    def to_json(self) -> dict[str, Any]:
        """``t`` (seconds) and the series beside it; ``norms``: (t, median a tap...); ``sessions``: when each began."""
        with self._lock:
            columns = list(zip(*self._points, strict=True)) if self._points else [()] * (1 + len(SERIES))
            return {
                "t": list(columns[0]),
                **{name: list(column) for name, column in zip(SERIES, columns[1:], strict=True)},
                "norms": [list(point) for point in self._norms],
                "sessions": list(self._sessions),
            }

    def _start_over(self, inode: int) -> None:
        self._points, self._norms, self._sessions = [], [], []
        self._start, self._step, self._seen = None, 1, 0
        self._inode, self._offset = inode, 0
        for event in read_events(self.path, rotated_only=True):
            self._take(event)

    def _read_on(self) -> None:
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if (event := parse_event(line)) is not None:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        now = float(event["time"])
        if self._start is None:
            self._start = now
        last = self._points[-1][0] if self._points else 0.0
        at = max(last, now - self._start)
        if event["event"] == "start":
            self._sessions.append(round(at, 1))
        elif event["event"] == "norms":
            self._norms.append([round(at, 1), *(tap["recent_median"] for tap in event["taps"])])
            if len(self._norms) > MAX_POINTS:
                self._norms = self._norms[::2]
        elif event["event"] == "progress":
            self._seen += 1
            if self._seen % self._step == 0:
                self._points.append([round(at, 1), *(float(event[name]) for name in SERIES)])
            if len(self._points) > MAX_POINTS:
                self._points = self._points[1::2]
                self._step *= 2
