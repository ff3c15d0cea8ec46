"""Threads of the pipeline: daemons (a hung engine must not keep the process from ending) whose error reaches the supervisor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Worker(threading.Thread):
    """Runs ``work`` once. Whatever it raises is kept in :attr:`error` for the supervisor, which raises it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=f"headrace-{name}", daemon=True)
        self.error: BaseException | None = None
        self._work = work

    def run(self) -> None:
        """Called by the thread machinery."""
        with _Keep(self):
            self._work()

    @property
    def ended(self) -> bool:
        """Whether the work is over, well or not."""
        return self.ident is not None and not self.is_alive()


class _Keep:
    """Hands the exception that ends its block to the worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._worker.error = error
        return True
