"""How progress looks: a live bar on a terminal, plain unbuffered lines anywhere else, both from the same snapshot."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from headrace.extract.disk import gigabytes
from headrace.extract.progress import Snapshot

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class View(Protocol):
    """Shows snapshots and sentences."""

    def show(self, snapshot: Snapshot) -> None:
        """The present state; called often, shown as often as it makes sense."""

    def say(self, text: str) -> None:
        """One sentence, at once."""

    def close(self, snapshot: Snapshot | None) -> None:
        """Leave the last state on the screen."""


class LineView:
    """One complete line every ``seconds``, the first after a second: for nohup, CI and log files."""

    def __init__(
        self, say: Callable[[str], None], seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say = say
        self._seconds = seconds
        self._clock = clock
        self._gap = min(1.0, seconds)
        self._due = clock() + self._gap

    def show(self, snapshot: Snapshot) -> None:
        """A line when one is due; the gaps grow from one second to ``seconds``."""
        if self._clock() >= self._due:
            self._gap = min(self._seconds, 2 * self._gap)
            self._due = self._clock() + self._gap
            self.say(progress_line(snapshot))

    def close(self, snapshot: Snapshot | None) -> None:
        """A last line."""
        if snapshot is not None:
            self.say(progress_line(snapshot))


class BarView:
    """A live bar on stderr, with the figures of a progress line under it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("extract"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>5.1f} %  ETA {task.fields[eta]}"),
        )
        self._bar: RichProgress = Progress(
            *columns,
            TextColumn("\n{task.fields[text]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._bar.add_task("extract", total=1.0, eta="…", text="")
        self._bar.start()

    def show(self, snapshot: Snapshot) -> None:
        """Move the bar."""
        done = snapshot.tokens_done + snapshot.tokens_failed
        self._bar.update(
            self._task,
            completed=done / max(1, snapshot.tokens_total),
            eta=duration(snapshot.eta_seconds),
            text=progress_line(snapshot, with_percentage=False),
        )

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self, snapshot: Snapshot | None) -> None:
        """Stop the bar where it is."""
        if snapshot is not None:
            self.show(snapshot)
        self._bar.stop()


def make_view(say: Callable[[str], None]) -> View:
    """A bar when stderr is a terminal, lines through ``say`` else."""
    return BarView() if sys.stderr.isatty() else LineView(say)


def progress_line(s: Snapshot, with_percentage: bool = True) -> str:
    """Everything worth knowing in one line."""
    share = (s.tokens_done + s.tokens_failed) / s.tokens_total if s.tokens_total else 1.0
    parts = [
        f"{s.tokens_done:,}/{s.tokens_total:,} tokens, {s.rows_done:,}/{s.rows_total:,} captures",
        f"{s.tokens_per_second:,.0f} tokens/s (1 min), {s.tokens_per_second_overall:,.0f} overall",
        f"{gigabytes(s.bytes_raw)} raw → {gigabytes(s.bytes_stored)} stored",
        f"in flight {s.rows_in_flight} ({s.tokens_in_flight:,} tokens)",
        f"disk left {gigabytes(s.disk_free)}",
    ]
    if with_percentage:
        parts.insert(0, f"{share:.1%}")
        parts.insert(3, f"ETA {duration(s.eta_seconds)}")
    if s.staging_bytes:
        parts.append(f"staging {gigabytes(s.staging_bytes)}")
    if s.errors:
        parts.append("errors: " + ", ".join(f"{kind} {count}" for kind, count in sorted(s.errors.items())))
    if s.rows_failed:
        parts.append(f"set aside {s.rows_failed}")
    if s.paused:
        parts.append(f"PAUSED: {s.paused}")
    return " | ".join(parts)


def duration(seconds: float | None) -> str:
    """``2 d 03:14``, ``3:14:05``, ``14:05`` or ``…`` when unknown."""
    if seconds is None:
        return "…"
    total = round(seconds)
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
