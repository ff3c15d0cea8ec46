"""From stored states to packs laid out for the trainer, read and moved to the device ahead of it.

Two sources with one face: :class:`StorePacks` reads a store, :class:`MemoryPacks` holds documents (on any device). The
order of both is a function of seed, epoch, keys and lengths alone, so a place in it is all that resuming needs.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.draft.layout import make_layout
from headrace.draft.ttt import Pack
from headrace.errors import ConfigError, SpecMismatchError
from headrace.types import FINAL, Tap, hash_json

if TYPE_CHECKING:
    from headrace.store import Store

OPEN_PACKS = (
    32  # packs that a document may still join: fills them to about 99 % and leaves the shuffle a shuffle
)
STARTS_UNIT = 256  # starts are padded to a multiple of this
AHEAD = 2  # packs that are on the device before they are asked for

T = TypeVar("T")
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Placing:
    """How documents become a pack."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    """dtype of the states on the device."""
    padded: bool = False
    """Pad packs to the token budget and to one number of starts, so that compiled code sees one shape."""
    rows: int = 0
    """Rows to pad to; set by the source of packs."""
    starts_multiple: int = 0
    """Pad starts to a multiple of this; set by the source of packs."""
    everywhere: bool = False
    """Train on all rows, not only on the target's own tokens."""
    final_norm: Norm | None = None
    """Applied to the final state of stores that keep it before the target's final norm."""

    def sized(
        self, budget: int, supervised: np.ndarray, lengths: np.ndarray, plan: Sequence[Sequence[int]]
    ) -> Placing:
        """This, with the sizes to pad to: ``budget`` rows, and the most starts that a pack of ``plan`` (an epoch) can have.

        Another epoch may mix a pack with a few more; a little room is left, and beyond it a second size is used.
        """
        if not self.padded:
            return self
        most = max(int((lengths if self.everywhere else supervised)[list(rows)].sum()) for rows in plan)
        starts = min(budget, -int(-most * 1.02 // STARTS_UNIT) * STARTS_UNIT)
        return dataclasses.replace(self, rows=budget, starts_multiple=starts)

    def pack(self, ids: Tensor, mask: np.ndarray, states: Tensor, lengths: Sequence[int]) -> Pack:
        """ids int64 [T], mask [T], states [n + 1, T, H] (boundaries in the drafter's order, then final) → Pack."""
        layout = make_layout(
            list(lengths),
            mask,
            everywhere=self.everywhere,
            rows=self.rows,
            starts_multiple=self.starts_multiple,
        )
        states = self._pinned(states).to(self.device, non_blocking=True)
        ids = self._pinned(ids).to(self.device, non_blocking=True)
        final = states[-1] if self.final_norm is None else self.final_norm(states[-1])
        taps = states[:-1].transpose(0, 1).flatten(1)
        missing = layout.tokens - len(mask)
        if missing:
            ids = torch.nn.functional.pad(ids, (0, missing))
            taps, final = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (taps, final))
        return Pack(ids, taps.to(self.dtype), final.to(self.dtype), layout.to(self.device))

    def _pinned(self, tensor: Tensor) -> Tensor:
        """``tensor`` where a copy to the device does not have to wait for it."""
        return tensor.pin_memory() if self.device.type == "cuda" and not tensor.is_cuda else tensor


class Packs(Protocol):
    """Training packs without end, or the packs of one pass."""

    def __iter__(self) -> Iterator[Pack]: ...

    def state_dict(self) -> dict[str, Any]:
        """The place after the last pack that was yielded; plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from such a place. Raises SpecMismatchError when the data or the order is another."""

    def per_epoch(self) -> int:
        """Packs of the first epoch, over all workers (other epochs differ by a few)."""


def ahead(items: Iterable[T], count: int = AHEAD) -> Iterator[T]:
    """``items``, taken by a thread of its own up to ``count`` before they are asked for. Its errors are raised here."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, "headrace-pack") as pool:
        waiting = deque(pool.submit(next, source, end) for _ in range(count))
        while True:
            item = waiting.popleft().result()
            if item is end:
                return
            waiting.append(pool.submit(next, source, end))
            yield item  # type: ignore[misc]


class StorePacks:
    """Packs from a store through its own loader."""

    def __init__(
        self, store: Store, keys: Sequence[str], taps: Sequence[Tap], placing: Placing, loader: dict[str, Any]
    ) -> None:
        """``loader``: the options of a DealtLoader: token_budget, seed, epochs (None = without end), shuffle, rank, workers, threads, processes."""
        from headrace.draft.dealing import DealtLoader

        if placing.everywhere and store.final_positions != "all":
            raise ConfigError(
                f"{store.name} keeps the final state of supervised tokens only, so training everywhere has no targets; extract with final_positions = all"
            )
        self.loader = DealtLoader(store, keys, taps=(*taps, FINAL), **loader)
        supervised = (
            np.array([store.entry(key).supervised for key in keys]) if placing.padded else np.zeros(0)
        )
        plan = [rows.tolist() for rows in self.loader.plan(0)]
        self.placing = placing.sized(loader["token_budget"], supervised, store.lengths_of(keys), plan)
        self._place = self.loader.state_dict()

    def __iter__(self) -> Iterator[Pack]:
        def prepared() -> Iterator[tuple[Pack, dict[str, Any]]]:
            for batch in self.loader:
                lengths = np.diff(batch.starts.numpy()).tolist()
                yield (
                    self.placing.pack(batch.ids, batch.mask.numpy(), batch.states, lengths),
                    self.loader.state_dict(),
                )

        for pack, place in ahead(prepared()):
            self._place = place
            yield pack

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Packs`."""
        return self._place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Packs`."""
        self.loader.load_state_dict(state)
        self._place = state

    def per_epoch(self) -> int:
        """See :class:`Packs`."""
        return self.loader.batches_per_epoch()


@dataclass(frozen=True, eq=False)
class Document:
    """One row with its states, in memory."""

    ids: np.ndarray
    """int32 [L]"""
    mask: np.ndarray
    """bool [L]"""
    states: Tensor
    """[n + 1, L, H]: boundaries in the drafter's order, then the final state."""


class MemoryPacks:
    """Packs from documents in memory; ``epochs`` None goes on without end."""

    def __init__(
        self,
        documents: Sequence[Document],
        placing: Placing,
        *,
        token_budget: int,
        seed: int = 0,
        epochs: int | None = None,
    ) -> None:
        self.documents = documents
        self.budget, self.seed, self.epochs = token_budget, seed, epochs
        self.lengths = np.array([len(d.ids) for d in documents])
        supervised = np.array([int(d.mask.sum()) for d in documents])
        self.placing = placing.sized(
            token_budget, supervised, self.lengths, plan_epoch(self.lengths, token_budget, seed, 0)
        )
        self._order = hash_json([token_budget, seed, self.lengths.tolist()])
        self._epoch, self._next = 0, 0
        self._place = self._here(0, 0)

    def __iter__(self) -> Iterator[Pack]:
        def prepared() -> Iterator[tuple[Pack, dict[str, Any]]]:
            epoch, first = self._epoch, self._next
            while self.epochs is None or epoch < self.epochs:
                plan = plan_epoch(self.lengths, self.budget, self.seed, epoch)
                for number in range(first, len(plan)):
                    yield self._pack(plan[number]), self._here(epoch, number + 1)
                epoch, first = epoch + 1, 0

        for pack, place in ahead(prepared()):
            self._place = place
            yield pack

    def _pack(self, rows: list[int]) -> Pack:
        chosen = [self.documents[row] for row in rows]
        ids = torch.from_numpy(np.concatenate([d.ids for d in chosen]).astype(np.int64))
        mask = np.concatenate([d.mask for d in chosen])
        return self.placing.pack(
            ids, mask, torch.cat([d.states for d in chosen], dim=1), [len(d.ids) for d in chosen]
        )

    def _here(self, epoch: int, following: int) -> dict[str, Any]:
        return {"epoch": epoch, "next": following, "order": self._order}

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Packs`."""
        return self._place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Packs`."""
        if state["order"] != self._order:
            raise SpecMismatchError(
                "the saved place in the data belongs to other documents, seed or token budget; resume with those of the run"
            )
        self._epoch, self._next, self._place = int(state["epoch"]), int(state["next"]), state

    def per_epoch(self) -> int:
        """See :class:`Packs`."""
        return len(plan_epoch(self.lengths, self.budget, self.seed, 0))


def plan_epoch(lengths: np.ndarray, budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Documents of each pack of an epoch: all of them once, shuffled, each put into the fullest open pack that has room.

    Raises ConfigError for a document longer than ``budget``: it is never cut.
    """
    if len(lengths) and int(lengths.max()) > budget:
        raise ConfigError(
            f"a row has {int(lengths.max())} tokens, a pack holds {budget}; raise the token budget or prepare shorter rows"
        )
    packs: list[list[int]] = []
    room: dict[int, int] = {}  # open packs and what is left in each, in the order they were opened
    for row in np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist():
        size = int(lengths[row])
        fits = [(left, number) for number, left in room.items() if left >= size]
        number = min(fits)[1] if fits else len(packs)
        if not fits:
            packs.append([])
            room[number] = budget
            if len(room) > OPEN_PACKS:
                del room[next(iter(room))]
        packs[number].append(row)
        room[number] -= size
    return packs
