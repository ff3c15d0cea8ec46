"""The disk cache of a store in a bucket: nothing travels twice, nothing wrong is used, the limit holds, processes share it."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("moto")
import headrace.store.cache as cache_module
from headrace.errors import InputError, StoreError
from headrace.store import Store, StoreWriter
from headrace.store.bucket import RemoteFolder
from headrace.store.cache import BLOCK_BYTES, Blocks, Cache
from headrace.store.folder import Folder
from headrace.testing.s3 import S3Server
from headrace.testing.store import StoreTests, make_row, make_spec, make_states, same_bits

pytestmark = pytest.mark.slow

SPEC = make_spec()
ROWS = [make_row(seed, 16_000) for seed in range(12)]  # 2 MB of raw states each
LIMIT = 16 * BLOCK_BYTES


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        with StoreWriter(server.url("run"), SPEC, codec="raw", shard_bytes=8 << 20) as writer:
            for row in ROWS:
                writer.add(row, make_states(row, SPEC))
        yield server


def reopen(server: S3Server, cache: Cache) -> Store:
    """As another process would see it: nothing is mapped yet."""
    cache_module._open.clear()
    return Store.open(server.url("run"), cache=cache)


def blocks(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "lock")


def held(folder: Path) -> int:
    return sum(file.stat().st_size for file in blocks(folder))


class TestCachedFolder(StoreTests):
    """What holds for every folder."""

    def folder(self, path: Path) -> Folder:
        import obstore
        from obstore.store import MemoryStore

        memory = MemoryStore()
        for file in path.rglob("*"):
            if file.is_file():
                obstore.put(memory, file.relative_to(path).as_posix(), file.read_bytes())
        return RemoteFolder("memory://", memory, cache=Cache(path.parent / "cache", 1 << 30))


def test_nothing_travels_twice(server: S3Server, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 1 << 30)
    store = reopen(server, cache)
    for row in ROWS:
        assert same_bits(store[row.key].states, make_states(row, SPEC))
    again = reopen(server, cache)
    before = server.gate.down
    for row in ROWS:
        assert same_bits(again[row.key].states, make_states(row, SPEC))
        assert same_bits(
            again.get(row.key, [5], 7_000, 9_000).states, make_states(row, SPEC)[[2], 7_000:9_000]
        )
    assert server.gate.down == before
    # a data loader's worker opens the same cache
    assert pickle.loads(pickle.dumps(again))[ROWS[3].key] is not None  # noqa: S301 - made here
    assert server.gate.down - before < 20_000, "opening reads dataset.json, the index and the list of shards"


def test_the_network_may_be_away(server: S3Server, tmp_path: Path) -> None:
    store = reopen(server, Cache(tmp_path / "c", 1 << 30))
    first = store[ROWS[0].key].states
    server.gate.shut()
    try:
        assert same_bits(store[ROWS[0].key].states, first)
    finally:
        server.gate.open()


def test_damaged_blocks_are_fetched_again(server: S3Server, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", 1 << 30)
    store = reopen(server, cache)
    for row in ROWS[:4]:
        _ = store[row.key]
    damage = [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 128]) + data[1:],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: bytes(len(data)),
    ]
    for number, file in enumerate(blocks(tmp_path / "c")):
        file.write_bytes(damage[number % len(damage)](file.read_bytes()))
    store = reopen(server, cache)
    for row in ROWS[:4]:
        assert same_bits(store[row.key].states, make_states(row, SPEC))


def test_the_limit_holds_and_the_oldest_go_first(server: S3Server, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c", LIMIT)
    store = reopen(server, cache)
    for _ in range(2):
        for row in ROWS:
            assert same_bits(store[row.key].states, make_states(row, SPEC))
            assert held(tmp_path / "c") <= LIMIT + LIMIT // 64 + BLOCK_BYTES
    assert held(tmp_path / "c") > LIMIT // 2, "a cache that holds nothing is none"
    # what is used stays
    view = Blocks(Cache(tmp_path / "d", LIMIT))
    block = memoryview(os.urandom(BLOCK_BYTES))
    view.put("00" * 16, 0, block, BLOCK_BYTES)
    for number in range(60):
        view.put("11" * 16, number, block, 100 * BLOCK_BYTES)
        view._mapped.clear()  # so that the next use is one of the file
        assert view.get("00" * 16, 0) is not None, f"dropped after {number} others"
        time.sleep(0.002)
    assert view.get("11" * 16, 0) is None and view.get("11" * 16, 59) is not None


READER = """
import sys
from pathlib import Path
from headrace.store import Store
from headrace.store.cache import Cache
from headrace.testing.store import StoreTests, make_row, make_spec, make_states, same_bits
store = Store.open(sys.argv[1], cache=Cache(Path(sys.argv[2]), int(sys.argv[3])))
step = int(sys.argv[4])
for seed in [*range(12), *range(6)]:
    row = make_row(seed * step % 12, 16_000)
    assert same_bits(store[row.key].states, make_states(row, store.spec)), seed
"""


def test_processes_share_it(server: S3Server, tmp_path: Path) -> None:
    """Different orders over a cache too small for all: they fetch, use and drop each other's blocks."""
    folder = tmp_path / "c"
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, server.url("run"), str(folder), str(LIMIT), str(step)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for step in (1, 5)
    ]
    most = 0
    while any(reader.poll() is None for reader in readers):
        with contextlib.suppress(FileNotFoundError):  # dropped while it was looked at
            most = max(most, held(folder))
        time.sleep(0.02)
    for reader in readers:
        assert reader.wait(120) == 0, reader.stderr.read() if reader.stderr else ""
    assert LIMIT // 2 < most <= LIMIT + 2 * (LIMIT // 64 + BLOCK_BYTES)
    assert not [file for file in blocks(folder) if file.name.endswith(".tmp")]


def test_a_full_disk_costs_the_cache_only(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import errno

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = reopen(server, Cache(tmp_path / "c", 1 << 30))
    monkeypatch.setattr(os, "replace", full)
    for row in ROWS[:3]:
        assert same_bits(store[row.key].states, make_states(row, SPEC))
    assert caplog.text.count("full disk") == 1
    assert blocks(tmp_path / "c") == []


def test_what_the_bucket_damaged_is_still_seen(server: S3Server, tmp_path: Path) -> None:
    """A cache proves what it kept, the store's checksums what was written."""
    import obstore

    from headrace.errors import CorruptError
    from headrace.remote import open_bucket

    row = make_row(99, 16_000)
    with StoreWriter(server.url("bad"), SPEC, codec="raw") as writer:
        writer.add(row, make_states(row, SPEC))
    bucket = open_bucket(server.url("bad"))
    (name,) = [entry["path"] for page in obstore.list(bucket, prefix="shards") for entry in page]
    data = bytes(obstore.get(bucket, name).bytes())
    obstore.put(bucket, name, data[:-1] + bytes([data[-1] ^ 1]))
    store = Store.open(server.url("bad"), cache=Cache(tmp_path / "c", 1 << 30))
    with pytest.raises(CorruptError, match=r"s3://bucket/bad/shards/.* tap final"):
        store[row.key]


def test_a_folder_that_cannot_be(server: S3Server, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too small"):
        Cache(tmp_path, 1000)
    (tmp_path / "file").write_text("")
    with pytest.raises((InputError, StoreError), match="cannot make the cache folder"):
        _ = Store.open(server.url("run"), cache=Cache(tmp_path / "file" / "c", LIMIT))[ROWS[0].key]
