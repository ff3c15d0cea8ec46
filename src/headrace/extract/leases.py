"""Which worker holds which row: handed out in small leases, taken back from the dead, copied from the slow, done when sealed.

A key is *out* with the workers that have it and have not answered, *open* with those that have written it into a shard not
sealed yet, *settled* when it is sealed somewhere or set aside. Losing a worker brings back the rows that nobody else has.
Nothing here knows what a worker is, or does any input or output; the driver alone calls it, from one thread.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.extract.admission import RowSource
from headrace.types import Row

MOST_HOLDERS = 2
"""Workers that a row is with at a time, at most."""
SMOOTHING = 0.05


@dataclass(slots=True)
class Held:
    """A row with one worker, unanswered."""

    tokens: int
    since: float


@dataclass(frozen=True, slots=True)
class Written:
    """A row in a worker's open shard."""

    tokens: int
    raw_bytes: int


@dataclass(slots=True)
class Lost:
    """What a worker had when it went."""

    out: dict[str, Held] = field(default_factory=dict)
    """Unanswered, all of it."""
    again: list[str] = field(default_factory=list)
    """Keys of ``out`` that nobody else has."""
    unsealed: dict[str, Written] = field(default_factory=dict)
    """Written, in a shard that was never sealed, and nobody else has it: to be done again."""


class Leases:
    """The driver's account of every row that is not settled."""

    def __init__(
        self,
        rows: Iterable[Row],
        get: Callable[[str], Row],
        tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rows`` in the order to hand them out, ``tokens`` of all of them; ``get`` finds a row again by its key."""
        self._source = RowSource(rows)
        self._get = get
        self._clock = clock
        self._again: deque[Row] = deque()
        self._out: dict[int, dict[str, Held]] = defaultdict(dict)
        self._open: dict[int, dict[str, Written]] = defaultdict(dict)
        self._holders: dict[str, set[int]] = defaultdict(set)
        """key → workers that have it out or open; no entry when nobody has."""
        self._settled: set[str] = set()
        self.left = tokens
        """Tokens that nobody has been given."""
        self.typical = 0.0
        """Seconds between lease and answer, lately."""

    # --- handing out ------------------------------------------------------------------------------------------------------

    @property
    def dry(self) -> bool:
        """Whether there is nothing to hand out now."""
        return not self._again and self._source.peek() is None

    def take(self, worker: int, tokens: int) -> list[Row]:
        """Rows for ``worker``, until they hold at least ``tokens`` in all; those that came back go first."""
        rows: list[Row] = []
        while tokens > 0 and (row := self._next()) is not None:
            self._lend(worker, row)
            rows.append(row)
            tokens -= len(row)
        return rows

    def _next(self) -> Row | None:
        if self._again:
            row: Row | None = self._again.popleft()
        elif (row := self._source.peek()) is not None:
            self._source.drop()
        if row is not None:
            self.left -= len(row)
        return row

    def _lend(self, worker: int, row: Row) -> None:
        self._out[worker][row.key] = Held(len(row), self._clock())
        self._holders[row.key].add(worker)

    def copies(self, worker: int, tokens: int, older: float) -> list[Row]:
        """Rows that another worker has had, unanswered, for more than ``older`` seconds: the oldest first, for ``worker`` as well."""
        limit = self._clock() - older
        late = [
            (held.since, key)
            for other, out in self._out.items()
            if other != worker
            for key, held in out.items()
            if held.since < limit
            and len(self._holders[key]) < MOST_HOLDERS
            and worker not in self._holders[key]
        ]
        rows = []
        for _, key in sorted(late):
            if tokens <= 0:
                break
            row = self._get(key)
            self._lend(worker, row)
            rows.append(row)
            tokens -= len(row)
        return rows

    # --- what workers say -------------------------------------------------------------------------------------------------

    def written(self, worker: int, key: str, raw_bytes: int) -> tuple[int, bool] | None:
        """``worker`` has ``key`` in its open shard: the row's tokens, and whether this is the first such copy.

        None when the worker was not asked for it (any more).
        """
        held = self._out[worker].pop(key, None)
        if held is None:
            return None
        first = key not in self._settled and not any(key in self._open[w] for w in self._holders[key])
        self._open[worker][key] = Written(held.tokens, raw_bytes)
        seconds = self._clock() - held.since
        self.typical += (SMOOTHING if self.typical else 1.0) * (seconds - self.typical)
        return held.tokens, first

    def sealed(self, worker: int, key: str) -> bool:
        """``key`` is durable: whether that is news."""
        if self._open[worker].pop(key, None) is None:
            return False
        self._drop(worker, key)
        news = key not in self._settled
        self._settled.add(key)
        return news

    def failed(self, worker: int, key: str) -> tuple[int, bool] | None:
        """``worker`` could not capture ``key``: its tokens, and whether that counts, because nobody else has it.

        None when the worker was not asked for it.
        """
        held = self._out[worker].pop(key, None)
        if held is None:
            return None
        self._drop(worker, key)
        return held.tokens, key not in self._settled and key not in self._holders

    def returned(self, worker: int, key: str) -> int:
        """``worker`` gives ``key`` back without having begun with it; its tokens, 0 when it did not have it."""
        held = self._out[worker].pop(key, None)
        if held is None:
            return 0
        self._drop(worker, key)
        if key not in self._holders and key not in self._settled:
            self.again([key])
        return held.tokens

    def forget(self, key: str) -> None:
        """``key`` may be handed out anew, as if for the first time."""
        self._settled.discard(key)

    def settle(self, key: str) -> None:
        """``key`` is given up."""
        self._settled.add(key)

    def again(self, keys: Iterable[str]) -> None:
        """Hand ``keys`` out once more."""
        for key in keys:
            row = self._get(key)
            self._again.append(row)
            self.left += len(row)

    def lose(self, worker: int) -> Lost:
        """``worker`` is gone. The caller says what becomes of the rows that only it had: :meth:`again`, or otherwise."""
        lost = Lost(out=self._out.pop(worker, {}))
        gone = self._open.pop(worker, {})
        for key in (*lost.out, *gone):
            self._drop(worker, key)
        lost.again = [k for k in lost.out if k not in self._holders and k not in self._settled]
        for key, written in gone.items():
            elsewhere = key in self._settled or any(key in self._open[w] for w in self._holders.get(key, ()))
            if not elsewhere:
                lost.unsealed[key] = written
        return lost

    def _drop(self, worker: int, key: str) -> None:
        holders = self._holders[key]
        holders.discard(worker)
        if not holders:
            del self._holders[key]

    # --- how it stands ----------------------------------------------------------------------------------------------------

    def out_tokens(self, worker: int) -> int:
        """Tokens that ``worker`` has not answered."""
        return sum(held.tokens for held in self._out[worker].values())

    def out(self, worker: int) -> int:
        """Rows that ``worker`` has not answered."""
        return len(self._out[worker])

    def open(self, worker: int) -> int:
        """Rows that ``worker`` has written and not sealed."""
        return len(self._open[worker])

    def held_elsewhere(self, key: str) -> bool:
        """Whether some worker has ``key``."""
        return key in self._holders

    @property
    def unanswered(self) -> bool:
        """Whether a row that is not settled is out with anyone."""
        return any(key not in self._settled for out in self._out.values() for key in out)

    @property
    def unsettled(self) -> bool:
        """Whether anything is left to wait for or to hand out, rows set aside for a later round not counted."""
        return not self.dry or any(key not in self._settled for key in self._holders)
