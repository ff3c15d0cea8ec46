"""Encoding one capture: in parts, so that a long row is not the work of one thread while the others wait for it."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from headrace.bits import Bits, floats_of, norms_of
from headrace.cores import available_cores
from headrace.store.codecs import Buffer, Codec
from headrace.store.format import Array, FinalPositions
from headrace.types import FINAL, CaptureSpec, Row, Tap

PART_BYTES = 8 << 20
"""States that one thread encodes at a time, about: enough to hide its overhead, little enough to share a row among threads."""
DIGESTED_BYTES = 65_536
"""Up to here xxhash keeps the GIL."""
SAMPLE_STRIDE = 16
"""Norms and the error of a lossy codec are measured at every 16th row: enough to judge them, and almost free."""


def encoder_threads(codec: Codec, writers: int = 1) -> int:
    """Threads that one of ``writers`` on this host encodes with, unless it is told: its part of half of the cores, at least one (two
    when it is alone) and no more than pay off."""
    return min(codec.threads, max(2 if writers == 1 else 1, available_cores() // (2 * writers)))


def encoder_pool(codec: Codec, threads: int = 0, writers: int = 1) -> ThreadPoolExecutor:
    """The threads of one writer; 0: as many as :func:`encoder_threads` says."""
    return ThreadPoolExecutor(threads or encoder_threads(codec, writers), "headrace-encode")


@dataclass(frozen=True, slots=True)
class Parent:
    """Prefix sharing: the states of the first ``tokens`` tokens are those of the capture ``key``."""

    key: str
    tokens: int


@dataclass
class TapData:
    """One tap of one capture, encoded."""

    rows: int
    buffers: list[Buffer] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    scales: list[Array] = field(default_factory=list)
    norms: Array = field(default_factory=lambda: np.empty(0))
    """float64, of every 16th row"""
    errors: int = 0
    """Rows whose error was measured: every 16th."""
    error_sum: float = 0.0
    """Sum over them of |decoded - true| / |true|; 0 for a lossless codec."""
    error_max: float = 0.0

    def extend(self, after: TapData) -> None:
        """Take in the rows that follow."""
        self.rows += after.rows
        self.buffers += after.buffers
        self.checksums += after.checksums
        self.sizes += after.sizes
        self.scales += after.scales
        self.norms = np.concatenate([self.norms, after.norms])
        self.errors += after.errors
        self.error_sum += after.error_sum
        self.error_max = max(self.error_max, after.error_max)


@dataclass(frozen=True)
class Encoded:
    """One capture, encoded and ready to be laid out."""

    row: Row
    parent: Parent | None
    taps: list[TapData]

    @property
    def nbytes(self) -> int:
        """Payload bytes plus what its tables take, about."""
        return sum(sum(tap.sizes) + 24 * len(tap.sizes) for tap in self.taps) + 5 * len(self.row) + 64


def kept_positions(mask: Array, tap: Tap, policy: FinalPositions) -> Array | None:
    """bool [tokens]: where states of ``tap`` are stored, None for everywhere.

    Under ``supervised`` the final state of position p is kept when token p+1 is supervised: it is the teacher's
    distribution for that token. Test-time-training steps only look at later positions under the same rule.
    """
    if tap != FINAL or policy == "all":
        return None
    keep = np.zeros(len(mask), bool)
    keep[:-1] = mask[1:]
    return keep


def encode_capture(
    row: Row,
    states: Bits,
    spec: CaptureSpec,
    codec: Codec,
    *,
    chunk_rows: int,
    policy: FinalPositions,
    parent: Parent | None = None,
) -> Encoded:
    """Encode ``states`` [taps, tokens - shared, hidden] of ``row``. Pure, runs in any thread."""
    job = list(enumerate(_ranges(row, states, spec, policy, parent)))
    return Encoded(row, parent, [data for _, data in _encode_ranges(job, codec, chunk_rows)])


class Encoding:
    """A capture while the threads of a pool encode it; like a future of what :func:`encode_capture` returns."""

    def __init__(
        self,
        pool: Executor,
        row: Row,
        states: Bits,
        spec: CaptureSpec,
        codec: Codec,
        *,
        chunk_rows: int,
        policy: FinalPositions,
        parent: Parent | None = None,
    ) -> None:
        self._row, self._parent, self._taps = row, parent, len(spec.taps)
        step = max(1, PART_BYTES // (chunk_rows * states.strides[-2])) * chunk_rows
        parts = [
            (index, one.part(start, start + step))
            for index, one in enumerate(_ranges(row, states, spec, policy, parent))
            for start in range(0, max(1, one.rows), step)
        ]
        self._futures = [
            pool.submit(_encode_ranges, job, codec, chunk_rows) for job in _jobs(parts, states.strides[-2])
        ]

    def done(self) -> bool:
        """Whether :meth:`result` has nothing to wait for."""
        return all(future.done() for future in self._futures)

    def result(self) -> Encoded:
        """The capture, once it is encoded. Raises what a thread raised."""
        taps = [TapData(rows=0) for _ in range(self._taps)]
        for future in self._futures:
            for index, data in future.result():
                taps[index].extend(data)
        return Encoded(self._row, self._parent, taps)


class _Range(NamedTuple):
    """Rows of one tap that one thread encodes, a whole number of chunks unless they are the last."""

    bits: Bits
    """[tokens, hidden], all of the tap."""
    places: Array | None
    """int64: the tokens that are kept, None for all."""
    start: int
    stop: int
    """Among those kept."""

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> _Range:
        return self._replace(start=start, stop=min(stop, self.stop))

    def states(self) -> Bits:
        """[rows, hidden]"""
        if self.places is None:
            return self.bits[self.start : self.stop]
        taken: Bits = self.bits[self.places[self.start : self.stop]]
        return taken


def _ranges(
    row: Row, states: Bits, spec: CaptureSpec, policy: FinalPositions, parent: Parent | None
) -> list[_Range]:
    """Each tap's rows that are stored, whole."""
    shared = parent.tokens if parent else 0
    out = []
    for index, tap in enumerate(spec.taps):
        keep = kept_positions(row.mask, tap, policy)
        places = None if keep is None else np.flatnonzero(keep[shared:])
        out.append(_Range(states[index], places, 0, states.shape[1] if places is None else len(places)))
    return out


