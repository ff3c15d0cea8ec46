"""Progress of long commands: a bar on stderr for a person watching, a plain line now and then for a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

LINE_SECONDS = 10.0
"""Pause between plain lines."""


@contextlib.contextmanager
def progress(what: str, *, bytes_unit: bool) -> Iterator[Callable[[int, int], None]]:
    """Give a function to call with (done, total); shows share, speed and time left."""
    if sys.stderr.isatty():
        with _bar(what, bytes_unit) as update:
            yield update
    else:
        yield _lines(what, bytes_unit)


@contextlib.contextmanager
def _bar(what: str, bytes_unit: bool) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = [DownloadColumn(), TransferSpeedColumn()] if bytes_unit else [MofNCompleteColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, bytes_unit: bool) -> Callable[[int, int], None]:
    began = last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LINE_SECONDS or not done:
            return
        last = now
        left = (now - began) * (total - done) / done
        amount = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB" if bytes_unit else f"{done:,} of {total:,}"
        sys.stderr.write(f"{what}: {amount}, {left:,.0f} s left\n")
        sys.stderr.flush()

    return update
