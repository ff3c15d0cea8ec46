"""Reading a store: any capture by key, any taps, any token range, proven as it is read."""

from __future__ import annotations

import collections
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from headrace.bits import NAN_BITS, TORCH_DTYPES, Bits, bits_of
from headrace.errors import CorruptError, StoreError
from headrace.store.dataset import Dataset, read_dataset
from headrace.store.encode import kept_positions
from headrace.store.folder import INDEX, Folder, open_folder
from headrace.store.format import Array, FinalPositions
from headrace.store.index import Index, KeySet, keys_of
from headrace.store.shard import Shard
from headrace.types import Capture, CaptureSpec, Tap

if TYPE_CHECKING:
    import torch

    from headrace.store.cache import Cache

Missing = Literal["error", "nan", "zero"]
MAX_OPEN = 1024
"""Shards kept open at a time; the least recently used is closed."""
MAX_ANCESTORS = 64
REQUESTS = 16
"""Shards of a bucket opened at a time."""


class Entry(NamedTuple):
    """What the index knows of one capture."""

    key: str
    shard: str
    """Name of the first shard that holds it."""
    slot: int
    tokens: int
    supervised: int


class Store:
    """A store opened for reading. Threads may share it; pickling it (for data-loader workers) opens it anew.

    ``spec`` names the taps that ``len``, ``keys`` and plain reads are about: those the store was made with, or the ones
    given to :meth:`open`, which may come from several passes over the same rows.
    """

    def __init__(
        self, folder: Folder, dataset: Dataset, index: Index, taps: Sequence[Tap] | None = None
    ) -> None:
        self.folder = folder
        self.name = folder.name
        self.dataset = dataset
        self.index = index
        self._taps = None if taps is None else tuple(taps)
        self.spec = dataset.spec if taps is None else _with_taps(dataset.spec, tuple(taps))
        self._lock = threading.Lock()
        self._shards: collections.OrderedDict[str, Shard] = collections.OrderedDict()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        taps: Sequence[Tap] | None = None,
        *,
        cache: Cache | None = None,
    ) -> Store:
        """Open a folder or URL. Takes time and memory for the index only, however much the store holds. ``cache`` keeps on
        disk what is read of a URL's shards.

        Raises InputError when there is no store, CorruptError when ``dataset.json`` or a shard that the index does not know
        yet is damaged, SpecMismatchError (a ValueError) for taps that the target cannot have.
        """
        folder = open_folder(path, cache)
        dataset = read_dataset(folder)
        return cls(folder, dataset, load_index(folder, dataset), taps)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.name, self._taps, self.folder.cache)

    def refresh(self) -> Store:
        """This store again with the shards sealed since it was opened."""
        index = update_index(self.index, self.folder, self.dataset)
        return Store(self.folder, self.dataset, index, self._taps)

    def close(self) -> None:
        """Let go of the open shards; reading opens them again."""
        with self._lock:
            self._shards.clear()

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def codec(self) -> str:
        """Name of the store's codec."""
        return self.dataset.codec

    @property
    def final_positions(self) -> FinalPositions:
        """``supervised`` when the final state is kept only where the next token is supervised."""
        return self.dataset.final_positions

    @property
    def provenance(self) -> dict[str, Any]:
        """What the writer that made the store said about itself; each shard carries its own writer's as well."""
        return self.dataset.provenance

    @functools.cached_property
    def taps(self) -> tuple[Tap, ...]:
        """Every tap that some shard holds: those of ``spec`` first."""
        more = {tap for shard in self.index.shards for tap in shard.taps} - set(self.spec.taps)
        return (*self.spec.taps, *sorted(more, key=lambda tap: (isinstance(tap, str), tap)))

    @functools.cached_property
    def _rows(self) -> Array:
        return self.index.with_taps(self.spec.taps)

    @functools.cached_property
    def key_set(self) -> KeySet:
        """Keys of the captures that have all taps of ``spec``, as a set that takes 16 bytes a key."""
        return KeySet(self.index.hi[self._rows], self.index.lo[self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self.key_set

    def __iter__(self) -> Iterator[str]:
        return iter(self.key_set)

    def keys(self) -> list[str]:
        """Keys of the captures that have all taps of ``spec``, sorted."""
        return keys_of(self.index.hi[self._rows], self.index.lo[self._rows])

    def lengths(self) -> Array:
        """int32 [len(self)]: tokens of each capture, in the order of :meth:`keys`."""
        return self.index.tokens[self._rows]

    def lengths_of(self, keys: Sequence[str]) -> Array:
        """int32 [len(keys)]: tokens of these captures. Raises KeyError for one that is not stored."""
        return self.index.tokens[np.array([self._find(key)[0] for key in keys], np.int64)]

    @property
    def tokens(self) -> int:
        """Tokens of all captures."""
        return int(self.lengths().sum(dtype=np.int64))

    @property
    def supervised(self) -> int:
        """Supervised tokens of all captures."""
        return int(self.index.supervised[self._rows].sum(dtype=np.int64))

    @property
    def bytes_raw(self) -> int:
        """Bytes the captures' states would take uncompressed, at all positions and all taps of ``spec``."""
        return self.tokens * self.spec.bytes_per_token

    @property
    def bytes_stored(self) -> int:
        """Bytes of the shard files that hold taps of ``spec``, tables included."""
        mine = set(self.spec.taps)
        return sum(shard.bytes for shard in self.index.shards if mine & set(shard.taps))

    def entry(self, key: str) -> Entry:
        """Where a capture is and how long. Raises KeyError."""
        row = self._find(key)[0]
        index = self.index
        shard = index.shards[index.shard[row]].name
        return Entry(key, shard, int(index.slot[row]), int(index.tokens[row]), int(index.supervised[row]))

    # --- captures -----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Capture:
        return self.get(key)

    def get(
        self,
        key: str,
        taps: Sequence[Tap] | None = None,
        start: int | None = None,
        stop: int | None = None,
        *,
        missing: Missing = "error",
    ) -> Capture:
        """The capture of a key: ids, mask and states of tokens ``start:stop`` at ``taps`` (default: those of ``spec``).

        ``missing`` says what to do about final states that ``final_positions="supervised"`` left out: raise, or fill them
        with NaN or zero. Raises KeyError for a key or tap that is not stored, CorruptError for damaged bytes, StoreError for
        states left out.
        """
        import torch

        taps = self.spec.taps if taps is None else tuple(taps)
        ids, mask = self.tokens_of(key)
        first, last, _ = slice(start, stop).indices(len(ids))
        last = max(first, last)
        states = torch.empty(
            (len(taps), last - first, self.spec.hidden_size), dtype=TORCH_DTYPES[self.spec.dtype]
        )
        self.read_into(key, states, taps, first, missing=missing)
        return Capture(key, ids[first:last], states, mask[first:last])

    def tokens_of(self, key: str) -> tuple[Array, Array]:
        """ids int32 [tokens] and mask bool [tokens] of a capture, copied. Raises KeyError."""
        row = self._find(key)[0]
        shard, slot = self._shard(row), int(self.index.slot[row])
        return shard.ids(slot).copy(), shard.mask(slot)

    def read_into(
        self,
        key: str,
        out: torch.Tensor,
        taps: Sequence[Tap] | None = None,
        start: int = 0,
        *,
        missing: Missing = "error",
    ) -> None:
        """Decode straight into ``out`` [taps, tokens, hidden], beginning at token ``start``. ``out`` must be in the spec's dtype.

        Each ``out[tap]`` must be contiguous; raises as :meth:`get` does.
        """
        self.read_bits(key, bits_of(out), taps, start, missing=missing)

    def read_bits(
        self,
        key: str,
        out: Bits,
        taps: Sequence[Tap] | None = None,
        start: int = 0,
        *,
        missing: Missing = "error",
    ) -> None:
        """:meth:`read_into` for the bits of states, uint16 or uint32 [taps, tokens, hidden]."""
        for position, tap in enumerate(self.spec.taps if taps is None else taps):
            self._fill(key, tap, start, out[position], missing, 0)

    def expect(self, key: str, taps: Sequence[Tap] | None = None) -> None:
        """Say that a capture will be read soon, so that its disk can begin; returns at once. Raises KeyError. Without effect on
        states that are a parent's, and in a bucket."""
        for tap in self.spec.taps if taps is None else taps:
            shard, slot = self.place(key, tap)
            shard.expect(slot, tap)

    def final_kept(self, key: str) -> Array:
        """bool [tokens]: where this store keeps the final state of a capture (everywhere, unless told otherwise)."""
        _, mask = self.tokens_of(key)
        keep = kept_positions(mask, "final", self.final_positions)
        return np.ones(len(mask), bool) if keep is None else keep

    def _fill(self, key: str, tap: Tap, start: int, out: Bits, missing: Missing, depth: int) -> None:
        row = self._row_with(key, tap)
        shard, slot = self._shard(row), int(self.index.slot[row])
        stop = start + len(out)
        parent, shared = shard.parent(slot) or ("", 0)
        if start < shared:
            own = min(stop, shared)
            self._fill_parent(key, parent, tap, start, out[: own - start], missing, depth)
            out, start = out[own - start :], own
        keep = kept_positions(shard.mask(slot), tap, shard.info.final_positions)
        if keep is None:
            shard.read(slot, tap, start - shared, stop - shared, out)
        elif start < stop:
            self._fill_kept(key, shard, slot, keep[shared:], start - shared, out, missing)

    def _fill_parent(
        self, key: str, parent: str, tap: Tap, start: int, out: Bits, missing: Missing, depth: int
    ) -> None:
        if depth >= MAX_ANCESTORS:
            raise CorruptError(
                f"{self.name}: the parents of {key} go back further than {MAX_ANCESTORS}; run headrace repair"
            )
        try:
            self._fill(parent, tap, start, out, missing, depth + 1)
        except KeyError as exc:
            raise CorruptError(
                f"{self.name}: {key} takes its first states from {parent}, which is not stored; run headrace repair"
            ) from exc

    def _fill_kept(
        self, key: str, shard: Shard, slot: int, keep: Array, start: int, out: Bits, missing: Missing
    ) -> None:
        wanted = keep[start : start + len(out)]
        if missing == "error" and not wanted.all():
            raise StoreError(
                f"{self.name} keeps the final state only where the next token is supervised: {int(wanted.sum())} of the {len(wanted)} "
                f"positions asked of {key}. Read with missing='zero' or 'nan' and use only those, or extract with all positions"
            )
        first = int(keep[:start].sum())
        rows = np.empty((int(wanted.sum()), out.shape[1]), out.dtype)
        shard.read(slot, "final", first, first + len(rows), rows)
        out[...] = NAN_BITS[self.spec.dtype] if missing == "nan" else 0
        out[wanted] = rows

    # --- finding ------------------------------------------------------------------------------------------------------

    def key_at(self, row: int) -> str:
        """Key of a row of the index."""
        return keys_of(self.index.hi[row : row + 1], self.index.lo[row : row + 1])[0]

    def place(self, key: str, tap: Tap) -> tuple[Shard, int]:
        """The open shard and the slot that hold a capture at a tap. Raises KeyError."""
        row = self._row_with(key, tap)
        return self._shard(row), int(self.index.slot[row])

    def parent(self, key: str) -> tuple[str, int] | None:
        """Key of a capture's parent and how many first tokens take their states from it; None without one."""
        shard, slot = self.place(key, self.spec.taps[0])
        return shard.parent(slot)

    def _find(self, key: str) -> range:
        rows = self.index.find(key)
        if not rows:
            raise KeyError(f"{key} is not in {self.name}")
        return rows

    def _row_with(self, key: str, tap: Tap) -> int:
        rows = self._find(key)
        for row in rows:
            if tap in self.index.shards[self.index.shard[row]].taps:
                return row
        have = sorted({str(t) for row in rows for t in self.index.shards[self.index.shard[row]].taps})
        raise KeyError(f"{key} has no tap {tap} in {self.name}; it has {have}")

    def _shard(self, row: int) -> Shard:
        about = self.index.shards[self.index.shard[row]]
        with self._lock:
            shard = self._shards.get(about.name)
            if shard is not None:
                self._shards.move_to_end(about.name)
                return shard
        shard = open_shard(self.folder, about.name, self.dataset)
        if shard.prefix.digest != about.digest:
            raise StoreError(
                f"{shard.name} is not the file that the index of {self.name} knows; run headrace repair"
            )
        with self._lock:
            self._shards[about.name] = shard
            while len(self._shards) > MAX_OPEN:
                self._shards.popitem(last=False)
        return shard


def _reopen(name: str, taps: tuple[Tap, ...] | None, cache: Cache | None) -> Store:
    return Store.open(name, taps, cache=cache)


def open_shard(folder: Folder, name: str, dataset: Dataset) -> Shard:
    """Open a shard of the store described by ``dataset``. Raises CorruptError when it is damaged or foreign."""
    shard = Shard(folder.open_shard(name))
    shard.require(dataset)
    return shard


def open_shards(folder: Folder, names: Iterable[str], dataset: Dataset) -> Iterator[tuple[str, Shard]]:
    """Open many shards, in order, several at a time where each is a request; raises as :func:`open_shard` does."""
    if not folder.remote:
        yield from ((name, open_shard(folder, name, dataset)) for name in names)
        return
    with ThreadPoolExecutor(REQUESTS, "headrace-open") as pool:
        names = list(names)
        yield from zip(names, pool.map(lambda name: open_shard(folder, name, dataset), names), strict=True)


def load_index(folder: Folder, dataset: Dataset) -> Index:
    """``index.parquet`` brought up to date with the shards in the folder; nothing is written."""
    data = folder.read_file(INDEX)
    return update_index((Index.from_parquet(data) if data else None) or Index.empty(), folder, dataset)


def update_index(index: Index, folder: Folder, dataset: Dataset) -> Index:
    """``index`` without the shards that are gone and with those that are new. Raises CorruptError for a damaged new one."""
    names = folder.shard_names()
    known = {shard.name for shard in index.shards}
    index = index.without(known.difference(names))
    return index.plus(open_shards(folder, [name for name in names if name not in known], dataset))


def _with_taps(spec: CaptureSpec, taps: tuple[Tap, ...]) -> CaptureSpec:
    return CaptureSpec.from_dict({**spec.to_dict(), "taps": taps})
