"""A fixed piece of host memory for states on their way from the device to a file.

Allocated once (pinning memory takes long and must not happen between two forwards), given out in order and taken back in any
order. Asking for more than is free waits, which is the back-pressure of the writers on the engine: states are never
dropped and memory never grows.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

_ALIGN = 256


@dataclass(eq=False)
class Block:
    """A part of the ring: ``data`` is uint8 of the length asked for."""

    data: torch.Tensor
    start: int
    stop: int


class HostRing:
    """See the module docstring. One thread takes, any thread gives back."""

    def __init__(self, capacity: int, *, pinned: bool) -> None:
        self.capacity = capacity - capacity % _ALIGN
        self._slab = torch.empty(self.capacity, dtype=torch.uint8, pin_memory=pinned)
        self._blocks: deque[Block] = deque()
        self._changed = threading.Condition()

    def take(self, size: int) -> Block:
        """A block of ``size`` bytes; waits until there is room. Raises ValueError when there can never be."""
        room = -(-size // _ALIGN) * _ALIGN
        if not 0 < room <= self.capacity:
            raise ValueError(f"{size} bytes never fit a ring of {self.capacity}")
        with self._changed:
            start = self._place(room)
            while start is None:
                self._changed.wait()
                start = self._place(room)
            block = Block(self._slab[start : start + size], start, start + room)
            self._blocks.append(block)
            return block

    def give_back(self, block: Block) -> None:
        """The block's memory may be handed out again."""
        with self._changed:
            self._blocks.remove(block)
            self._changed.notify_all()

    def _place(self, room: int) -> int | None:
        if not self._blocks:
            return 0
        head, tail = self._blocks[-1].stop, self._blocks[0].start
        if head > tail:  # in use: [tail, head)
            if self.capacity - head >= room:
                return head
            return 0 if tail >= room else None
        return head if tail - head >= room else None  # in use: all but [head, tail)
