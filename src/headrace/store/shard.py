"""Reading one shard: its tables at once, states of any (capture, tap, rows) alone, every byte proven before it is used."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import xxhash

from headrace.bits import Bits, bits_dtype
from headrace.errors import CorruptError, HeadraceError
from headrace.store.codecs import open_codec
from headrace.store.dataset import Dataset
from headrace.store.folder import Source
from headrace.store.format import Array, Prefix, header_end, parse_prefix, payload_start, unpack_mask
from headrace.types import Tap, row_key

_FIRST_READ = 65_536
MEND = "run headrace repair on the store, then extract again"


class Chunk(NamedTuple):
    """One chunk of a tap's payload."""

    number: int
    """In the tap's chunk table."""
    rows: int
    start: int
    """Bytes inside the tap's payload."""
    stop: int


def read_prefix(source: Source) -> Prefix:
    """Read and prove a shard's header and tables. Raises CorruptError."""
    first = source.read(0, _FIRST_READ)
    end = header_end(bytes(first[:8]), source.size, source.name)
    header = bytes(first[:end] if end <= len(first) else source.read(0, end))
    size = payload_start(header, source.size, source.name)
    return parse_prefix(source.read(0, size), source.size, source.name)


class Shard:
    """An open shard. Raises CorruptError on opening when its tables are damaged or its size is wrong."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.name = source.name
        self.prefix = read_prefix(source)
        self.info = self.prefix.info
        self.tables = self.prefix.tables
        self.spec = self.info.spec
        self._codec = open_codec(self.info.codec, self.spec.dtype)

    def __len__(self) -> int:
        return len(self.tables.keys)

    def require(self, dataset: Dataset) -> None:
        """Raise CorruptError unless this shard belongs to the store described by ``dataset``."""
        mine = Dataset(spec=self.spec, codec=self.info.codec, final_positions=self.info.final_positions)
        try:
            dataset.require_same(mine, "the store", any_taps=True)
        except HeadraceError as exc:
            raise CorruptError(f"{self.name} does not belong to this store: {exc}. Move it away") from exc

    # --- tables -------------------------------------------------------------------------------------------------------

    def key(self, slot: int) -> str:
        """Key of a capture, 32 hex digits."""
        return bytes(self.tables.keys[slot]).hex()

    def ids(self, slot: int) -> Array:
        """int32 [tokens], a view."""
        return self.tables.ids[self.tables.offsets[slot] : self.tables.offsets[slot + 1]]

    def mask(self, slot: int) -> Array:
        """bool [tokens]"""
        return unpack_mask(
            self.tables.mask, int(self.tables.offsets[slot]), int(self.tables.offsets[slot + 1])
        )

    def parent(self, slot: int) -> tuple[str, int] | None:
        """Key of the parent and number of tokens whose states are the parent's."""
        if self.tables.parents is None or self.tables.shared is None or not self.tables.shared[slot]:
            return None
        return self.tables.parents[slot].tobytes().hex(), int(self.tables.shared[slot])

    def check_key(self, slot: int) -> None:
        """Raise CorruptError unless the key is the hash of the capture's ids and mask."""
        if row_key(self.ids(slot), self.mask(slot)) != self.key(slot):
            raise CorruptError(
                f"{self.name}: the key {self.key(slot)} is not the hash of its ids and mask; {MEND}"
            )

    # --- states -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _first_chunks(self) -> Array:
        """int64 [n+1, taps]: number of a capture's first chunk in each tap's table."""
        counts = -(-np.diff(self.tables.rows, axis=0) // self.info.chunk_rows)
        return np.concatenate([np.zeros((1, counts.shape[1]), np.int64), np.cumsum(counts, axis=0)])

    def rows(self, slot: int, tap: Tap) -> int:
        """Number of stored rows of a capture at a tap."""
        index = self.spec.tap_index(tap)
        return int(self.tables.rows[slot + 1, index] - self.tables.rows[slot, index])

    def chunks(self, slot: int, tap: Tap) -> list[Chunk]:
        """The chunks of a capture at a tap, in order."""
        first = int(self._first_chunks[slot, self.spec.tap_index(tap)])
        left, step, ends = self.rows(slot, tap), self.info.chunk_rows, self.tables.ends[tap]
        out = []
        start = int(ends[first - 1]) if first else 0
        for number in range(first, first - (-left // step)):
            stop = int(ends[number])
            out.append(Chunk(number, min(step, left), start, stop))
            start, left = stop, left - step
        return out

    def read(self, slot: int, tap: Tap, start: int, stop: int, out: Bits) -> None:
        """Fill ``out`` [stop - start, hidden] with stored rows ``start:stop`` of a capture at a tap.

        Only the chunks that hold them are read; each is checked before it is decoded. Raises CorruptError.
        """
        if start >= stop:
            return
        step = self.info.chunk_rows
        chunks = self.chunks(slot, tap)[start // step : -(-stop // step)]
        base = self.prefix.starts[tap]
        data = self.source.read(base + chunks[0].start, base + chunks[-1].stop)
        at = start // step * step
        if self._codec.has_scales:
            self._read_rows(slot, tap, chunks, data, start - at, out)
            return
        for chunk in chunks:
            payload = data[chunk.start - chunks[0].start : chunk.stop - chunks[0].start]
            self.verify(slot, tap, chunk, payload)
            first, last = max(start, at), min(stop, at + chunk.rows)
            if (first, last) == (at, at + chunk.rows):
                self._decode(slot, tap, payload, None, out[first - start : last - start])
            else:
                whole = np.empty((chunk.rows, self.spec.hidden_size), bits_dtype(self.spec.dtype))
                self._decode(slot, tap, payload, None, whole)
                out[first - start : last - start] = whole[first - at : last - at]
            at += chunk.rows

    def _read_rows(
        self, slot: int, tap: Tap, chunks: list[Chunk], data: memoryview, first: int, out: Bits
    ) -> None:
        """Fill ``out`` from row ``first`` of ``chunks`` on, in one go: a lossy codec writes row after row, each as many bytes."""
        for chunk in chunks:
            self.verify(slot, tap, chunk, data[chunk.start - chunks[0].start : chunk.stop - chunks[0].start])
        width, rest = divmod(len(data), sum(chunk.rows for chunk in chunks))
        begin = self._first_row(slot, tap, chunks[0]) + first
        payload = data if rest else data[first * width : (first + len(out)) * width]  # of a wrong size, whole
        scales = self.tables.scales.get(tap)
        self._decode(slot, tap, payload, None if scales is None else scales[begin : begin + len(out)], out)

    def expect(self, slot: int, tap: Tap) -> None:
        """Say that the rows of a capture at a tap will be read soon."""
        first, last = self._first_chunks[slot : slot + 2, self.spec.tap_index(tap)].tolist()
        if first < last:
            ends, base = self.tables.ends[tap], self.prefix.starts[tap]
            self.source.expect(base + (int(ends[first - 1]) if first else 0), base + int(ends[last - 1]))

    def _decode(self, slot: int, tap: Tap, payload: memoryview, scales: Array | None, out: Bits) -> None:
        try:
            self._codec.decode(payload, scales, out)
        except CorruptError as exc:
            raise CorruptError(f"{self._where(slot, tap)} cannot be decoded: {exc}; {MEND}") from exc

    def verify(self, slot: int, tap: Tap, chunk: Chunk, payload: memoryview) -> None:
        """Raise CorruptError unless a chunk's payload has its checksum."""
        if xxhash.xxh3_64_intdigest(payload) != int(self.tables.checksums[tap][chunk.number]):
            raise CorruptError(self._damage(slot, tap))

    def damaged(self, tap: Tap, numbers: Array) -> list[tuple[int, str]]:
        """(slot, message) of every chunk among ``numbers`` (ascending places in the tap's table) that is not as it was written.

        One loop over plain integers: a store of a million short captures has millions of chunks.
        """
        ends, base = self.tables.ends[tap], self.prefix.starts[tap]
        starts = np.where(numbers > 0, ends[numbers - 1], 0).tolist()
        stops, sums = ends[numbers].tolist(), self.tables.checksums[tap][numbers].tolist()
        firsts = self._first_chunks[:, self.spec.tap_index(tap)]
        slots = (np.searchsorted(firsts, numbers, side="right") - 1).tolist()
        whole, read = self._read_span(base, starts, stops), self.source.read
        found = []
        for slot, start, stop, expected in zip(slots, starts, stops, sums, strict=True):
            try:
                data = (
                    read(base + start, base + stop)
                    if whole is None
                    else whole[start - starts[0] : stop - starts[0]]
                )
            except OSError as exc:
                found.append((slot, f"{self.name} cannot be read ({exc.strerror}); run headrace repair"))
                continue
            if xxhash.xxh3_64_intdigest(data) != expected:
                found.append((slot, self._damage(slot, tap)))
        return found

    def _read_span(self, base: int, starts: list[int], stops: list[int]) -> memoryview | None:
        """Neighbouring chunks in one read; None when they lie apart or the read fails, so that each is read by itself."""
        if not starts or starts[1:] != stops[:-1]:
            return None
        try:
            return self.source.read(base + starts[0], base + stops[-1])
        except OSError:
            return None

    def _damage(self, slot: int, tap: Tap) -> str:
        return f"{self._where(slot, tap)} are damaged (wrong checksum); {MEND}"

    def _first_row(self, slot: int, tap: Tap, chunk: Chunk) -> int:
        """Of a chunk, among all of a tap's."""
        index = self.spec.tap_index(tap)
        inside = (chunk.number - int(self._first_chunks[slot, index])) * self.info.chunk_rows
        return int(self.tables.rows[slot, index]) + inside

    def _where(self, slot: int, tap: Tap) -> str:
        return f"{self.name}: the states of {self.key(slot)} at tap {tap}"
