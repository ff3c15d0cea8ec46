"""From a store to training batches: shuffled exactly, packed under a token budget, decoded ahead by threads or processes, resumable.

The order of a run is a pure function of the seed, the epoch, the keys and their lengths: it is computed, never drawn as
the run goes, so a position in it is two numbers and resuming costs nothing.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import xxhash

from headrace.bits import TORCH_DTYPES, bits_of
from headrace.errors import ConfigError, SpecMismatchError
from headrace.store.format import Array
from headrace.store.reader import Missing, Store
from headrace.store.reading import Arrays, Readers, fill
from headrace.types import Capture, Tap

OPEN = 32
"""Batches kept open while packing: enough to fill them well, few enough to keep the shuffle a shuffle."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Whole documents laid one after another, without padding. T = tokens of all of them, at most the budget."""

    keys: tuple[str, ...]
    """One a document, in the order they lie in."""
    ids: torch.Tensor
    """int64 [T]"""
    mask: torch.Tensor
    """bool [T]: the row's loss mask, unshifted"""
    states: torch.Tensor
    """[taps, T, hidden], dtype of the store; pinned when asked for"""
    final_kept: torch.Tensor
    """bool [T]: where the store has the final state; elsewhere ``states`` holds zeros for it. All true unless the store was
    written with ``final_positions="supervised"``, which keeps it where the next token is supervised."""
    documents: torch.Tensor
    """int32 [T]: number of the document, 0 for the first"""
    positions: torch.Tensor
    """int64 [T]: position inside the document, from 0"""
    starts: torch.Tensor
    """int32 [documents + 1]: document d is tokens ``starts[d]:starts[d+1]`` (what variable-length attention calls cu_seqlens)"""
    epoch: int
    index: int
    """Number of the batch in its epoch, over all ranks"""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which share of the batches this process gets, and how it reads ahead."""

    rank: int = 0
    world_size: int = 1
    """Batch b of an epoch goes to rank b % world_size; batches left over at an epoch's end, which some ranks would not get, are
    dropped. They differ from epoch to epoch."""
    threads: int = 2
    """Decoder threads."""
    processes: int = 0
    """Decoder processes in place of threads, each of which takes a whole batch: they share no interpreter's lock.
    They take seconds to start, and the store must be one that can be opened there again."""
    prefetch: int = 3
    """Batches decoded ahead; at least two for each process, so that the disk begins with one while another is decoded."""
    pin_memory: bool | None = None
    """Pinned host memory, so that copies to the GPU overlap; None: when CUDA is there."""


class PackedLoader:
    """Iterates over packed batches; every document of ``keys`` once an epoch (see ``Placement`` for several ranks).

    ``state_dict`` describes the batch after the last one *yielded*, whatever was decoded ahead. Iterating again after the
    end yields nothing; ``load_state_dict`` rewinds.

    Raises ConfigError when a document is longer than ``token_budget`` or no key is given, KeyError for an unknown key.
    """

    def __init__(
        self,
        store: Store,
        keys: Sequence[str] | None = None,
        *,
        token_budget: int,
        seed: int = 0,
        epochs: int | None = 1,
        taps: Sequence[Tap] | None = None,
        shuffle: bool = True,
        placement: Placement | None = None,
    ) -> None:
        self.store = store
        self.keys = store.keys() if keys is None else list(keys)
        self.taps = tuple(store.spec.taps if taps is None else taps)
        self.token_budget = token_budget
        self.seed = seed
        self.epochs = epochs
        self.shuffle = shuffle
        self.placement = placement or Placement()
        pin = self.placement.pin_memory
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._lengths = store.lengths_of(self.keys)
        self._epoch, self._next = 0, 0
        self._plan: tuple[int, list[Array]] | None = None
        self._check()

    def _check(self) -> None:
        if not self.keys:
            raise ConfigError(f"no captures to load from {self.store.name}; extract rows first")
        longest = int(self._lengths.argmax())
        if int(self._lengths[longest]) > self.token_budget:
            raise ConfigError(
                f"row {self.keys[longest]} has {int(self._lengths[longest])} tokens, more than the {self.token_budget} of a batch; "
                "raise the token budget or prepare shorter rows"
            )
        if not 0 <= self.placement.rank < self.placement.world_size:
            raise ConfigError(
                f"rank {self.placement.rank} is not below world size {self.placement.world_size}"
            )

    # --- the order ----------------------------------------------------------------------------------------------------

    def plan(self, epoch: int) -> list[Array]:
        """All batches of an epoch over all ranks, each as places in ``keys``. A pure function of what the loader was made with."""
        if self._plan is None or self._plan[0] != epoch:
            order = np.arange(len(self.keys))
            if self.shuffle:
                order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.keys))
            self._plan = (epoch, pack(self._lengths[order], order, self.token_budget))
        return self._plan[1]

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """Batches this rank gets in an epoch; it varies by a few from epoch to epoch."""
        return len(self.plan(epoch)) // self.placement.world_size

    def _positions(self) -> Iterator[tuple[int, int]]:
        """(epoch, batch of this rank) from the current place on."""
        epoch, first = self._epoch, self._next
        while self.epochs is None or epoch < self.epochs:
            for number in range(first, self.batches_per_epoch(epoch)):
                yield epoch, number
            epoch, first = epoch + 1, 0

    # --- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        positions = self._positions()
        place = self.placement
        ahead = max(1, place.prefetch, 2 * place.processes)
        waiting: collections.deque[_Plan] = collections.deque()
        with self._decoder(ahead) as decoder:
            while True:
                while len(waiting) < ahead and (at := next(positions, None)) is not None:
                    waiting.append(self._planned(*at))
                    decoder.begin(waiting[-1])
                if not waiting:
                    return
                plan = waiting.popleft()
                batch = plan.batch(decoder.next())
                self._epoch, self._next = plan.epoch, plan.index // place.world_size + 1
                yield batch

    def _decoder(self, ahead: int) -> _Threads | _Processes:
        return (_Processes if self.placement.processes else _Threads)(self, ahead)

    def _planned(self, epoch: int, number: int) -> _Plan:
        index = number * self.placement.world_size + self.placement.rank
        places = self.plan(epoch)[index]
        starts = np.concatenate([[0], np.cumsum(self._lengths[places])]).astype(np.int32)
        return _Plan(epoch, index, tuple(self.keys[i] for i in places), starts)

    def _room(self, tokens: int) -> _Room:
        """Memory for a batch of ``tokens``."""
        spec, pin = self.store.spec, self._pin
        shape = (len(self.taps), tokens, spec.hidden_size)
        states = torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype], pin_memory=pin)
        ids = torch.empty(tokens, dtype=torch.int64, pin_memory=pin)
        mask, kept = (torch.empty(tokens, dtype=torch.bool, pin_memory=pin) for _ in range(2))
        # Seen as numpy once for the batch: every small operation of torch gives up the GIL, and the threads that decode then wait
        # for one another more than they work.
        return _Room(
            states, ids, mask, kept, Arrays(bits_of(states), ids.numpy(), mask.numpy(), kept.numpy())
        )

    # --- resuming -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, and a fingerprint of what the order depends on; plain JSON values."""
        return {"epoch": self._epoch, "next": self._next, "order": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place. Raises SpecMismatchError when keys, lengths, budget, seed or ranks are not the same."""
        if state["order"] != self._fingerprint():
            raise SpecMismatchError(
                f"the saved place in the data belongs to other data, another seed, token budget or number of ranks ({state['order']} != "
                f"{self._fingerprint()}); resume with what the run was started with"
            )
        self._epoch, self._next = int(state["epoch"]), int(state["next"])

    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_64("".join(self.keys).encode())
        digest.update(self._lengths.astype("<i8").tobytes())
        digest.update(repr((self.token_budget, self.seed, self.shuffle, self.placement.world_size)).encode())
        return digest.hexdigest()


class _Room(NamedTuple):
    """The tensors of a batch, and the same memory as arrays."""

    states: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    kept: torch.Tensor
    arrays: Arrays


@dataclass(frozen=True, eq=False)
class _Plan:
    """A batch to be decoded."""

    epoch: int
    index: int
    keys: tuple[str, ...]
    starts: Array

    def batch(self, room: _Room) -> Batch:
        """The batch whose documents have been decoded into ``room``."""
        lengths = np.diff(self.starts)
        documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        first = np.repeat(self.starts[:-1].astype(np.int64), lengths)
        return Batch(
            keys=self.keys,
            ids=room.ids,
            mask=room.mask,
            states=room.states,
            final_kept=room.kept,
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(np.arange(int(self.starts[-1]), dtype=np.int64) - first),
            starts=torch.from_numpy(self.starts),
            epoch=self.epoch,
            index=self.index,
        )


class _Threads:
    """Decodes batches in threads: each document straight into its place."""

    def __init__(self, loader: PackedLoader, ahead: int) -> None:
        self._loader = loader
        self._pool = ThreadPoolExecutor(loader.placement.threads, "headrace-load")
        self._out: collections.deque[tuple[_Room, list[Future[None]]]] = collections.deque()

    def begin(self, plan: _Plan) -> None:
        """Have ``plan`` decoded."""
        loader, starts = self._loader, plan.starts.tolist()
        for key in plan.keys:
            loader.store.expect(key, loader.taps)
        room = loader._room(starts[-1])
        futures = [
            self._pool.submit(fill, loader.store, key, slice(start, stop), room.arrays, loader.taps)
            for key, start, stop in zip(plan.keys, starts[:-1], starts[1:], strict=True)
        ]
        self._out.append((room, futures))

    def next(self) -> _Room:
        """What was begun first, once it is there. Raises what decoding it raised."""
        room, futures = self._out.popleft()
        for future in futures:
            future.result()
        return room

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Processes:
    """Decodes batches in processes. What they share with this one is copied out at once, so that it can be used again."""

    def __init__(self, loader: PackedLoader, ahead: int) -> None:
        self._loader = loader
        place = loader.placement
        tokens = min(loader.token_budget, int(loader._lengths.sum()))
        self._readers = Readers(loader.store, loader.taps, place.processes, slots=ahead, tokens=tokens)

    def begin(self, plan: _Plan) -> None:
        """See :meth:`_Threads.begin`."""
        self._readers.begin(plan.keys, plan.starts)

    def next(self) -> _Room:
        """See :meth:`_Threads.next`."""
        with self._readers.next() as arrays:
            room = self._loader._room(len(arrays.ids))
            for mine, theirs in zip(room.arrays, arrays, strict=True):
                np.copyto(mine, theirs)
        return room

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.close()


def pack(lengths: Array, places: Array, budget: int) -> list[Array]:
    """Group ``places``, in order, into batches of at most ``budget`` tokens; ``lengths`` [n] are those of ``places`` [n].

    Each document goes into the fullest of the open batches that has room for it; when none has and ``OPEN`` are open,
    the fullest is closed. The order of the documents decides which meet, so every epoch mixes them anew.
    """
    out: list[list[int]] = []
    open_batches: list[tuple[int, int, list[int]]] = []  # (tokens left, number, documents), sorted
    for number, (place, length) in enumerate(zip(places.tolist(), lengths.tolist(), strict=True)):
        at = bisect.bisect_left(open_batches, (length, -1))
        if at < len(open_batches):
            left, _, documents = open_batches.pop(at)
        else:
            if len(open_batches) == OPEN:
                out.append(open_batches.pop(0)[2])
            left, documents = budget, []
        documents.append(place)
        bisect.insort(open_batches, (left - length, number, documents))
    out += [documents for _, _, documents in sorted(open_batches, key=lambda batch: batch[1])]
    return [np.array(documents) for documents in out]


class StoreDataset(torch.utils.data.Dataset[Capture]):
    """A map-style torch dataset over a store: item i is the capture of ``keys[i]``. Worker processes open the store anew."""

    def __init__(
        self,
        store: Store,
        keys: Sequence[str] | None = None,
        taps: Sequence[Tap] | None = None,
        *,
        missing: Missing = "error",
    ) -> None:
        self.store = store
        self.keys = store.keys() if keys is None else list(keys)
        self.taps = taps
        self.missing: Missing = missing

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Capture:
        return self.store.get(self.keys[index], self.taps, missing=self.missing)