def _jobs(parts: list[tuple[int, _Range]], row_bytes: int) -> list[list[tuple[int, _Range]]]:
    """Small neighbours together: a short capture is one job."""
    jobs: list[list[tuple[int, _Range]]] = []
    size = PART_BYTES
    for index, one in parts:
        if size >= PART_BYTES:
            jobs.append([])
            size = 0
        jobs[-1].append((index, one))
        size += one.rows * row_bytes
    return jobs


def _encode_ranges(job: list[tuple[int, _Range]], codec: Codec, chunk_rows: int) -> list[tuple[int, TapData]]:
    done = [(index, *_encode_range(one, codec, chunk_rows)) for index, one in job]
    _measure([(data, sample) for _, data, sample in done], codec)
    return [(index, data) for index, data, _ in done]


class _Sample(NamedTuple):
    """Every 16th row of a range."""

    bits: Bits
    """[rows, hidden]"""
    payload: Bits
    """uint8 [rows, bytes of a row]: what a codec that rounds made of them."""
    scales: Array
    """float32 [rows]"""


def _encode_range(one: _Range, codec: Codec, chunk_rows: int) -> tuple[TapData, _Sample]:
    bits = one.states()
    out = TapData(rows=len(bits))
    chunks = codec.encode_chunks(bits, chunk_rows)
    payload, at = memoryview(chunks.payload), 0
    out.buffers.append(payload)
    out.sizes += chunks.sizes
    out.scales += chunks.scales
    for size in chunks.sizes:
        out.checksums.append(_digest(payload[at : at + size]))
        at += size
    every = slice(-one.start % SAMPLE_STRIDE, None, SAMPLE_STRIDE)
    if chunks.scales:
        rounded = np.frombuffer(payload, np.uint8).reshape(len(bits), -1)[every]
        return out, _Sample(bits[every], rounded, np.concatenate(chunks.scales)[every])
    return out, _Sample(bits[every], np.empty((0, 0), np.uint8), np.empty(0, np.float32))


def _digest(payload: memoryview) -> int:
    """xxh3-64; in pieces for which the GIL is kept: they are done before another thread would have woken."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(payload), DIGESTED_BYTES):
        digest.update(payload[start : start + DIGESTED_BYTES])
    return digest.intdigest()


def _measure(encoded: list[tuple[TapData, _Sample]], codec: Codec) -> None:
    """Norms of the sampled rows, and what a codec that rounds did to them. All of a job's at a time: a few rows are not worth
    giving up the GIL for, as each of these steps does."""
    bits = np.concatenate([sample.bits for _, sample in encoded])
    true = _exact(bits, codec.dtype)
    norms, errors = norms_of(true), None
    if codec.has_scales and len(bits):
        payload = np.concatenate([sample.payload for _, sample in encoded if sample.payload.size])
        scales, decoded = np.concatenate([sample.scales for _, sample in encoded]), np.empty_like(bits)
        codec.decode(payload.reshape(-1).data, scales, decoded)
        values = _exact(decoded, codec.dtype)
        with np.errstate(invalid="ignore"):
            errors = norms_of(np.subtract(values, true, out=values)) / np.maximum(norms, 1e-150)
    stop = 0
    for data, sample in encoded:
        start, stop = stop, stop + len(sample.bits)
        data.norms = norms[start:stop]
        if errors is not None and stop > start:
            part = errors[start:stop]
            data.errors, data.error_sum, data.error_max = len(part), float(part.sum()), float(part.max())


def _exact(bits: Bits, dtype: str) -> Array:
    """The values of ``bits`` in float64, in which no square of them overflows."""
    with np.errstate(invalid="ignore"):  # NaN, where the door was told to let it in
        return floats_of(bits, dtype).astype(np.float64)


def sampled_norms(bits: Bits, dtype: str) -> Array:
    """float64: Euclidean norms of every 16th of ``bits`` [rows, hidden]."""
    return norms_of(_exact(np.ascontiguousarray(bits[::SAMPLE_STRIDE]), dtype))
