"""The reader: through every kind of folder, a million captures, taps of several passes, parents, states left out."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, CorruptError, SpecMismatchError, StoreError
from headrace.store import Parent, Store, StoreWriter, WriterOptions
from headrace.store.bucket import RemoteFolder
from headrace.store.folder import Folder, LocalFolder
from headrace.store.index import Index, ShardRow, split_key
from headrace.testing.store import (
    StoreTests,
    make_row,
    make_spec,
    make_states,
    same_bits,
    shard_files,
    write_store,
)
from headrace.types import Row

SPEC = make_spec()


class TestLocalFolder(StoreTests):
    def folder(self, path: Path) -> Folder:
        return LocalFolder(path)


class TestObstoreFile(StoreTests):
    """Through obstore, on local files: ranged reads."""

    def folder(self, path: Path) -> Folder:
        from obstore.store import LocalStore

        return RemoteFolder("file://" + str(path), LocalStore(prefix=path))


class TestObstoreMemory(StoreTests):
    """Objects in memory: no file is there to be opened by mistake."""

    def folder(self, path: Path) -> Folder:
        import obstore
        from obstore.store import MemoryStore

        memory = MemoryStore()
        for file in path.rglob("*"):
            if file.is_file():
                obstore.put(memory, file.relative_to(path).as_posix(), file.read_bytes())
        return RemoteFolder("memory://", memory)


def test_a_url_is_opened_like_a_path(tmp_path: Path) -> None:
    row = make_row(1, 9)
    write_store(tmp_path / "s", [row])
    store = Store.open(f"file://{tmp_path / 's'}")
    assert same_bits(store[row.key].states, make_states(row, SPEC))


# --- size -------------------------------------------------------------------------------------------------------------

OPEN = """
import resource, sys, time
import numpy, pyarrow.parquet, torch, xxhash, headrace.store.reader
from headrace.store import Store
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
store = Store.open(sys.argv[1])
count, found = len(store), sys.argv[2] in store
print(time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, count, found, store.tokens)
"""


@pytest.mark.slow
def test_a_million_captures_open_in_two_seconds(tmp_path: Path) -> None:
    """ST-10, ST-11: opening reads the index, no shard; lengths are exact without looking at a single state."""
    path = write_store(tmp_path / "s", [make_row(1, 3)])
    count, shards = 1_000_000, 500
    random = np.random.default_rng(0)
    hi = np.sort(random.integers(0, 2**63, count, dtype="u8"))
    names = [f"20260101000000{i:06d}-h_0-1-000001-aa.safetensors" for i in range(shards)]
    index = Index(
        tuple(ShardRow(name, 1 << 30, SPEC.taps, "0" * 16) for name in names),
        hi,
        random.integers(0, 2**63, count, dtype="u8"),
        random.integers(0, shards, count).astype("i4"),
        np.arange(count, dtype="i4"),
        np.full(count, 100, "i4"),
        np.full(count, 50, "i4"),
    )
    (path / "index.parquet").write_bytes(index.to_parquet())
    for file in shard_files(path):
        file.unlink()
    for name in names:
        (path / "shards" / name).write_bytes(b"not opened")
    key = f"{int(hi[12345]):016x}{int(index.lo[12345]):016x}"
    run = subprocess.run(
        [sys.executable, "-c", OPEN, str(path), key], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    seconds, memory, found, present, tokens = run.stdout.split()
    assert (int(found), present, int(tokens)) == (count, "True", 100 * count)
    # 32 bytes a capture, held twice while it is read, and the rows of the keys
    assert int(memory) < 150 * count
    # processor time, because the machine may be shared; it takes half a second
    assert float(seconds) < 2.0


def test_opening_does_not_read_indexed_shards(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [make_row(i, 3) for i in range(9)])
    for file in shard_files(path):
        os.truncate(file, 10)
    store = Store.open(path)
    assert len(store) == 9 and store.tokens == 27 and store.lengths().tolist() == [3] * 9
    with pytest.raises(CorruptError, match="cut short"):
        store[make_row(0, 3).key]


def test_sizes_and_entries(tmp_path: Path) -> None:
    rows = [make_row(i, 10 * i + 1) for i in range(5)]
    store = Store.open(write_store(tmp_path / "s", rows))
    assert store.tokens == sum(map(len, rows)) and store.supervised == sum(row.supervised for row in rows)
    assert store.bytes_raw == store.tokens * 4 * 16 * 2
    assert store.bytes_stored == sum(file.stat().st_size for file in shard_files(tmp_path / "s"))
    for row in rows:
        entry = store.entry(row.key)
        assert (entry.tokens, entry.supervised) == (len(row), row.supervised)
        assert (tmp_path / "s" / "shards" / entry.shard).exists()
    assert store.keys() == sorted(row.key for row in rows) == list(store)
    by_key = {row.key: len(row) for row in rows}
    assert store.lengths().tolist() == [by_key[key] for key in store]
    assert store.lengths_of([row.key for row in rows]).tolist() == [len(row) for row in rows]
    assert pickle.loads(pickle.dumps(store)).keys() == store.keys()  # noqa: S301 - made here


def test_new_shards_are_seen_without_an_index(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [make_row(1, 3)])
    store = Store.open(path)
    old = (path / "index.parquet").read_bytes()
    write_store(path, [make_row(2, 4)])
    (path / "index.parquet").write_bytes(old)
    assert len(store) == 1 and len(store.refresh()) == 2 and len(Store.open(path)) == 2
    (path / "index.parquet").unlink()
    assert len(Store.open(path)) == 2


def test_a_key_is_found_among_keys_that_share_half(tmp_path: Path) -> None:
    """The index sorts by the first eight bytes and then the last; keys that only differ in the last are told apart."""
    lo = np.array([5, 9, 9, 2**64 - 1], "u8")
    hi = np.array([7, 7, 7, 7], "u8")
    about = (ShardRow("a", 1, SPEC.taps, ""), ShardRow("b", 1, SPEC.taps, ""))
    zeros = np.zeros(4, "i4")
    index = Index(about, hi, lo, np.array([0, 0, 1, 0], "i4"), np.arange(4, dtype="i4"), zeros, zeros)
    assert list(index.find(f"{7:016x}{9:016x}")) == [1, 2]
    assert list(index.find(f"{7:016x}{2**64 - 1:016x}")) == [3]
    assert not index.find(f"{7:016x}{6:016x}") and not index.find(f"{8:016x}{9:016x}")
    assert index.first_rows().tolist() == [0, 1, 3]
    assert [int(half) for half in split_key("0" * 15 + "7" + "f" * 16)] == [7, 2**64 - 1]


# --- several passes ---------------------------------------------------------------------------------------------------


def two_passes(path: Path, first: list[Row], second: list[Row]) -> None:
    write_store(path, first)
    with StoreWriter(
        path, make_spec(taps=(1, 7)), options=WriterOptions(add_taps=True, shard_captures=2)
    ) as writer:
        assert len(writer.done) == 0
        for row in second:
            writer.add(row, make_states(row, writer.spec))


def test_taps_added_by_a_second_pass(tmp_path: Path) -> None:
    rows = [make_row(i, 20) for i in range(5)]
    two_passes(tmp_path / "s", rows, rows[:3])
    store = Store.open(tmp_path / "s")
    assert store.spec.taps == SPEC.taps and store.taps == (2, 4, 5, "final", 1, 7)
    assert len(store) == 5, "a store is about the taps it was made with"
    wide = Store.open(tmp_path / "s", taps=(1, "final", 7, 2))
    assert set(wide) == {row.key for row in rows[:3]} and wide.spec.taps == (1, "final", 7, 2)
    for row in rows[:3]:
        truth = make_states(row, make_spec(taps=(1, "final", 7, 2)))
        assert same_bits(wide[row.key].states, truth)
        assert same_bits(
            store.get(row.key, (7, 4), 3, 9).states, make_states(row, make_spec(taps=(7, 4)))[:, 3:9]
        )
    with pytest.raises(KeyError, match=r"no tap 7 .* it has \['2', '4', '5', 'final'\]"):
        store.get(rows[4].key, [7])
    assert wide.refresh().keys() == wide.keys()


def test_a_second_pass_resumes_and_repeats_nothing(tmp_path: Path) -> None:
    rows = [make_row(i, 20) for i in range(5)]
    two_passes(tmp_path / "s", rows, rows[:3])
    with StoreWriter(tmp_path / "s", make_spec(taps=(1, 7)), options=WriterOptions(add_taps=True)) as writer:
        assert set(writer.done) == {row.key for row in rows[:3]}
    with pytest.raises(SpecMismatchError, match=r"already has taps \[2\]"):
        StoreWriter(tmp_path / "s", make_spec(taps=(2, 6)), options=WriterOptions(add_taps=True))
    with pytest.raises(SpecMismatchError, match="taps"):
        StoreWriter(tmp_path / "s", make_spec(taps=(1, 7)))
    with pytest.raises(SpecMismatchError, match="config_hash"):
        StoreWriter(
            tmp_path / "s", make_spec(taps=(3,), config_hash="f" * 16), options=WriterOptions(add_taps=True)
        )


# --- parents ----------------------------------------------------------------------------------------------------------


def family() -> tuple[Row, Row, Row]:
    """A conversation of one, two and three turns."""
    root = make_row(1, 30)
    child = Row.make([*root.ids, *range(100, 120)], [False] * 30 + [True] * 20)
    grandchild = Row.make([*child.ids[:40], *range(200, 230)], [False] * 40 + [True] * 30)
    return root, child, grandchild


def family_states() -> dict[str, torch.Tensor]:
    """What the three are to read as: shared tokens have the states of the ancestor."""
    root, child, grandchild = family()
    states = {row.key: make_states(row, SPEC) for row in family()}
    states[child.key][:, :30] = states[root.key]
    states[grandchild.key][:, :40] = states[child.key][:, :40]
    return states


@pytest.mark.parametrize("policy", ["all", "supervised"])
@pytest.mark.parametrize("captures", [1, 10])
def test_a_capture_shares_the_states_of_its_parent(tmp_path: Path, policy, captures: int) -> None:  # type: ignore[no-untyped-def]
    root, child, grandchild = family()
    truth = family_states()
    options = WriterOptions(shard_captures=captures)
    with StoreWriter(tmp_path / "s", SPEC, codec="raw", final_positions=policy, options=options) as writer:
        writer.add(root, truth[root.key])
        writer.add(child, truth[child.key][:, 30:], parent=Parent(root.key, 30))
        writer.add(grandchild, truth[grandchild.key][:, 40:], parent=Parent(child.key, 40))
    store = Store.open(tmp_path / "s")
    for row in family():
        taps = SPEC.taps if policy == "all" else (2, 4, 5)
        want = truth[row.key][: len(taps)]
        assert same_bits(store.get(row.key, taps).states, want)
        for start, stop in ((0, 1), (29, 31), (10, 45), (39, 41), (45, 50), (0, 30)):
            assert same_bits(store.get(row.key, taps, start, stop).states, want[:, start:stop])
        assert store.get(row.key, taps).ids.tolist() == row.ids.tolist()
    if policy == "all":
        assert store.bytes_stored < store.bytes_raw * 0.75 + 20_000
    else:
        kept = store.final_kept(child.key)
        assert kept.tolist() == [False] * 29 + [True] * 20 + [False]
        final = store.get(child.key, ["final"], missing="nan").states[0]
        assert same_bits(final[30:49], truth[child.key][3, 30:49])
        # the last shared token belongs to the root, whose own mask decided what was kept of it
        assert torch.isnan(final[29]).all() == (not store.final_kept(root.key)[29])


def test_a_wrong_parent_is_refused(tmp_path: Path) -> None:
    root, child, _ = family()
    stranger = make_row(9, 50)
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        with pytest.raises(ConfigError, match="not stored; add the parent first"):
            writer.add(child, make_states(child, SPEC)[:, 30:], parent=Parent(root.key, 30))
        writer.add(root, make_states(root, SPEC))
        writer.seal()
        with pytest.raises(ConfigError, match="does not begin with the first 30 tokens"):
            writer.add(stranger, make_states(stranger, SPEC)[:, 30:], parent=Parent(root.key, 30))
        with pytest.raises(ConfigError, match="does not begin with the first 31 tokens"):
            writer.add(child, make_states(child, SPEC)[:, 31:], parent=Parent(root.key, 31))
        assert writer.add(child, make_states(child, SPEC)[:, 30:], parent=Parent(root.key, 30))
    assert len(Store.open(tmp_path / "s")) == 2


def test_a_lost_parent_is_named(tmp_path: Path) -> None:
    root, child, _ = family()
    with StoreWriter(tmp_path / "s", SPEC, options=WriterOptions(shard_captures=1)) as writer:
        writer.add(root, make_states(root, SPEC))
        writer.add(child, make_states(child, SPEC)[:, 30:], parent=Parent(root.key, 30))
    shard_files(tmp_path / "s")[0].unlink()
    store = Store.open(tmp_path / "s")
    with pytest.raises(CorruptError, match=f"takes its first states from {root.key}, which is not stored"):
        store[child.key]
    assert store.get(child.key, start=30).states.shape[1] == 20


# --- final states left out --------------------------------------------------------------------------------------------


def test_final_states_only_where_the_loss_needs_them(tmp_path: Path) -> None:
    """TR-01: of BASE, tokens 10 to 13 are supervised; their teachers are the final states at 9 to 12."""
    row = Row.make(range(3, 18), [False] * 10 + [True] * 4 + [False])
    truth = make_states(row, SPEC)
    store = Store.open(write_store(tmp_path / "s", [row], codec="raw", final_positions="supervised"))
    assert np.flatnonzero(store.final_kept(row.key)).tolist() == [9, 10, 11, 12]
    assert same_bits(store.get(row.key, ["final"], 9, 13).states, truth[3:, 9:13])
    assert same_bits(store.get(row.key, (2, 4, 5)).states, truth[:3])
    with pytest.raises(StoreError, match=r"4 of the 15 positions asked .*missing='zero' or 'nan'"):
        store[row.key]
    with pytest.raises(StoreError, match="1 of the 2 positions"):
        store.get(row.key, ["final"], 8, 10)
    zeroed = store.get(row.key, ["final"], missing="zero").states[0]
    poisoned = store.get(row.key, ["final"], missing="nan").states[0]
    left_out = [*range(9), 13, 14]
    assert not zeroed[left_out].any() and torch.isnan(poisoned[left_out]).all()
    assert same_bits(zeroed[9:13], truth[3, 9:13]) and same_bits(poisoned[9:13], truth[3, 9:13])


def test_bytes_saved_are_reported(tmp_path: Path) -> None:
    from headrace.store.info import store_info

    rows = [make_row(i, 500, supervised=0.25) for i in range(4)]
    full = Store.open(write_store(tmp_path / "all", rows, codec="raw"))
    some = Store.open(write_store(tmp_path / "some", rows, codec="raw", final_positions="supervised"))
    saved = store_info(some)["bytes_left_out"]
    kept = sum(int(row.mask[1:].sum()) for row in rows)
    assert saved == (2000 - kept) * 16 * 2
    assert abs((full.bytes_stored - some.bytes_stored) - saved) < 500
    assert store_info(full)["bytes_left_out"] == 0


def test_a_row_with_nothing_supervised(tmp_path: Path) -> None:
    row = make_row(1, 7, supervised=0.0)
    store = Store.open(write_store(tmp_path / "s", [row], final_positions="supervised"))
    assert not store.final_kept(row.key).any()
    assert store.get(row.key, missing="zero").states[3].abs().sum() == 0


# --- speed, loosely ---------------------------------------------------------------------------------------------------


def test_readers_in_threads_agree(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rows = [make_row(i, 50 + i) for i in range(60)]
    store = Store.open(write_store(tmp_path / "s", rows, captures_a_shard=4))
    with ThreadPoolExecutor(6) as pool:
        for row, capture in zip(rows * 5, pool.map(lambda r: store[r.key], rows * 5), strict=True):
            assert same_bits(capture.states, make_states(row, SPEC))


def test_shards_are_closed_when_many_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.store import reader

    monkeypatch.setattr(reader, "MAX_OPEN", 3)
    rows = [make_row(i, 3) for i in range(12)]
    store = Store.open(write_store(tmp_path / "s", rows, captures_a_shard=1))
    for row in rows:
        assert same_bits(store[row.key].states, make_states(row, SPEC))
    assert len(store._shards) == 3
