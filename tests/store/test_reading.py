"""Batches decoded by processes: those that threads make, whoever dies, and nobody left behind."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from headrace.errors import CorruptError, StoreError
from headrace.store import Batch, PackedLoader, Placement, Store, reading
from headrace.store.folder import MappedFile
from headrace.testing.store import flip_bit, make_row, make_spec, shard_files, write_store

ROWS = [make_row(seed, 3 + 7 * seed % 61) for seed in range(40)]
Children = Callable[[], list[psutil.Process]]
PARTS = ("ids", "mask", "states", "final_kept", "documents", "positions", "starts")


@pytest.fixture(autouse=True)
def children() -> Iterator[Children]:
    """Those of this test, which may leave none; others of the same process may have helpers of their own."""
    before = set(psutil.Process().children())

    def mine() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in before]

    yield mine
    assert not mine()


def loader(store: Store, processes: int, **options: Any) -> PackedLoader:
    place = Placement(processes=processes, threads=2)
    return PackedLoader(store, token_budget=128, placement=place, **{"seed": 3, **options})


def assert_same(left: Batch, right: Batch) -> None:
    assert (left.keys, left.epoch, left.index) == (right.keys, right.epoch, right.index)
    for name in PARTS:
        mine, theirs = getattr(left, name), getattr(right, name)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ({}, {"codec": "bf16-planes"}),
        pytest.param({}, {"codec": "fp8", "final_positions": "supervised"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32"}, {"codec": "raw"}, marks=pytest.mark.slow),
    ],
)
def test_they_make_what_threads_make(tmp_path: Path, spec: dict[str, Any], options: dict[str, Any]) -> None:
    made = make_spec(**spec)
    store = Store.open(write_store(tmp_path / "s", ROWS, spec=made, captures_a_shard=9, **options))
    taps = ("final", made.taps[0])
    theirs = list(loader(store, 0, epochs=2, taps=taps))
    mine = list(
        loader(store, 3, epochs=2, taps=taps)
    )  # kept whole: no batch may be overwritten by a later one
    assert len(mine) == len(theirs) > 10
    for left, right in zip(mine, theirs, strict=True):
        assert_same(left, right)


@pytest.mark.slow
def test_a_loader_left_early_goes_on_where_it_was(tmp_path: Path) -> None:
    store = Store.open(write_store(tmp_path / "s", ROWS))
    first, whole = loader(store, 2), list(loader(store, 0))
    for number, batch in enumerate(first):
        assert_same(batch, whole[number])
        if number == 2:
            break
    rest = loader(store, 2)
    rest.load_state_dict(first.state_dict())
    for left, right in zip(rest, whole[3:], strict=True):
        assert_same(left, right)


@pytest.mark.slow
def test_damage_is_told_as_threads_tell_it(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS, codec="raw")
    file = shard_files(path)[0]
    flip_bit(file, file.stat().st_size - 5)
    messages = []
    for processes in (0, 2):
        with pytest.raises(CorruptError) as caught:
            list(loader(Store.open(path), processes, shuffle=False))
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "damaged" in messages[0]


def test_a_killed_process_says_by_what(tmp_path: Path, children: Children) -> None:
    store = Store.open(write_store(tmp_path / "s", ROWS))
    with pytest.raises(StoreError, match=r"was killed by SIGKILL.*--readers"):
        for _ in loader(store, 2, epochs=None):
            for child in children():
                child.kill()


def test_one_that_dies_with_a_batch_is_not_waited_for(tmp_path: Path, children: Children) -> None:
    store = Store.open(write_store(tmp_path / "s", ROWS))
    with reading.Readers(store, store.spec.taps, 1, slots=1, tokens=64) as readers:
        (child,) = children()
        child.suspend()
        readers.begin([ROWS[0].key], np.array([0, len(ROWS[0])]))
        child.kill()
        with pytest.raises(StoreError, match="was killed by SIGKILL"), readers.next():
            pass


@pytest.mark.slow
def test_ctrl_c_is_not_for_them(tmp_path: Path, children: Children) -> None:
    """A service manager's SIGTERM to all processes, too: who trains saves its place first, and needs its batches for that."""
    store = Store.open(write_store(tmp_path / "s", ROWS))
    batches = iter(loader(store, 2, epochs=3))
    next(batches)
    for child in children():
        assert os.getpgid(child.pid) != os.getpgid(0)
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
    assert len(list(batches)) > 10


def resident(file: MappedFile) -> float:
    """The share of a mapped file that is in memory."""
    assert file._map is not None
    pages = -(-file.size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    place = np.frombuffer(file._view, np.uint8).ctypes.data
    assert not ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(place), file.size, found)
    return sum(page & 1 for page in found) / pages


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_what_is_expected_is_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(24 << 20))
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    file = MappedFile(path)
    if resident(file) > 0.1:
        pytest.skip("this file system is memory")
    file.expect(4 << 20, 20 << 20)
    until = time.monotonic() + 20
    while resident(file) < 0.66 and time.monotonic() < until:
        time.sleep(0.01)
    assert 0.66 < resident(file) < 0.75, "what was expected, and little more"
    file.expect(0, 1 << 40)  # past the end


@pytest.mark.parametrize("processes", [0, 2])
def test_a_batch_is_expected_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    store = Store.open(write_store(tmp_path / "s", ROWS))
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(Store, "expect", lambda self, key, taps: told.append(("expected", key)))
    monkeypatch.setattr(reading, "fill", lambda store, key, *_: told.append(("read", key)))
    monkeypatch.setattr("headrace.store.loader.fill", reading.fill)
    keys = [key for batch in loader(store, 0) for key in batch.keys]
    if processes:  # what a process does with what has come to it
        told.clear()
        pipe, theirs = multiprocessing.Pipe()
        shape = reading.Slots(2, 4, 64, 16, "bfloat16")
        for slot in (0, 1):
            pipe.send(reading.Job(slot, (keys[slot],), (0, 3)))
        with reading._shared_file(2 * shape.nbytes) as file:
            memory = mmap.mmap(file, 2 * shape.nbytes)

            def work() -> None:
                with pytest.raises(EOFError):
                    reading._work(theirs, memory, store, (), shape)

            thread = threading.Thread(target=work)
            thread.start()
            assert [pipe.recv(), pipe.recv()] == [None, None]
            pipe.close()
            thread.join()
        assert told == [(what, key) for what in ("expected", "read") for key in keys[:2]]
    for key in keys[: 2 if processes else None]:
        assert told.index(("expected", key)) < told.index(("read", key))


@pytest.mark.slow
def test_they_end_with_the_one_that_reads(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS)
    code = (
        "import sys, time; from headrace.store import *; "
        "place = Placement(processes=2); store = Store.open(sys.argv[1]); "
        "batches = iter(PackedLoader(store, token_budget=128, epochs=None, placement=place)); next(batches); "
        "print('here', flush=True); time.sleep(60)"
    )
    # No __main__ guard: a user's script has none.
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    parent = subprocess.Popen([sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "here\n"
    readers = psutil.Process(parent.pid).children()
    assert len(readers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 10
    while any(map(psutil.Process.is_running, readers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(child.is_running() for child in readers)
