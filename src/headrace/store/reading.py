"""Processes that decode batches of a store into memory that they share with the one that trains.

Decoding gives up Python's lock for every chunk and takes it again, some ten thousand times a GB. Threads that do so wait for one
another, and have the thread that drives the GPU wait for them. A process has a lock of its own, and takes a whole batch at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from headrace.bits import Bits, bits_dtype
from headrace.child import Child
from headrace.errors import HeadraceError, StoreError
from headrace.store.format import Array

if TYPE_CHECKING:
    from headrace.store.reader import Store
    from headrace.types import Tap

_PAGE = 4096


class Arrays(NamedTuple):
    """What documents are decoded into. T = tokens of all of them."""

    states: Bits
    """[taps, T, hidden]"""
    ids: Array
    """int64 [T]"""
    mask: Array
    """bool [T]"""
    kept: Array
    """bool [T]"""


def fill(store: Store, key: str, place: slice, arrays: Arrays, taps: Sequence[Tap]) -> None:
    """Decode the document ``key`` into its ``place``. Raises as :meth:`Store.read_bits`."""
    arrays.ids[place], arrays.mask[place] = store.tokens_of(key)
    arrays.kept[place] = True if store.final_positions == "all" else store.final_kept(key)
    store.read_bits(key, arrays.states[:, place], taps, missing="zero")


@dataclass(frozen=True)
class Slots:
    """The shape of the shared memory: room for ``count`` batches, each with its arrays one after the other."""

    count: int
    taps: int
    tokens: int
    """Of a batch, at most."""
    hidden: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of one batch, in whole pages."""
        width = self.taps * self.hidden * np.dtype(bits_dtype(self.dtype)).itemsize + 8 + 1 + 1
        return -(-self.tokens * width // _PAGE) * _PAGE

    def arrays(self, memory: mmap.mmap, slot: int, tokens: int) -> Arrays:
        """The arrays of the batch of so many ``tokens`` in a slot."""
        at = slot * self.nbytes

        def take(shape: tuple[int, ...], dtype: Any) -> Array:
            nonlocal at
            found = np.frombuffer(memory, dtype, int(np.prod(shape)), at).reshape(shape)
            at += found.nbytes
            return found

        ids = take((tokens,), np.int64)  # first, where every slot is aligned
        states = take((self.taps, tokens, self.hidden), bits_dtype(self.dtype))
        return Arrays(states, ids, take((tokens,), np.bool_), take((tokens,), np.bool_))


class Job(NamedTuple):
    """One batch that a process decodes."""

    slot: int
    keys: tuple[str, ...]
    starts: tuple[int, ...]
    """Where each document begins, and where the last one ends."""


class Readers:
    """``count`` processes, and room for ``slots`` batches of at most ``tokens`` tokens. A context manager.

    They end with this process, whatever ends it. Used by one thread at a time.
    """

    def __init__(self, store: Store, taps: Sequence[Tap], count: int, *, slots: int, tokens: int) -> None:
        self._shape = Slots(slots, len(taps), tokens, store.spec.hidden_size, store.spec.dtype)
        self._free = list(range(slots))
        self._out: deque[tuple[_Process, Job]] = deque()
        with _shared_file(slots * self._shape.nbytes) as file:
            self._memory = mmap.mmap(file, slots * self._shape.nbytes)
            self._processes = [_Process(file) for _ in range(count)]
        for process in self._processes:
            process.send((store, tuple(taps), self._shape))
        self._turn = 0

    def begin(self, keys: Sequence[str], starts: Array) -> None:
        """Have a batch decoded; there must be a free slot. ``starts`` int [documents + 1]."""
        job = Job(self._free.pop(), tuple(keys), tuple(starts.tolist()))
        process = self._processes[self._turn % len(self._processes)]
        self._turn += 1
        process.send(job)
        self._out.append((process, job))

    @contextlib.contextmanager
    def next(self) -> Iterator[Arrays]:
        """The batch that was begun first; its arrays are used again afterwards. Raises what decoding it raised, StoreError when its
        process died."""
        process, job = self._out.popleft()
        process.receive()
        yield self._shape.arrays(self._memory, job.slot, job.starts[-1])
        self._free.append(job.slot)

    def close(self) -> None:
        """End the processes; idempotent."""
        for process in self._processes:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Process:
    """One reader as its parent sees it."""

    def __init__(self, file: int) -> None:
        self._child = Child("headrace.store.reading:serve", file, pass_fds=[file])

    def send(self, message: Any) -> None:
        """Give it what it needs, or a batch. Raises StoreError when it is dead."""
        try:
            self._child.connection.send(message)
        except OSError:
            raise self._death() from None

    def receive(self) -> None:
        """Wait until it has decoded its oldest batch. Raises what that raised."""
        try:
            error = self._child.connection.recv()
        except (EOFError, OSError):
            error = self._death()
        if error is not None:
            raise error

    def _death(self) -> StoreError:
        return StoreError(
            f"a process that reads the store {self._child.end()}; out of memory? Run the command again, it goes on, or give fewer --readers"
        )

    def close(self) -> None:
        self._child.kill()  # it has nothing to lose


@contextlib.contextmanager
def _shared_file(nbytes: int) -> Iterator[int]:
    """A file without a name; in memory where the system has such, which /dev/shm of a container may be too small for."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("headrace-batches")
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    try:
        os.ftruncate(file, nbytes)
        yield file
    finally:
        os.close(file)


def serve(fd: int, file: int) -> None:
    """Decode batch after batch into the shared ``file``, until the parent at the other end of ``fd`` is gone."""
    pipe = Connection(fd)
    with contextlib.suppress(EOFError, OSError):  # the pipe's: nobody is there any more
        store, taps, shape = pipe.recv()
        _work(pipe, mmap.mmap(file, shape.count * shape.nbytes), store, taps, shape)


def _work(pipe: Connection, memory: mmap.mmap, store: Store, taps: tuple[Tap, ...], shape: Slots) -> None:
    waiting: deque[Job] = deque()
    while True:
        # All that have come are told to the disk before the first of them is decoded.
        while not waiting or pipe.poll():
            waiting.append(pipe.recv())
            _expect(store, taps, waiting[-1])
        job = waiting.popleft()
        pipe.send(_decode(store, taps, shape.arrays(memory, job.slot, job.starts[-1]), job))


def _expect(store: Store, taps: tuple[Tap, ...], job: Job) -> None:
    for key in job.keys:
        with contextlib.suppress(HeadraceError, KeyError, OSError):  # decoding it will tell
            store.expect(key, taps)


def _decode(store: Store, taps: tuple[Tap, ...], arrays: Arrays, job: Job) -> BaseException | None:
    """What went wrong travels to the parent, which raises it."""
    try:
        for key, start, stop in zip(job.keys, job.starts[:-1], job.starts[1:], strict=True):
            fill(store, key, slice(start, stop), arrays, taps)
    except (HeadraceError, KeyError, OSError) as exc:
        return exc
    return None
