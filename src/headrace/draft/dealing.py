"""How one order of packs is dealt to any number of workers, so that a run can go on with another number of them.

The packs of all epochs stand in one line; worker r of k takes packs r, r + k, r + 2k, ... of it. So every row is trained on
exactly once an epoch, nothing is dropped at an epoch's end, and the first n packs are the same whoever took them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.store import Batch, PackedLoader, Placement

if TYPE_CHECKING:
    from headrace.store import Store
    from headrace.types import Tap


class DealtLoader(PackedLoader):
    """A :class:`PackedLoader` over one worker's share of the line. Its place is that of the whole line, the same for every worker."""

    def __init__(
        self,
        store: Store,
        keys: Sequence[str],
        *,
        rank: int = 0,
        workers: int = 1,
        threads: int = 2,
        processes: int = 0,
        taps: Sequence[Tap],
        token_budget: int,
        seed: int = 0,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        # To the base every worker is the only one: the order, and its fingerprint, know nothing of how many there are.
        super().__init__(
            store,
            keys,
            taps=taps,
            token_budget=token_budget,
            seed=seed,
            epochs=epochs,
            shuffle=shuffle,
            placement=Placement(threads=threads, processes=processes),
        )
        self.rank, self.workers = rank, workers
        self._sizes: dict[int, int] = {}
        self._yielded = (
            False  # whether the base's place is after a pack of ours, rather than between two rounds
        )

    def _size(self, epoch: int) -> int:
        if epoch not in self._sizes:
            self._sizes[epoch] = len(self.plan(epoch))
        return self._sizes[epoch]

    def _moved(self, epoch: int, number: int, by: int) -> tuple[int, int]:
        """The place ``by`` packs further on; at the end of all epochs, the first place that is not there."""
        number += by
        while (self.epochs is None or epoch < self.epochs) and number >= self._size(epoch):
            number -= self._size(epoch)
            epoch += 1
        return epoch, number

    def _positions(self) -> Iterator[tuple[int, int]]:
        place = self._moved(self._epoch, self._next, self.rank)
        while self.epochs is None or place[0] < self.epochs:
            yield place
            place = self._moved(*place, self.workers)

    def state_dict(self) -> dict[str, Any]:
        """The place in the line after the round in which every worker took a pack, the last one yielded here among them."""
        state = super().state_dict()
        if self._yielded:
            epoch, number = self._moved(self._epoch, self._next, self.workers - self.rank - 1)
            state |= {"epoch": epoch, "next": number}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from such a place, with any number of workers. Raises SpecMismatchError when the order is another."""
        super().load_state_dict(state)
        self._yielded = False

    def __iter__(self) -> Iterator[Batch]:
        place = self.state_dict()
        self._epoch, self._next, self._yielded = place["epoch"], place["next"], False
        for batch in super().__iter__():
            self._yielded = True
            yield batch
