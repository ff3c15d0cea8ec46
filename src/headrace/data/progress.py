"""Progress of long work: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_EVERY_SECONDS = 10.0


class Progress:
    """Shows how far the work is. ``total`` in the same unit as ``done``, 0 if unknown."""

    def __init__(self, title: str, total: int, say: Callable[[str], None]) -> None:
        self._title, self._total, self._say = title, total, say
        self._started = self._said = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=self._total or None, facts="")
            self._bar.start()
        return self

    def update(self, done: int, facts: str) -> None:
        """Tell the state: ``done`` of the total, and what a person wants to know beside it."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, facts=facts)
        elif now - self._said >= _EVERY_SECONDS:
            self._said = now
            share = min(1.0, done / self._total) if self._total else 0.0
            left = (now - self._started) * (1 - share) / share if share else 0.0
            self._say(
                f"{self._title}: {facts}" + (f", {share:.0%}, about {left:,.0f} s left" if share else "")
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
