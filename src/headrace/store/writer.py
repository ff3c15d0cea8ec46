"""Writing a store: states are checked at the door, encoded in worker threads, and sealed as immutable shards.

Memory stays under two shards (one being filled, one being written) plus twice ``queue_bytes`` (states waiting for an
encoder, and what became of them) and some 200 MB. Any number of writers, processes and hosts may write to one store at a time: each names its own shards, so there
are no locks. What is sealed is durable; what is not is simply captured again.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.bits import TORCH_DTYPES, bits_of, first_bad_row
from headrace.config import Section
from headrace.errors import CaptureError, ConfigError, SpecMismatchError, StoreError
from headrace.memory import shared_pool
from headrace.store.build import Arena, ShardBuilder
from headrace.store.codecs import chunk_rows, default_codec, open_codec
from headrace.store.dataset import Dataset, create_dataset, read_dataset
from headrace.store.encode import Encoded, Encoding, Parent, encoder_pool, kept_positions
from headrace.store.folder import DATASET, WritableFolder, new_shard_name, open_folder
from headrace.store.format import FinalPositions
from headrace.store.index import KeySet
from headrace.store.publish import write_index, write_shard
from headrace.store.reader import Store, load_index
from headrace.store.repair import STALE_SECONDS, heal_store
from headrace.types import CaptureSpec, Row, row_key

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float

log = logging.getLogger(__name__)
SMALL_SHARD = 64 << 20
"""A shard is not made smaller than this for the sake of an early end."""
ENCODED_SHARE = 0.7
"""Of the bytes of states, what a lossless codec leaves of them, about."""


class WriterOptions(Section):
    """Limits of a writer; the defaults suit everything but tests."""

    shard_bytes: int = 1 << 30
    """Encoded bytes at which a shard is sealed. A writer holds about two shards in memory."""
    shard_captures: int = 65_536
    """Captures at which a shard is sealed."""
    shard_seconds: float = 120.0
    """Age at which a shard is sealed although it is small, so that a kill costs a slow engine at most this much work."""
    workers: int = 0
    """Encoder threads; 0: as ``encoder_threads`` says for one of so many ``writers`` on this host."""
    writers: int = 1
    queue_bytes: int = 512 << 20
    """States waiting for an encoder at most, or half of it and one capture; ``add`` blocks beyond it."""
    allow_zeros: bool = False
    """Accept states that are all zero; otherwise they are taken for a buffer that was never filled."""
    checked_values: bool = False
    """The caller has looked at every value for NaN, infinities and zeros; a second look would halve what one thread can add."""
    trust_bytes: int = 2 << 30
    """Payload checked when an existing store is opened: all of a smaller store, a random sample of a larger one. What is
    broken is set aside and captured again."""
    add_taps: bool = False
    """Add other taps to the rows of an existing store, instead of refusing them."""


class StoreWriter:
    """Writes captures into a store (a folder or a URL), making it if it is not there. Use as a context manager; ``add`` may be called by threads.

    Leaving the block seals what was added, also when it is left by an error: finished work is never lost.

    Raises SpecMismatchError when the store exists and holds states of another spec, codec or policy; StoreError when the
    folder cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | WritableFolder,
        spec: CaptureSpec,
        *,
        codec: str | None = None,
        final_positions: FinalPositions | None = None,
        provenance: dict[str, Any] | None = None,
        shard_bytes: int | None = None,
        options: WriterOptions | None = None,
    ) -> None:
        self._folder = open_folder(path)
        self.name = self._folder.name
        self.options = options = options or WriterOptions()
        self.shard_bytes = options.shard_bytes if shard_bytes is None else shard_bytes
        self.spec = spec
        self.provenance = provenance or {}
        self.dataset = self._open(codec, final_positions)
        self._codec = open_codec(self.dataset.codec, spec.dtype)
        self._chunk_rows = chunk_rows(spec.hidden_size)
        self.removed = self._folder.remove_leftovers(STALE_SECONDS)
        self.repaired = heal_store(self._folder, self.dataset, self.options.trust_bytes)
        self._index = load_index(self._folder, self.dataset)
        self._check_taps()
        self._view = Store(self._folder, self.dataset, self._index, spec.taps)
        self.done = DoneKeys(self._view.key_set)
        self._lock = threading.RLock()
        self._open_keys: dict[str, Row] = {}
        self._pending: collections.deque[tuple[Encoding | Future[Encoded], int]] = collections.deque()
        self._queued = 0
        self._arenas = [Arena(self.shard_bytes) for _ in range(2)]
        self._builder = self._new_builder()
        self._opened_at = time.monotonic()
        self._sealing: tuple[Future[None], ShardBuilder] | None = None
        self._sequence = 0
        self._expected: float | None = None
        self._failed: Exception | None = None
        self._closed = False
        self._encoders = encoder_pool(self._codec, options.workers, options.writers)
        self._sealer = ThreadPoolExecutor(1, "headrace-seal")

    def _open(self, codec: str | None, final_positions: FinalPositions | None) -> Dataset:
        """Make the store or join it; what the caller left open is taken from it."""
        if codec is not None:
            open_codec(codec, self.spec.dtype)
        if self._folder.read_file(DATASET) is None:
            if self._folder.shard_names():
                read_dataset(self._folder)
            fresh = Dataset(
                spec=self.spec,
                codec=codec or default_codec(self.spec.dtype),
                final_positions=final_positions or "all",
                provenance=self.provenance,
            )
            create_dataset(self._folder, fresh)
        found = read_dataset(self._folder)
        mine = Dataset(
            spec=self.spec,
            codec=codec or found.codec,
            final_positions=final_positions or found.final_positions,
        )
        found.require_same(mine, self.name, any_taps=self.options.add_taps)
        self._folder.require_writable()
        return found

    def _check_taps(self) -> None:
        mine = set(self.spec.taps)
        for taps in [self.dataset.spec.taps, *(shard.taps for shard in self._index.shards)]:
            if mine & set(taps) and tuple(taps) != self.spec.taps:
                raise SpecMismatchError(
                    f"{self.name} already has taps {[t for t in taps if t in mine]}; a second pass must bring only new taps (or repeat an "
                    f"earlier pass exactly: {list(taps)})"
                )

    def expect(self, states_bytes: int) -> None:
        """Say how many bytes of states are still to come: the last shards then get smaller and smaller, so that little is left
        to write when the last state has come. A guess will do."""
        with self._lock:
            self._expected = states_bytes

    # --- adding -------------------------------------------------------------------------------------------------------

    def add(
        self, row: Row, states: Float[torch.Tensor, "taps tokens hidden"], *, parent: Parent | None = None
    ) -> bool:
        """Take the states [taps, tokens, hidden] of ``row``; False when its key is stored or waiting already.

        The tensor is not copied: the caller must not write to it again. With ``parent``, the states are those of the tokens
        after the shared ones. Blocks while encoders are behind.

        Raises CaptureError, naming tap and position, for a wrong shape, dtype or device, NaN, infinity or an all-zero
        state; StorageFullError or StoreError when an earlier shard could not be written.
        """
        bits = self._admit(row, states, parent)
        with self._lock:
            if not self._make_room(row, parent, bits.nbytes):
                return False
            encoding = Encoding(
                self._encoders,
                row,
                bits,
                self.spec,
                self._codec,
                chunk_rows=self._chunk_rows,
                policy=self.dataset.final_positions,
                parent=parent,
            )
            self._enqueue(row, encoding, bits.nbytes)
            return True

    def add_encoded(self, capture: Encoded) -> bool:
        """Take a capture that another shard of the same spec, codec and policy holds, as it is encoded there."""
        with self._lock:
            if not self._make_room(capture.row, capture.parent, 0):
                return False
            future: Future[Encoded] = Future()
            future.set_result(capture)
            self._enqueue(capture.row, future, 0)
            return True

    def _make_room(self, row: Row, parent: Parent | None, nbytes: int) -> bool:
        """Wait until the queue can take ``nbytes`` more; False when the row is here already."""
        self._require_open()
        if row.key in self._open_keys or row.key in self.done:
            return False
        if parent is not None:
            self._check_parent(row, parent)
        if self._sealing is not None and self._sealing[0].done():
            self._finish_seal()
        # One that is as large as the queue comes in when half of the queue is free: else all encoders would wait for it, and it
        # for them.
        limit = max(self.options.queue_bytes - nbytes, self.options.queue_bytes // 2)
        while self._pending and (self._pending[0][0].done() or self._queued > limit):
            self._collect()
        return True

    def _enqueue(self, row: Row, future: Encoding | Future[Encoded], nbytes: int) -> None:
        if not self._open_keys:
            self._opened_at = time.monotonic()
        self._open_keys[row.key] = row
        self._pending.append((future, nbytes))
        self._queued += nbytes
        if time.monotonic() - self._opened_at > self.options.shard_seconds:
            while self._pending:
                self._collect()
            self._start_seal()

    def _admit(self, row: Row, states: torch.Tensor, parent: Parent | None) -> Any:
        """Refuse at the door what cannot be right."""
        if row_key(row.ids, row.mask) != row.key:
            raise CaptureError(
                f"key {row.key} is not the hash of its row's ids and mask; make rows with Row.make"
            )
        shape = (len(self.spec.taps), len(row) - (parent.tokens if parent else 0), self.spec.hidden_size)
        wanted = TORCH_DTYPES[self.spec.dtype]
        if tuple(states.shape) != shape or states.dtype != wanted or states.device.type != "cpu":
            raise CaptureError(
                f"states of row {row.key} are {states.dtype} {list(states.shape)} on {states.device} where the spec says {wanted} "
                f"{list(shape)} on cpu; the engine's answer does not fit the row"
            )
        bits = bits_of(states.contiguous())
        if self.options.checked_values:
            return bits
        shared = len(row) - shape[1]
        for index, tap in enumerate(self.spec.taps):
            keep = kept_positions(row.mask, tap, self.dataset.final_positions)
            keep = np.ones(shape[1], bool) if keep is None else keep[shared:]
            # an embedding may have a row of zeros (padding tokens do), a residual stream does not
            zeros_allowed = self.options.allow_zeros or tap == 0
            bad = first_bad_row(bits[index], self.spec.dtype, None if zeros_allowed else keep)
            if bad is not None:
                position = shared + bad[0]
                raise CaptureError(
                    f"states of row {row.key} hold {bad[1]} at tap {tap}, position {position}; they were not stored"
                )
        return bits

    def _check_parent(self, row: Row, parent: Parent) -> None:
        if parent.key in self._open_keys:
            ids = self._open_keys[parent.key].ids
        elif parent.key in self.done:
            if parent.key not in self._view:
                self._view = self._view.refresh()
            ids = self._view.tokens_of(parent.key)[0]
        else:
            raise ConfigError(
                f"row {row.key} names parent {parent.key}, which is not stored; add the parent first"
            )
        shared = parent.tokens
        if not 0 < shared <= min(len(ids), len(row)) or bool((ids[:shared] != row.ids[:shared]).any()):
            raise ConfigError(
                f"row {row.key} does not begin with the first {shared} tokens of its parent {parent.key}"
            )

    # --- sealing ------------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Encode and write everything added so far; on return it is durable and in ``done``. Raises StorageFullError."""
        with self._lock:
            self._require_open()
            while self._pending:
                self._collect()
            self._start_seal()
            self._finish_seal()

    def _collect(self) -> None:
        """Move the oldest capture in the queue into the shard being filled; seal it when it is full."""
        future, nbytes = self._pending.popleft()
        self._queued -= nbytes
        encoded = future.result()
        if self._expected is not None:
            self._expected -= nbytes
        full = (
            self._builder.nbytes + encoded.nbytes > self._shard_limit()
            or len(self._builder.captures) >= self.options.shard_captures
        )
        if full and self._builder.captures:
            self._start_seal()
        self._builder.append(encoded)

    def _shard_limit(self) -> int:
        """Encoded bytes at which the shard being filled is sealed: half of what is still to come, within bounds."""
        if self._expected is None:
            return self.shard_bytes
        return min(self.shard_bytes, max(SMALL_SHARD, int(self._expected * ENCODED_SHARE / 2)))

    def _start_seal(self) -> None:
        self._finish_seal()
        if not self._builder.captures:
            return
        builder, self._builder = self._builder, self._new_builder()
        self._sequence += 1
        self._opened_at = time.monotonic()
        future = self._sealer.submit(write_shard, self._folder, new_shard_name(self._sequence), builder)
        self._sealing = (future, builder)

    def _finish_seal(self) -> None:
        """Wait for the shard being written and enter it in ``done``."""
        if self._sealing is None:
            return
        future, builder = self._sealing
        try:
            future.result()
        except StoreError as exc:
            self._failed = exc
            raise
        self._sealing = None
        keys = [capture.row.key for capture in builder.captures]
        for key in keys:
            del self._open_keys[key]
        self.done.update(keys)
        if builder.arena is not None:
            self._arenas.append(builder.arena)

    def _new_builder(self) -> ShardBuilder:
        # of the two arenas one is in the shard being written, until _finish_seal
        arena = self._arenas.pop()
        arena.clear()
        policy = self.dataset.final_positions
        return ShardBuilder(self.spec, self._codec, self._chunk_rows, policy, self.provenance, arena)

    # --- closing ------------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closed:
            raise StoreError(f"the writer of {self.name} is closed; open a new one")

    def close(self) -> None:
        """Seal, write the index, stop the threads; idempotent. Raises StorageFullError when sealing fails."""
        with self._lock:
            if self._closed:
                return
            try:
                if self._failed is None:
                    self.seal()
                    write_index(self._folder, self.dataset)
            finally:
                self._closed = True
                self._encoders.shutdown(wait=True, cancel_futures=True)
                self._sealer.shutdown(wait=True)
                self._arenas.clear()
                self._builder.arena = self._sealing = None
                shared_pool().trim()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DoneKeys(Set[str]):
    """Keys whose captures are sealed. Grows as shards are sealed; 16 bytes a key, plus a small set of the newest."""

    def __init__(self, keys: KeySet) -> None:
        self._keys = keys
        self._recent: set[str] = set()

    def __len__(self) -> int:
        return len(self._keys) + len(self._recent)

    def __contains__(self, key: object) -> bool:
        return key in self._recent or key in self._keys

    def __iter__(self) -> Iterator[str]:
        yield from self._keys
        yield from self._recent

    def update(self, keys: list[str]) -> None:
        """Add keys."""
        self._recent.update(keys)
        if len(self._recent) > 65_536:
            self._keys, self._recent = self._keys.plus(sorted(self._recent)), set()
