"""The ring never hands out memory that is in use, and waits rather than fail."""

from __future__ import annotations

import random
import threading
import time

import pytest

from headrace.sglang_plugin.hostring import Block, HostRing


def test_blocks_in_use_never_overlap() -> None:
    rng = random.Random(0)
    ring = HostRing(64 * 256, pinned=False)
    held: list[tuple[Block, int]] = []
    for mark in range(400):
        size = rng.randrange(1, 20 * 256)
        while sum(b.stop - b.start for b, _ in held) + 2 * size + 512 > ring.capacity:
            block, stamp = held.pop(rng.randrange(len(held)))
            assert bool((block.data == stamp).all()), "another block wrote here"
            ring.give_back(block)
        block = _take_or_free(ring, size, held, rng)
        block.data.fill_(mark % 251)
        held.append((block, mark % 251))


def _take_or_free(ring: HostRing, size: int, held: list[tuple[Block, int]], rng: random.Random) -> Block:
    """Take, giving back held blocks from another thread if the ring is too fragmented to answer at once."""
    got: list[Block] = []
    thread = threading.Thread(target=lambda: got.append(ring.take(size)))
    thread.start()
    while thread.is_alive():
        thread.join(0.002)
        if thread.is_alive() and held:
            block, stamp = held.pop(rng.randrange(len(held)))
            assert bool((block.data == stamp).all())
            ring.give_back(block)
    return got[0]


def test_take_waits_until_there_is_room() -> None:
    ring = HostRing(1024, pinned=False)
    first = ring.take(600)
    threading.Timer(0.1, lambda: ring.give_back(first)).start()
    started = time.monotonic()
    second = ring.take(600)
    assert time.monotonic() - started >= 0.08
    assert len(second.data) == 600


def test_what_never_fits_is_refused_at_once() -> None:
    ring = HostRing(1024, pinned=False)
    with pytest.raises(ValueError, match="never fit"):
        ring.take(1025)
