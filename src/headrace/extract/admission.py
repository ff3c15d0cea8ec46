"""Admission: which row goes to the engine next, and when. Everything behind it is bounded because this is."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from headrace.types import Row

MOMENT = 0.2
"""Seconds between two looks at whether to stop, while waiting."""


def window_size(rows: int) -> int:
    """Rows sent longest first together: about half a percent of the data, so that every stretch of a run sees all lengths."""
    return max(64, min(1024, rows // 200))


def in_windows(rows: Iterable[Row], window: int, seed: int) -> Iterator[Row]:
    """``rows`` in random windows, longest first inside each: batches hold little padding, and the ETA sees the same mix throughout.

    A pool of four windows is kept, so data sorted by length is mixed too, at a bounded memory.
    """
    rng = random.Random(seed)
    pool: list[Row] = []

    def take() -> list[Row]:
        rng.shuffle(pool)
        chosen = sorted(pool[-window:], key=len, reverse=True)
        del pool[-window:]
        return chosen

    for row in rows:
        pool.append(row)
        if len(pool) >= 4 * window:
            yield from take()
    while pool:
        yield from take()


WRITER_TOKENS = 32_768


def least_budget(tokens_in_flight: int, longest: int) -> int:
    """Tokens that must be admissible for an engine that gathers ``tokens_in_flight`` (and a row more) before it answers."""
    return tokens_in_flight + 2 * longest


def default_budget(tokens_in_flight: int, longest: int) -> int:
    """The least, and on top what the writer works on while the engine stays full."""
    return least_budget(tokens_in_flight, longest) + min(tokens_in_flight, max(2 * longest, WRITER_TOKENS))


class Budget:
    """Tokens between admission and disk, bounded. A row larger than the whole budget passes alone."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._room = threading.Condition()

    @property
    def used(self) -> int:
        """Tokens outstanding."""
        return self._used

    def take(self, tokens: int) -> bool:
        """Take ``tokens`` if there is room; never blocks."""
        with self._room:
            if self._used and self._used + tokens > self.limit:
                return False
            self._used += tokens
            return True

    def give(self, tokens: int) -> None:
        """Give ``tokens`` back."""
        with self._room:
            self._used -= tokens
            self._room.notify_all()

    def wake(self) -> None:
        """End the waiting of whoever waits."""
        with self._room:
            self._room.notify_all()

    def wait(self, seconds: float) -> None:
        """Block until something is given back, at most ``seconds``."""
        with self._room:
            self._room.wait(seconds)


class RowSource:
    """Rows with a look at the next one, so that a row is taken only in the moment it is admitted."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.lock = threading.Lock()
        self._rows = iter(rows)
        self._next: Row | None = None

    def peek(self) -> Row | None:
        """The next row, None after the last. Hold :attr:`lock`."""
        if self._next is None:
            self._next = next(self._rows, None)
        return self._next

    def drop(self) -> None:
        """Go past the row just peeked at. Hold :attr:`lock`."""
        self._next = None

    @property
    def ended(self) -> bool:
        """Whether no row will come after :meth:`peek` gave none: always so for rows that are all there. Hold :attr:`lock`."""
        return True


class Portions(RowSource):
    """Rows handed over in portions by someone else; between two of them the source is empty and yet not at its end.

    An engine may gather rows before it answers any, so whoever hands them over says with ``drain`` when it should not
    wait for more: the source then ends for now, and begins again with the next portion.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        """``arrived`` is called when something has changed that a waiting feed should look at."""
        super().__init__(())
        self._queue: deque[Row] = deque()
        self._drain = False
        self._arrived = arrived
        self.closed = False
        """No row will ever come again."""

    def add(self, rows: Iterable[Row], *, drain: bool) -> None:
        """Take a portion; with ``drain`` nothing more comes for now."""
        with self.lock:
            self._queue.extend(rows)
            self._drain = drain
        self._arrived()

    def give_back(self, count: int) -> list[Row]:
        """Take the last ``count`` rows (or all there are) out again: nobody has begun with them."""
        with self.lock:
            return [self._queue.pop() for _ in range(min(count, len(self._queue)))]

    def close(self) -> None:
        """End for good once the queue is empty."""
        self.closed = True
        self._arrived()

    def __len__(self) -> int:
        return len(self._queue)

    def peek(self) -> Row | None:
        """See :class:`RowSource`."""
        return self._queue[0] if self._queue else None

    def drop(self) -> None:
        """See :class:`RowSource`."""
        self._queue.popleft()

    @property
    def ended(self) -> bool:
        """See :class:`RowSource`."""
        return self._drain or self.closed


class Feed(Iterator[Row]):
    """The rows that one ``capture`` call pulls: blocks while the budget is used up or the disk is full, ends when closed.

    After :meth:`close` no row is handed out any more, whoever still pulls: what an abandoned engine thread asks for
    later stays in the source.
    """

    def __init__(
        self,
        source: RowSource,
        budget: Budget,
        has_room: Callable[[Row], bool],
        admitted: Callable[[Row], None],
    ) -> None:
        """``has_room`` tells whether the disk can take a row, and takes the room; ``admitted`` hears of each row handed out."""
        self._source = source
        self._budget = budget
        self._has_room = has_room
        self._admitted = admitted
        self._closed = False
        self.dry = False
        """Whether the input ended because the source did."""

    def close(self) -> None:
        """End the input; idempotent, from any thread."""
        with self._source.lock:
            self._closed = True

    def __next__(self) -> Row:
        while not self._closed:
            with self._source.lock:
                row = None if self._closed else self._source.peek()
                if row is None:
                    if self._closed or self._source.ended:
                        self.dry = not self._closed
                        break
                elif self._budget.take(len(row)):
                    if self._has_room(row):
                        self._source.drop()
                        self._admitted(row)
                        return row
                    self._budget.give(len(row))
            self._budget.wait(MOMENT)
        raise StopIteration
