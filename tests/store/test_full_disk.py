"""No space, no inodes, a limit on file size: the writer stops cleanly and everything sealed stays valid."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import StorageFullError, StoreError
from headrace.store import Store, StoreWriter, WriterOptions
from headrace.store.check import check_store
from headrace.store.folder import LocalFolder
from headrace.testing.store import make_row, make_spec, make_states, same_bits, shard_files, write_store

SPEC = make_spec()
ROWS = [make_row(seed, 400) for seed in range(60)]  # about 40 kB of states each


def mount(folder: Path, options: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(params=["size=1m", "size=64m,nr_inodes=12"], ids=["space", "inodes"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    disk = tmp_path / "disk"
    if not mount(disk, request.param):
        pytest.skip("a file system can be mounted by root only")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def fill(path: Path) -> None:
    with StoreWriter(path, SPEC, codec="raw", options=WriterOptions(shard_captures=3)) as writer:
        for row in ROWS:
            writer.add(row, make_states(row, SPEC))


def sound_captures(path: Path) -> int:
    assert check_store(LocalFolder(path)).ok
    store = Store.open(path)
    assert all(same_bits(store[row.key].states, make_states(row, SPEC)) for row in ROWS if row.key in store)
    return len(store)


def test_a_full_disk_keeps_what_is_sealed(small_disk: Path, tmp_path: Path) -> None:
    """ST-06, ST-08: an exception, not a bus error; no half-made files; the rest follows when there is room."""
    path = small_disk / "s"
    with pytest.raises(StorageFullError, match="no space left to write"):
        fill(path)
    kept = sound_captures(path)
    assert 0 < kept < len(ROWS) and not list(path.rglob(".*.tmp"))
    subprocess.run(
        ["mount", "-o", "remount,size=64m,nr_inodes=1000", str(small_disk)], check=True, timeout=30
    )
    fill(path)
    assert sound_captures(path) == len(ROWS)


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    write_store(tmp_path / "s", ROWS[:3], codec="raw", captures_a_shard=3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageFullError):
            fill(tmp_path / "s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sound_captures(tmp_path / "s") == 3 and len(shard_files(tmp_path / "s")) == 1
    assert not list((tmp_path / "s").rglob(".*.tmp"))


def test_a_writer_that_failed_stays_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync that fails means the bytes may be gone: the shard must not appear and no later one either."""

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    writer = StoreWriter(tmp_path / "s", SPEC)
    writer.add(ROWS[0], make_states(ROWS[0], SPEC))
    monkeypatch.setattr(os, "fsync", full)
    for _ in range(2):
        with pytest.raises(StorageFullError):
            writer.seal()
    with pytest.raises(StorageFullError):
        writer.add(ROWS[1], make_states(ROWS[1], SPEC))
    writer.close()
    monkeypatch.undo()
    assert len(Store.open(tmp_path / "s")) == 0 and not list((tmp_path / "s").rglob(".*.tmp"))


def test_an_unreadable_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    writer = StoreWriter(tmp_path / "s", SPEC)
    writer.add(ROWS[0], make_states(ROWS[0], SPEC))
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        writer.seal()


MEMORY = """
import resource, sys, threading
from headrace.store import StoreWriter, WriterOptions
from headrace.testing.store import make_row, make_spec
import torch
spec = make_spec(hidden_size=1024)
row = make_row(0, 1000)  # 8 MB of states
states = torch.randn(4, 1000, 1024).bfloat16()
options = WriterOptions(shard_bytes=int(sys.argv[2]), queue_bytes=32 << 20, workers=2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with StoreWriter(sys.argv[1], spec, codec="raw", options=options) as writer:
    for seed in range(150):
        row = make_row(seed, 1000)
        writer.add(row, states.clone())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


@pytest.mark.slow
def test_memory_is_two_shards_and_the_queue_however_much_goes_through(tmp_path: Path) -> None:
    """ST-22: 1.2 GB through a writer of 96 MB shards. Beside both there are about 200 MB: pyarrow and working memory."""
    shard = 96 << 20
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "s"), str(shard)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    used = int(run.stdout)
    assert used < 2 * shard + 2 * (32 << 20) + (250 << 20), f"{used / 2**20:.0f} MiB"
    assert len(Store.open(tmp_path / "s")) == 150
