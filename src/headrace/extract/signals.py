"""SIGINT, SIGTERM and SIGHUP during a run: the first finishes what is in flight, the second stops at once, a third kills."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from headrace.errors import Interrupted


class Stoppable(Protocol):
    """What a signal tells to stop."""

    stopping: str
    aborted: bool


@contextlib.contextmanager
def graceful_signals(pipeline: Stoppable) -> Iterator[None]:
    """Within the block the first signal sets ``pipeline.stopping``, the second raises Interrupted in the main thread.

    A signal that this process was told to ignore (SIGHUP under nohup, SIGINT in a background job) stays ignored. Only the main thread can take signals; elsewhere (a notebook's thread, a worker) this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if pipeline.stopping:
            pipeline.aborted = True
            for which in before:
                signal.signal(which, signal.SIG_DFL)
            raise Interrupted("stopped at once; run the same command again to go on")
        pipeline.stopping = f"stopped by {signal.Signals(number).name}"

    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        which: signal.getsignal(which) for which in taken if signal.getsignal(which) is not signal.SIG_IGN
    }
    for which in before:
        signal.signal(which, handle)
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
