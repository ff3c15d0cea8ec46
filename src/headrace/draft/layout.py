"""Which rows of a pack are drafted from, what each step reads and predicts: the arithmetic of shifts, once, in plain numpy.

A pack is documents laid end to end. Row p of a document (the taps of position p, the embedding of token p+1) starts a
chain: its step s reads token p+1+s at rotary position p+s and predicts token p+2+s, whose distribution under the target
comes from the final state of row p+1+s. Serving visits a chain only where the target itself produced everything from
token p+1 on, so step s counts where the loss mask is set on all of p+1 .. p+2+s. Two consequences carry the whole design:

- rows with step 0, the *starts*, come in runs of neighbours (one run a supervised span), and
- step s from start m predicts what step 0 from start m+s predicts; it counts if m+s is in the run of m.

So with starts numbered 0..M-1 (compact numbers), ``label of (m, s) = label of start m+s``, and no map is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Index tensors of one pack of T rows and M starts; padding rows and starts come last and count nowhere."""

    document: Tensor
    """int64 [T]: number of the document each row belongs to; every padding row is a document of its own."""
    positions: Tensor
    """int64 [T]: place within the document."""
    next_rows: Tensor
    """int64 [T]: the row whose token row p embeds at step 0, p+1 within the document (p itself for the last)."""
    starts: Tensor
    """int64 [M]: rows that chains start from, ascending."""
    room: Tensor
    """int64 [M]: how many steps of the chain count; 0 for padding."""
    spans: tuple[tuple[int, int, int, int], ...]
    """A document each: its first and last+1 row, its first and last+1 start. For the eager attention path."""

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.document.shape[0])

    def chain_rows(self, step: int) -> Tensor:
        """int64 [M]: the row whose token step ``step`` of each chain reads, clipped to the pack where it counts nowhere."""
        return (self.starts + 1 + step).clamp_(max=self.tokens - 1)

    @property
    def label_rows(self) -> Tensor:
        """int64 [M]: the row whose final state gives the target's distribution for step 0 of each start."""
        return self.chain_rows(0)

    def to(self, device: torch.device | str) -> Layout:
        """The same on ``device``. To CUDA everything goes as one pinned copy: a copy from pageable memory would wait for all
        work that is queued there, once a tensor."""
        if torch.device(device).type == self.document.device.type:
            return self
        parts = [self.document, self.positions, self.next_rows, self.starts, self.room]
        flat = torch.cat(parts).pin_memory() if torch.device(device).type == "cuda" else torch.cat(parts)
        moved = flat.to(device, non_blocking=True).split([len(part) for part in parts])
        document, positions, next_rows, starts, room = moved
        return Layout(document, positions, next_rows, starts, room, self.spans)


def make_layout(
    lengths: list[int], mask: np.ndarray, *, everywhere: bool = False, rows: int = 0, starts_multiple: int = 0
) -> Layout:
    """The layout of documents of ``lengths`` with loss ``mask`` bool [sum of lengths].

    Args:
        everywhere: train on every row, whoever wrote the token; the mask is then ignored.
        rows: pad the pack to this many rows; 0 leaves it as it is.
        starts_multiple: pad the starts to a multiple of this; 0 leaves them as they are.
    """
    total = int(sum(lengths))
    if mask.shape != (total,):
        raise ValueError(f"mask has {mask.shape} values, documents have {total} rows")
    ends = np.cumsum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    begin = np.repeat(ends - lengths, lengths)
    last = np.repeat(ends - 1, lengths)
    row = np.arange(total)
    counted = np.ones(total, dtype=bool) if everywhere else mask.astype(bool)
    # Row p starts a chain if tokens p+1 and p+2 are both the target's own and in the same document.
    one, two = np.minimum(row + 1, total - 1), np.minimum(row + 2, total - 1)
    starts = np.flatnonzero((row + 2 <= last) & counted[one] & counted[two])
    room = _room(starts, document)
    spans = _spans(lengths, starts)
    pad = max(0, rows - total)
    if pad:
        document = np.concatenate([document, len(lengths) + np.arange(pad)])
        row, begin, last = (
            np.arange(total + pad),
            np.concatenate([begin, total + np.arange(pad)]),
            np.concatenate([last, total + np.arange(pad)]),
        )
    if starts_multiple:
        extra = -len(starts) % starts_multiple
        starts = np.concatenate([starts, np.full(extra, total + pad - 1)])
        room = np.concatenate([room, np.zeros(extra, dtype=room.dtype)])
    return Layout(
        document=_tensor(document),
        positions=_tensor(row - begin),
        next_rows=_tensor(np.minimum(row + 1, last)),
        starts=_tensor(starts),
        room=_tensor(room),
        spans=spans,
    )


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _room(starts: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Starts left in the run of each, itself included."""
    if not len(starts):
        return starts
    breaks = np.flatnonzero((np.diff(starts) != 1) | (np.diff(document[starts]) != 0)) + 1
    ends = np.concatenate([breaks, [len(starts)]])
    sizes = np.diff(np.concatenate([[0], ends]))
    return np.repeat(ends, sizes) - np.arange(len(starts))


def _spans(lengths: list[int], starts: np.ndarray) -> tuple[tuple[int, int, int, int], ...]:
    ends = np.cumsum(lengths)
    begins = ends - lengths
    first, after = np.searchsorted(starts, begins), np.searchsorted(starts, ends)
    return tuple(zip(begins.tolist(), ends.tolist(), first.tolist(), after.tolist(), strict=True))
