"""Host memory that is used again: an array gives its place back when nobody refers to it any more.

Memory fresh from the system is cleared page by page when it is first written. For states that pass through at gigabytes a
second that takes longer than everything else done with them, and several times as long on a virtual machine that has to
fetch each page from its host. So states are read into one region, lowest free place first: what is touched once is touched
again and again, and grows only as far as what is held at one time.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

KEPT_BYTES = 4 << 30
"""Of the shared pool, kept for the next engine or writer at most; less where that is more than a sixteenth of the memory."""
_ALIGN = 1 << 16
_HUGE = 2 << 20

Memory = np.ndarray[Any, np.dtype[np.uint8]]


class _Loan:
    """Lends a place through numpy's array interface: every view of it, torch's too, keeps this object alive, and no other."""

    def __init__(self, region: mmap.mmap, start: int, size: int) -> None:
        whole = np.frombuffer(region, np.uint8)
        self.__array_interface__ = {**whole[start : start + size].__array_interface__, "strides": None}
        self._region = region


class MemoryPool:
    """A region of memory, lent out and taken back by itself. Threads may share one.

    ``capacity`` bytes are reserved, not used: the system gives pages when they are first written, and takes them back with
    :meth:`trim`. Where the system reserves nothing (a limit on address space) all that is lent is memory of its own.
    """

    def __init__(self, capacity: int, kept: int = 0) -> None:
        self._capacity = max(_HUGE, capacity - capacity % _HUGE)
        self._kept = -(-kept // _HUGE) * _HUGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._region = mmap.mmap(-1, self._capacity, flags=flags)
        except OSError:
            self._capacity, self._region = 0, mmap.mmap(-1, 1)
        with contextlib.suppress(OSError, AttributeError):  # a hint, which not every kernel takes
            self._region.madvise(mmap.MADV_HUGEPAGE)
        self._free = (
            [(0, self._capacity)] if self._capacity else []
        )  # (start, stop), ascending, none next to another
        self._back: collections.deque[tuple[int, int]] = (
            collections.deque()
        )  # come back, not yet among the free
        self._lock = threading.Lock()
        self._top = 0

    @property
    def used(self) -> int:
        """Bytes that are out."""
        with self._lock:
            self._settle()
            return self._capacity - sum(stop - start for start, stop in self._free)

    def lend(self, size: int) -> Memory:
        """uint8 [size], contents undefined; comes back when its last view is gone. Memory of its own when the region is full."""
        if size < 0:
            raise ValueError(f"{size} bytes cannot be lent")
        room = max(1, -(-size // _ALIGN)) * _ALIGN
        start = self._take(room)
        if start is None:
            return np.empty(size, np.uint8)
        loan = _Loan(self._region, start, size)
        weakref.finalize(loan, self._give, start, start + room).atexit = False
        return np.asarray(loan)

    def trim(self) -> None:
        """Give the system back what lies behind the last place in use, except the first ``kept`` bytes of the region."""
        with self._lock:
            self._settle()
            start, stop = self._free[-1] if self._free else (self._capacity, self._capacity)
            first = -(-max(start, self._kept) // _HUGE) * _HUGE
            if stop == self._capacity and first < self._top:
                self._region.madvise(mmap.MADV_DONTNEED, first, self._top - first)
                self._top = first

    def guard_forks(self) -> None:
        """Have a forked process find the lock in nobody's hands: it has none of the threads that could free it."""
        free = self._lock.release
        os.register_at_fork(before=self._lock.acquire, after_in_parent=free, after_in_child=free)

    def _take(self, room: int) -> int | None:
        with self._lock:
            self._settle()
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= room:
                    self._free[index : index + 1] = [(start + room, stop)] if stop - start > room else []
                    self._top = max(self._top, start + room)
                    return start
            return None

    def _give(self, start: int, stop: int) -> None:
        """Take a place back. The collector of garbage may do this in the middle of any line here, with the lock held by the same
        thread: so this waits for nothing, and without the lock changes nothing but the queue."""
        self._back.append((start, stop))
        while self._back and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Enter what has come back among the free places. Only with the lock held."""
        while self._back:
            start, stop = self._back.popleft()
            index = bisect.bisect(self._free, (start, stop))
            if index < len(self._free) and self._free[index][0] == stop:
                stop = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, stop))


@functools.cache
def shared_pool() -> MemoryPool:
    """The process's pool: half as large as the machine's memory, so that one engine uses what the one before has touched."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pool = MemoryPool(memory // 2, min(KEPT_BYTES, memory // 16))
    pool.guard_forks()
    return pool
