"""Threads that put rows into staged files: pieces of many captures at once, no order among them, the last one seals.

A piece is the rows of one tap of one segment, contiguous in host memory, so writing it is one checksum and one ``pwrite``,
both outside the interpreter lock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from headrace.sglang_plugin.protocol import Refusal
from headrace.sglang_plugin.stagedfile import Layout, seal

_LOG = logging.getLogger(__name__)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_JOB_BYTES = 16 << 20
"""A thread takes about this much at a time: enough to hide its overhead, little enough to share a batch among threads."""


class StagedCapture:
    """One capture being written. The scheduler thread says what will come and waits; writer threads write."""

    def __init__(self, path: Path, layout: Layout, metadata: dict[str, str]) -> None:
        self.path, self.layout, self.metadata = path, layout, metadata
        self.seal = ""
        self.size = 0
        self.failure: Refusal | None = None
        self._part = path.with_suffix(".part")
        self._lock = threading.Lock()
        self._fd = -1
        self._users = 0
        self._left = 0
        self._closed = False
        self._ids = np.zeros(layout.rows, "<i8")
        self._digests: dict[tuple[int, int], list[int]] = {}
        self._done = threading.Event()

    # --- called by the scheduler thread -----------------------------------------------------------------------

    def expect(self, start: int, stop: int) -> None:
        """Rows ``[start, stop)`` of every tap will be written."""
        with self._lock:
            self._left += self.layout.taps
            self._digests[start, stop] = [0] * self.layout.taps

    def close(self) -> None:
        """Every row has been expected: whoever writes the last piece seals. Call it before that piece is handed out."""
        with self._lock:
            self._closed = True

    def wait(self, timeout: float) -> bool:
        """Whether the file is in place (or has failed) within ``timeout`` seconds."""
        return self._done.wait(timeout)

    def discard(self) -> None:
        """Give the capture up, finished or not; pieces still coming are ignored."""
        self.fail(Refusal(kind="aborted", message="the request was aborted"))
        with contextlib.suppress(OSError):
            self.path.unlink()

    # --- called by any thread ---------------------------------------------------------------------------------

    def write(self, tap: int, start: int, stop: int, rows: memoryview, ids: np.ndarray) -> None:
        """Write rows ``[start, stop)`` of tap number ``tap``; ``ids`` are theirs. Raises OSError."""
        with self._file() as fd:
            if fd is None:
                return
            if tap == 0:
                self._ids[start:stop] = ids
            digest = xxhash.xxh3_64_intdigest(rows)
            _pwrite(fd, rows, self.layout.states_offset(tap, start))
            with self._lock:
                self._digests[start, stop][tap] = digest
                self._left -= 1
                last = self._closed and self._left == 0
            if last:
                self._seal(fd)

    def fail(self, refusal: Refusal) -> None:
        """No file will come of this capture; the first reason stays."""
        with self._lock:
            if self.failure is None:
                self.failure = refusal
            self._close_unused()
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            self._part.unlink()
        self._done.set()

    @contextlib.contextmanager
    def _file(self) -> Iterator[int | None]:
        """The file, or None when the capture has failed. It stays open while anybody is inside, whatever happens meanwhile:
        a descriptor closed under a writer could by then be another capture's file."""
        with self._lock:
            if self.failure is not None:
                yield_fd = None
            else:
                if self._fd < 0:
                    self._fd = os.open(self._part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                    # All the space at once: a full file system is met here, not in the middle.
                    os.posix_fallocate(self._fd, 0, self.layout.body_bytes)
                yield_fd = self._fd
                self._users += 1
        try:
            yield yield_fd
        finally:
            if yield_fd is not None:
                with self._lock:
                    self._users -= 1
                    self._close_unused()

    def _close_unused(self) -> None:
        if self._users == 0 and self._fd >= 0 and (self.failure is not None or self.seal):
            os.close(self._fd)
            self._fd = -1

    def _seal(self, fd: int) -> None:
        segments = sorted(self._digests)
        table = np.array([[a, b, *self._digests[a, b]] for a, b in segments], "<u8").tobytes()
        header = self.layout.header(len(segments), self.metadata)
        ids = self._ids.tobytes()
        _pwrite(fd, memoryview(ids), self.layout.ids_offset(0))
        _pwrite(fd, memoryview(table), self.layout.body_bytes)
        _pwrite(fd, memoryview(header), 0)
        with self._lock:
            if self.failure is not None:
                return
            self.size = self.layout.body_bytes + len(table)
            self.seal = seal(header, ids, table)
            self._part.rename(self.path)
        self._done.set()


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    data = data.cast("B")
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


@dataclass(frozen=True)
class Piece:
    """Rows ``[start, stop)`` of tap number ``tap`` of a capture; they begin at row ``row`` of the batch in host memory."""

    capture: StagedCapture
    tap: int
    source: int
    """Number of the tap in the batch."""
    row: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return (self.stop - self.start) * self.capture.layout.row_bytes


class Writers:
    """A pool of threads that write pieces."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="headrace-writer")

    def write(
        self,
        pieces: list[Piece],
        states: torch.Tensor,
        ids: torch.Tensor,
        arrived: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        """Write ``pieces`` out of ``states`` [taps, rows, hidden] and ``ids`` [rows] on the host.

        ``arrived`` is called by each thread before it reads and returns when the copy from the device is complete;
        ``done`` once after the last piece, whatever happened.
        """
        jobs = _share_out(pieces)
        left = [len(jobs)]
        lock = threading.Lock()

        def job_done(job: list[Piece], future: Future[None]) -> None:
            error = future.exception()
            if error is not None:
                _LOG.error("headrace: a staged file could not be written", exc_info=error)
                for piece in job:
                    piece.capture.fail(_refusal(error, piece.capture.path))
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                done()

        for job in jobs:
            future = self._pool.submit(_write_job, job, states, ids, arrived)
            future.add_done_callback(partial(job_done, job))

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._pool.shutdown()


def _share_out(pieces: list[Piece]) -> list[list[Piece]]:
    jobs: list[list[Piece]] = []
    size = _JOB_BYTES
    for piece in pieces:
        if size >= _JOB_BYTES:
            jobs.append([])
            size = 0
        jobs[-1].append(piece)
        size += piece.size
    return jobs


def _write_job(
    job: list[Piece], states: torch.Tensor, ids: torch.Tensor, arrived: Callable[[], None]
) -> None:
    arrived()
    for piece in job:
        count = piece.stop - piece.start
        rows = states[piece.source, piece.row : piece.row + count].view(torch.uint8).numpy()
        piece.capture.write(
            piece.tap,
            piece.start,
            piece.stop,
            rows.data.cast("B"),
            ids[piece.row : piece.row + count].numpy(),
        )


def _refusal(error: BaseException, path: Path) -> Refusal:
    if isinstance(error, OSError) and error.errno is not None:
        return Refusal(
            kind="staging_full" if error.errno in _FULL else "write_failed",
            message=f"{path.parent} cannot take the capture: {error.strerror}; give the staging folder more space",
        )
    return Refusal(
        kind="write_failed", message=f"writing the capture failed: {type(error).__name__}: {error}"
    )
