"""From stored states to packs: which rows share a pack in which epoch, read ahead by a thread, laid out for the trainer.

The order is a function of seed, epoch and row lengths alone, so a resumed run needs nothing but its step number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.draft.layout import make_layout
from headrace.draft.ttt import Pack
from headrace.errors import InputError

OPEN_PACKS = 32  # packs a row may still join: fills them to about 99 % without sorting by length


@dataclass(frozen=True)
class Document:
    """One row's ids, mask and states."""

    ids: np.ndarray
    """int32 [L]"""
    mask: np.ndarray
    """bool [L]"""
    states: Tensor
    """[n + 1, L, H]: the drafter's boundaries in its order, then the final state after the target's final norm."""


class Source(Protocol):
    """Where documents come from; rows are numbered 0..len(lengths)-1."""

    @property
    def lengths(self) -> np.ndarray:
        """int64: tokens of each row."""

    def load(self, row: int) -> Document:
        """Read one row. Called from a reader thread."""


class MemorySource:
    """Documents that are already in memory (or on the GPU)."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self.lengths = np.array([len(d.ids) for d in documents], dtype=np.int64)

    def load(self, row: int) -> Document:
        """The document itself."""
        return self.documents[row]


def plan_epoch(lengths: np.ndarray, budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of each pack of an epoch: all rows once, shuffled, each put into the fullest open pack with room for it.

    Raises InputError for a row longer than ``budget``: it is never cut.
    """
    if len(lengths) and int(lengths.max()) > budget:
        raise InputError(
            f"a row has {int(lengths.max())} tokens, a pack holds {budget}; set --tokens-per-pack to at least that, "
            "or prepare the rows with a smaller --max-tokens"
        )
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    packs: list[list[int]] = []
    room: dict[int, int] = {}  # open packs, in the order they were opened
    for row in order.tolist():
        size = int(lengths[row])
        fits = [(left, number) for number, left in room.items() if left >= size]
        if fits:
            _, number = min(fits)
            packs[number].append(row)
            room[number] -= size
        else:
            packs.append([row])
            room[len(packs) - 1] = budget - size
            if len(room) > OPEN_PACKS:
                del room[next(iter(room))]
    return packs


@dataclass(frozen=True)
class Shape:
    """How packs are laid out."""

    rows: int = 0
    """Pad packs to this many rows (static shapes for compiled code); 0: no padding."""
    starts_multiple: int = 0
    """Pad starts to a multiple of this; 0: no padding."""
    everywhere: bool = False
    """Train on all rows, not only the target's own tokens."""
    dtype: torch.dtype = torch.float32
    """dtype of the states on the device."""


def make_pack(documents: Sequence[Document], shape: Shape, device: torch.device | str = "cpu") -> Pack:
    """Lay documents end to end on ``device``."""
    lengths = [len(d.ids) for d in documents]
    mask = np.concatenate([d.mask for d in documents])
    layout = make_layout(
        lengths, mask, everywhere=shape.everywhere, rows=shape.rows, starts_multiple=shape.starts_multiple
    )
    ids = np.zeros(layout.tokens, dtype=np.int64)
    ids[: len(mask)] = np.concatenate([d.ids for d in documents])
    first = documents[0].states
    planes, _, hidden = first.shape
    pinned = first.device.type == "cpu" and torch.device(device).type == "cuda"
    states = torch.zeros(
        planes, layout.tokens, hidden, dtype=first.dtype, device=first.device, pin_memory=pinned
    )
    states[:, : len(mask)] = torch.cat([d.states for d in documents], dim=1)
    states = states.to(device, non_blocking=True).to(shape.dtype)
    taps = states[:-1].transpose(0, 1).flatten(1)
    return Pack(torch.from_numpy(ids).to(device, non_blocking=True), taps, states[-1], layout.to(device))


class Loader:
    """Packs of a source, epoch after epoch without end, read ahead by one thread.

    ``part`` of ``parts`` workers see every parts-th pack of the same order, so any number of workers trains on the same
    global sequence.
    """

    def __init__(
        self,
        source: Source,
        budget: int,
        seed: int,
        make: Callable[[list[Document]], Pack],
        *,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        self.source, self.budget, self.seed, self.make = source, budget, seed, make
        self.part, self.parts = part, parts
        self._plans: dict[int, list[list[int]]] = {}

    def plan(self, epoch: int) -> list[list[int]]:
        """Packs of ``epoch``; the last ones that would not make a full round of all workers are left to the next epoch's order."""
        if epoch not in self._plans:
            packs = plan_epoch(self.source.lengths, self.budget, self.seed, epoch)
            self._plans = {epoch: packs[: len(packs) - len(packs) % self.parts] or packs}
        return self._plans[epoch]

    def order(self, skip: int) -> Iterator[list[int]]:
        """This worker's packs as row numbers, after ``skip`` packs of its own."""
        epoch, seen = 0, 0
        while True:
            mine = self.plan(epoch)[self.part :: self.parts]
            yield from mine[max(0, skip - seen) :]
            seen += len(mine)
            epoch += 1

    def packs(self, skip: int = 0, ahead: int = 4) -> Iterator[Pack]:
        """Packs, the first ``skip`` left out. Reading errors are raised here; closing the iterator ends the thread."""
        order = self.order(skip)
        with ThreadPoolExecutor(1, thread_name_prefix="headrace-loader") as pool:
            waiting = deque(pool.submit(self._read, rows) for rows in islice(order, ahead))
            try:
                while True:
                    pack = waiting.popleft().result()
                    waiting.append(pool.submit(self._read, next(order)))
                    yield pack
            finally:
                for future in waiting:
                    future.cancel()

    def _read(self, rows: list[int]) -> Pack:
        return self.make([self.source.load(row) for row in rows])
