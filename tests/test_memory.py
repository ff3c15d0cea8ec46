"""Memory that is lent: nobody meets another's bytes, a view keeps its place, and what is idle goes back to the system."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import memory
from headrace.memory import Memory, MemoryPool

# An error in what gives a place back has nobody to be raised to.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

UNIT = 1 << 16
"""What a place is rounded up to."""
MIB = 1 << 20
SIZES = st.one_of(
    st.integers(0, 2), st.integers(UNIT - 1, UNIT + 1), st.integers(0, 5 * UNIT), st.just(2 * MIB)
)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def room(loan: Memory) -> int:
    """What the pool gives for it."""
    return max(1, -(-len(loan) // UNIT)) * UNIT


def place_of(pool: MemoryPool, loan: Memory) -> tuple[int, int] | None:
    """Where in the region ``loan`` lies, whole units of it; None when it is memory of its own."""
    start = address(loan) - address(np.frombuffer(pool._region, np.uint8))
    return (start, start + room(loan)) if loan.base is not None else None


def check(pool: MemoryPool, loans: list[Memory]) -> None:
    """What is free and what is out are the region: in order, nothing twice, no two free places side by side."""
    used, free = pool.used, list(pool._free)
    assert all(start < stop for start, stop in free)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(free)), "not in order, or not one"
    out = [place for loan in loans if (place := place_of(pool, loan)) and len(loan)]
    at = unseen = 0
    for start, stop in [*sorted(free + out), (len(pool._region), 0)]:
        assert start >= at, "twice"
        unseen += start - at
        at = stop
    empty = [
        loan for loan in loans if loan.base is not None and not len(loan)
    ]  # numpy says not where they lie
    assert unseen == len(empty) * UNIT
    assert used == sum(stop - start for start, stop in out) + unseen


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool(4 * MIB)


# --- what is lent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, UNIT - 1, UNIT, UNIT + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB])
def test_it_is_writable_and_of_the_size_asked_for(pool: MemoryPool, size: int) -> None:
    loan = pool.lend(size)
    assert (
        loan.dtype == np.uint8 and loan.shape == (size,) and loan.flags.c_contiguous and loan.flags.writeable
    )
    loan[:] = 7
    assert int(loan.sum(dtype=np.int64)) == 7 * size
    check(pool, [loan])
    del loan
    check(pool, [])


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    st.lists(st.one_of(SIZES.map(lambda size: ("lend", size)), st.tuples(st.just("drop"), st.integers(0))))
)
def test_no_two_loans_share_a_byte(steps: list[tuple[str, int]]) -> None:
    """In a region that is soon full, so that places are taken in every order and memory of its own is among them."""
    pool = MemoryPool(2 * MIB)
    out: list[tuple[Memory, int]] = []
    for number, (what, value) in enumerate(steps):
        if what == "lend":
            loan = pool.lend(value)
            assert len(loan) == value
            loan[:] = number % 251
            out.append((loan, number % 251))
            del loan
        elif out:
            loan, mark = out.pop(value % len(out))
            assert (loan == mark).all(), "somebody else wrote here"
            del loan
        check(pool, [loan for loan, _ in out])
    assert all((loan == mark).all() for loan, mark in out)
    out.clear()
    check(pool, [])


def test_the_lowest_place_goes_first(pool: MemoryPool) -> None:
    """What was touched is touched again."""
    loans = [pool.lend(UNIT) for _ in range(6)]
    places = [address(loan) for loan in loans]
    assert places == [places[0] + i * UNIT for i in range(6)]
    loans[1] = loans[4] = np.empty(0, np.uint8)
    again = pool.lend(10)
    assert address(again) == places[1]
    wide = pool.lend(UNIT + 1)
    assert address(wide) == places[5] + UNIT, "a hole that is too small is passed over"
    del again, wide
    loans.clear()
    for size in (1, UNIT, 4 * MIB):
        assert address(pool.lend(size)) == places[0]


def test_a_full_region_lends_memory_of_its_own(pool: MemoryPool) -> None:
    whole = pool.lend(4 * MIB)
    other = pool.lend(3 * UNIT)
    assert place_of(pool, other) is None and pool.used == 4 * MIB
    whole[:], other[:] = 1, 2
    assert (whole == 1).all() and (other == 2).all() and len(other) == 3 * UNIT
    del other
    check(pool, [whole])
    del whole
    assert place_of(pool, pool.lend(3 * UNIT)) == (0, 3 * UNIT), (
        "the region is used again as soon as there is room"
    )


# --- how long it is kept ----------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Memory], Any]] = {
    "slice": lambda m: m[3:][1:],
    "strided": lambda m: m[::-2].reshape(2, -1).T,
    "numpy dtype": lambda m: m[8:].view(np.int64),
    "memoryview": lambda m: m[3:].data[1:],
    "frombuffer": lambda m: np.frombuffer(m[3:].data, np.uint8),
    "torch": lambda m: torch.from_numpy(m[3:])[1:],
    "torch dtype": lambda m: torch.from_numpy(m[8:]).view(torch.bfloat16),
    "torch view": lambda m: torch.from_numpy(m[8:])[2:].view(torch.bfloat16)[:-1].view(2, -1)[1],
    "torch as numpy": lambda m: torch.from_numpy(m[3:])[1:].numpy()[1:],
}


@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
def test_a_view_keeps_the_place_until_it_is_gone(pool: MemoryPool, view_of: Callable[[Memory], Any]) -> None:
    loan = pool.lend(128)
    loan[:] = 5
    place = address(loan)
    view = view_of(loan)
    del loan
    gc.collect()
    assert pool.used == UNIT
    other = pool.lend(128)
    other[:] = 9
    assert address(other) != place
    content = view.view(torch.uint8) if isinstance(view, torch.Tensor) else np.ascontiguousarray(view)
    assert set(np.asarray(content).view(np.uint8).ravel().tolist()) == {5}
    del content, view
    assert pool.used == UNIT, "no collection of garbage is needed"
    assert address(pool.lend(128)) == place


def test_a_copy_keeps_nothing(pool: MemoryPool) -> None:
    copies = (torch.from_numpy(pool.lend(100)).clone(), pool.lend(100).copy())
    assert pool.used == 0 and all(len(copy) == 100 for copy in copies)


def test_a_pool_lives_as_long_as_its_last_loan() -> None:
    loan = MemoryPool(4 * MIB).lend(MIB)
    gc.collect()
    loan[:] = 3
    assert (loan == 3).all()


# --- threads, and the collector ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_lines(act: Callable[[], object]) -> Iterator[None]:
    """Do ``act`` before each line of memory.py that this thread runs."""

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != memory.__file__:
            return None
        if event == "line":
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_threads_never_meet_anothers_bytes() -> None:
    """Though they take turns at every line of the pool."""
    pool = MemoryPool(4 * MIB)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        choose = random.Random(number)
        held = [pool.lend(0)] * 4
        start.wait(10)
        with at_lines(lambda: time.sleep(0)):
            for _ in range(25):
                loan = pool.lend(choose.choice((16, 100, 2 * UNIT)))
                loan[:16] = loan[-16:] = number
                which = choose.randrange(4)
                loan, held[which] = held[which], loan
                assert loan[:16].tobytes() + loan[-16:].tobytes() in (b"", bytes([number] * 32))

    with ThreadPoolExecutor(8) as threads:
        for result in [threads.submit(work, number) for number in range(1, 9)]:
            result.result(240)  # a busy machine takes its time over so many turns
    check(pool, [])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("lending", [True, False])
def test_a_place_may_come_back_at_any_line_of_the_pool(lending: bool) -> None:
    """The collector drops a loan that sits in a cycle wherever it comes, in the middle of lending and giving too."""
    for line, garbage in itertools.product(range(1, 40), ([1], [3], [1, 2], [3, 4], [1, 5], [0, 6])):
        pool = MemoryPool(2 * MIB)
        loans = {number: pool.lend(UNIT) for number in range(9)}
        del loans[7]
        dropped = [loans.pop(number) for number in garbage]
        seen = itertools.count(1)
        with at_lines(lambda: dropped.clear() if next(seen) == line else None):  # noqa: B023 - done at once
            if lending:
                loans[7] = pool.lend(UNIT)
            else:
                del loans[8]
        dropped.clear()
        check(pool, list(loans.values()))


# --- what the system gets back ----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take pages back in their own time")
def test_idle_memory_goes_back_to_the_system_but_for_what_is_kept() -> None:
    pool = MemoryPool(64 * MIB, kept=8 * MIB)
    process = psutil.Process()
    gc.collect()

    def grown() -> float:
        return float(process.memory_info().rss - before) / MIB

    before = process.memory_info().rss
    low, high = pool.lend(48 * MIB), pool.lend(16 * MIB)
    assert grown() < 8, "reserved is not used"
    low[:], high[:] = 1, 2
    assert grown() > 56
    pool.trim()
    assert grown() > 56, "what is out stays"
    del low
    pool.trim()
    assert grown() > 56, "what lies before something that is out will be lent next"
    del high
    assert grown() > 56, "nothing goes back before somebody says that it is over"
    pool.trim()
    assert grown() < 16
    again = pool.lend(64 * MIB)
    assert (again[: 8 * MIB] == 1).all(), "this part was to be kept"
    assert not again[8 * MIB :].any(), "pages that the system has taken back read as zeros"
    again[:] = 3
    del again
    pool.trim()
    assert grown() < 16, "and the next time just so"


def test_where_nothing_can_be_reserved_everything_lent_is_memory_of_its_own() -> None:
    pool = MemoryPool(1 << 60)
    loan = pool.lend(1000)
    loan[:] = 1
    assert pool.used == 0 and int(loan.sum()) == 1000
    del loan
    pool.trim()


def test_nothing_less_than_nothing_is_lent(pool: MemoryPool) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        pool.lend(-1)


# --- processes --------------------------------------------------------------------------------------------------------


def run(code: str) -> None:
    """A process that must end well and say nothing."""
    command = [
        sys.executable,
        "-X",
        "dev",
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        code,
    ]  # of forks beside threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_the_end_of_a_process_is_silent() -> None:
    """Also of one that never lets go: in globals, in a cycle, in a thread's hands."""
    run("""
import threading
from headrace.memory import MemoryPool, shared_pool
kept = shared_pool().lend(1000)
kept[:] = 1
own = MemoryPool(4 << 20)
views = [own.lend(5)[2:], own.lend(0)]
cycle = [own.lend(70_000)]
cycle.append(cycle)
dropped = own.lend(100)
del dropped
threading.Thread(target=lambda loan: threading.Event().wait(), args=(own.lend(9),), daemon=True).start()
""")


def test_a_forked_process_has_its_own() -> None:
    run("""
import os
from headrace.memory import shared_pool
mine = shared_pool().lend(1000)
mine[:] = 1
child = os.fork()
more = shared_pool().lend(1000)
more[:] = 2 if child else 3
if child:
    assert os.waitpid(child, 0)[1] == 0
mine[:] += more
assert set(mine.tolist()) == {3 if child else 4}
del mine
""")


def test_a_fork_in_the_middle_of_lending_does_not_hang_the_child() -> None:
    run("""
import os, signal, threading
from headrace.memory import shared_pool
pool, over = shared_pool(), threading.Event()
def work():
    while not over.is_set():
        pool.lend(100)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
hung = 0
for _ in range(60):
    child = os.fork()
    if not child:
        signal.alarm(5)
        pool.lend(100)
        os._exit(0)
    hung = os.waitpid(child, 0)[1]
    if hung:
        break
over.set()
for thread in threads:
    thread.join()
assert not hung, "a child waits for a thread that it does not have"
""")
