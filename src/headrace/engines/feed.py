"""Rows pulled in a thread of their own, within a budget of tokens in flight: what a serving engine's client stands on.

``next(rows)`` may block for as long as the pipeline holds back admission; with a thread for it, results keep flowing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from headrace.types import Row


class RowFeed:
    """Pulls ``rows`` and gives each to ``sink`` while fewer than ``budget`` tokens are in flight; one longer row goes alone.

    ``sink`` and ``ended`` are called from the feed's thread; ``ended`` once, with the exception that ``rows`` raised, if any.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        budget: int,
        sink: Callable[[Row], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.pulled = 0
        """Rows given to ``sink`` so far; final once ``ended`` was called."""
        self._rows = iter(rows)
        self._budget = budget
        self._sink = sink
        self._ended = ended
        self._tokens = 0
        self._closed = False
        self._room = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="headrace-feed", daemon=True)
        self._thread.start()

    def release(self, tokens: int) -> None:
        """A row of ``tokens`` was answered."""
        with self._room:
            self._tokens -= tokens
            self._room.notify()

    def close(self) -> None:
        """Pull no more. A pull that is blocked right now ends when the pipeline lets it."""
        with self._room:
            self._closed = True
            self._room.notify()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._wait():
                row = next(self._rows, None)
                if row is None:
                    break
                with self._room:
                    if self._closed:
                        break
                    self._tokens += len(row)
                    self.pulled += 1
                self._sink(row)
        except BaseException as exc:  # noqa: BLE001 - whatever the rows raise is raised again in the engine's caller
            error = exc
        self._ended(error)

    def _wait(self) -> bool:
        """Wait until the budget is not used up; False when closed."""
        with self._room:
            self._room.wait_for(lambda: self._closed or self._tokens < self._budget)
            return not self._closed
