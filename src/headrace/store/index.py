"""The index: which shard and slot holds a key. Numpy arrays sorted by key; derived from the shards at any time.

A million captures are 32 MB here. ``index.parquet`` is this table on disk; a shard that it does not know is found by listing
the folder, and a damaged or missing file costs one pass over the shards' tables.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from headrace.store.format import KEY_BYTES, Array
from headrace.store.shard import Shard
from headrace.types import Tap

VERSION = 1
_COLUMNS = {"hi": "u8", "lo": "u8", "shard": "i4", "slot": "i4", "tokens": "i4", "supervised": "i4"}


class ShardRow(NamedTuple):
    """What the index keeps of a shard."""

    name: str
    bytes: int
    taps: tuple[Tap, ...]
    digest: str


@dataclass(frozen=True, eq=False)
class Index:
    """Immutable; one row a (key, shard), sorted by key and then by shard name."""

    shards: tuple[ShardRow, ...]
    """Sorted by name; ``shard`` below counts in it."""
    hi: Array
    """uint64 [rows]: first 8 bytes of the key, big-endian, so that numbers sort as hex digits do."""
    lo: Array
    """uint64 [rows]"""
    shard: Array
    """int32 [rows]"""
    slot: Array
    """int32 [rows]"""
    tokens: Array
    """int32 [rows]"""
    supervised: Array
    """int32 [rows]"""

    @classmethod
    def empty(cls) -> Index:
        """The index of a store without shards."""
        return cls((), *(np.empty(0, dtype) for dtype in _COLUMNS.values()))

    def __len__(self) -> int:
        return len(self.hi)

    def find(self, key: str) -> range:
        """Rows that hold ``key``; empty when there is none."""
        hi, lo = split_key(key)
        first, last = np.searchsorted(self.hi, [hi, hi], "left")[0], np.searchsorted(self.hi, hi, "right")
        inside = self.lo[first:last]
        return range(
            first + int(np.searchsorted(inside, lo, "left")),
            first + int(np.searchsorted(inside, lo, "right")),
        )

    def with_taps(self, taps: Sequence[Tap]) -> Array:
        """First row of each key that has all ``taps``, over its shards together; int64, sorted by key."""
        if not len(self):
            return np.empty(0, np.int64)
        starts = self.first_rows()
        having = np.ones(len(starts), bool)
        for tap in taps:
            has = np.array([tap in shard.taps for shard in self.shards])
            having &= np.logical_or.reduceat(has[self.shard], starts)
        return starts[having]

    def first_rows(self) -> Array:
        """First row of each distinct key; int64."""
        new = np.ones(len(self), bool)
        new[1:] = (self.hi[1:] != self.hi[:-1]) | (self.lo[1:] != self.lo[:-1])
        return np.flatnonzero(new)

    def without(self, names: Iterable[str]) -> Index:
        """This index without the rows of the shards called ``names``."""
        gone = set(names)
        if not gone:
            return self
        keep = np.array([shard.name not in gone for shard in self.shards], bool)
        number = np.cumsum(keep) - 1
        rows = keep[self.shard] if len(self) else np.empty(0, bool)
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        columns["shard"] = number[columns["shard"]].astype("i4")
        return Index(tuple(s for s in self.shards if s.name not in gone), **columns)

    def plus(self, added: Iterable[tuple[str, Shard]]) -> Index:
        """This index and the rows of more shards, given with their names."""
        parts, shards = [self._arrays()], list(self.shards)
        for name, shard in added:
            parts.append(_rows_of(shard, len(shards)))
            shards.append(ShardRow(name, shard.source.size, shard.spec.taps, shard.prefix.digest))
        if len(shards) == len(self.shards):
            return self
        order = sorted(range(len(shards)), key=lambda i: shards[i].name)
        rank = np.empty(len(shards), "i4")
        rank[order] = np.arange(len(shards), dtype="i4")
        columns = {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}
        columns["shard"] = rank[columns["shard"]]
        sort = np.lexsort((columns["shard"], columns["lo"], columns["hi"]))
        return Index(
            tuple(shards[i] for i in order), **{name: column[sort] for name, column in columns.items()}
        )

    def _arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in _COLUMNS}

    # --- on disk ------------------------------------------------------------------------------------------------------

    def to_parquet(self) -> bytes:
        """The content of ``index.parquet``."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = self._arrays()
        about = {"version": VERSION, "shards": self.shards, "digest": _digest(columns, self.shards)}
        table = pa.table({name: pa.array(column) for name, column in columns.items()})
        sink = io.BytesIO()
        # keys are random: no encoding or compression can shrink them
        pq.write_table(
            table.replace_schema_metadata({"headrace": json.dumps(about)}),
            sink,
            compression="none",
            use_dictionary=False,
        )
        return sink.getvalue()

    @classmethod
    def from_parquet(cls, data: bytes) -> Index | None:
        """The inverse; None when the file is damaged or of another version: it is derived, so it is simply made again."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(pa.BufferReader(data))
            about = json.loads(table.schema.metadata[b"headrace"])
            shards = tuple(ShardRow(n, b, tuple(t), d) for n, b, t, d in about["shards"])
            columns = {
                name: table.column(name).to_numpy().astype(dtype, copy=False)
                for name, dtype in _COLUMNS.items()
            }
            sound = about["version"] == VERSION and about["digest"] == _digest(columns, shards)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return cls(shards, **columns) if sound else None


class KeySet(Set[str]):
    """Keys as a read-only set over sorted arrays: 16 bytes each, however many there are."""

    def __init__(self, hi: Array, lo: Array) -> None:
        self._hi = hi
        self._lo = lo

    def __len__(self) -> int:
        return len(self._hi)

    def __contains__(self, key: object) -> bool:
        try:
            hi, lo = split_key(str(key))
        except KeyError:
            return False
        first, last = np.searchsorted(self._hi, hi, "left"), np.searchsorted(self._hi, hi, "right")
        return bool((self._lo[first:last] == lo).any())

    def plus(self, keys: Sequence[str]) -> KeySet:
        """This set and ``keys``, none of which is in it."""
        new = np.frombuffer(bytes.fromhex("".join(keys)), ">u8").astype("u8").reshape(-1, 2)
        hi, lo = np.concatenate([self._hi, new[:, 0]]), np.concatenate([self._lo, new[:, 1]])
        order = np.lexsort((lo, hi))
        return KeySet(hi[order], lo[order])

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 65_536):
            yield from keys_of(self._hi[start : start + 65_536], self._lo[start : start + 65_536])


def split_key(key: str) -> tuple[np.uint64, np.uint64]:
    """A key's two halves as numbers. Raises KeyError for what is not 32 hex digits."""
    try:
        data = bytes.fromhex(key)
    except ValueError:
        data = b""
    if len(data) != KEY_BYTES:
        raise KeyError(f"{key!r} is not a row's key (32 hex digits)")
    return np.uint64(int.from_bytes(data[:8], "big")), np.uint64(int.from_bytes(data[8:], "big"))


def keys_of(hi: Array, lo: Array) -> list[str]:
    """Keys as hex digits."""
    text = np.stack([hi, lo], axis=1).astype(">u8").tobytes().hex()
    return [text[i : i + 2 * KEY_BYTES] for i in range(0, len(text), 2 * KEY_BYTES)]


def _rows_of(shard: Shard, number: int) -> dict[str, Array]:
    tables = shard.tables
    halves = np.ascontiguousarray(tables.keys).view(">u8").astype("u8")
    return {
        "hi": halves[:, 0],
        "lo": halves[:, 1],
        "shard": np.full(len(shard), number, "i4"),
        "slot": np.arange(len(shard), dtype="i4"),
        "tokens": np.diff(tables.offsets).astype("i4"),
        "supervised": tables.supervised.astype("i4"),
    }


def _digest(columns: dict[str, Array], shards: Any) -> str:
    digest = xxhash.xxh3_64(json.dumps([list(shard) for shard in shards]).encode())
    for column in columns.values():
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()
