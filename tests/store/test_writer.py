"""The writer: what it refuses at the door, what it never loses, and how it stops when it cannot go on."""

from __future__ import annotations

import ctypes
import gc
import io
import mmap
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace import files
from headrace.bits import Bits
from headrace.errors import CaptureError, ConfigError, SpecMismatchError, StorageFullError, StoreError
from headrace.files import write_through
from headrace.memory import shared_pool
from headrace.store import Store, StoreWriter, WriterOptions
from headrace.store import writer as writer_module
from headrace.store.check import check_store
from headrace.store.codecs import Buffer, Raw
from headrace.store.folder import LocalFolder, new_shard_name, place
from headrace.testing.store import make_row, make_spec, make_states, same_bits, shard_files, write_store
from headrace.types import Row

pytestmark = pytest.mark.slow

SPEC = make_spec()


def add(writer: StoreWriter, row: Row) -> bool:
    return writer.add(row, make_states(row, writer.spec))


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s[:, :-1], r"\[4, 4, 16\].*\[4, 5, 16\]"),
        (lambda s: torch.cat([s, s[:, :1]], dim=1), r"\[4, 6, 16\].*\[4, 5, 16\]"),
        (lambda s: s[:3], r"\[3, 5, 16\].*\[4, 5, 16\]"),
        (lambda s: s[..., :15], r"\[4, 5, 15\]"),
        (lambda s: s.float(), "torch.float32.*torch.bfloat16"),
        (lambda s: s.half(), "torch.float16.*torch.bfloat16"),
    ],
)
def test_wrong_shape_or_dtype_is_refused(tmp_path: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    row = make_row(1, 5)
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        with pytest.raises(CaptureError, match=message):
            writer.add(row, spoil(make_states(row, SPEC)))
        assert add(writer, row), "a refused capture must not block a right one"
    assert len(Store.open(tmp_path / "s")) == 1


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN"), (float("inf"), "an infinity"), (float("-inf"), "an infinity")]
)
def test_a_value_that_is_no_number_is_refused_by_place(tmp_path: Path, value: float, what: str) -> None:
    row = make_row(1, 50)
    states = make_states(row, SPEC)
    states[2, 37, 15] = value
    with (
        StoreWriter(tmp_path / "s", SPEC) as writer,
        pytest.raises(CaptureError, match=f"{row.key} hold {what} at tap 5, position 37"),
    ):
        writer.add(row, states)


def test_a_state_of_zeros_is_refused_unless_allowed(tmp_path: Path) -> None:
    """A buffer that was never filled."""
    row = make_row(1, 8)
    states = make_states(row, SPEC)
    states[3, 7] = 0
    states[3, 7, 0] = -0.0
    with (
        StoreWriter(tmp_path / "s", SPEC) as writer,
        pytest.raises(CaptureError, match="only zeros at tap final, position 7"),
    ):
        writer.add(row, states)
    with StoreWriter(tmp_path / "s", SPEC, options=WriterOptions(allow_zeros=True)) as writer:
        assert writer.add(row, states)
    assert same_bits(Store.open(tmp_path / "s")[row.key].states, states)


def test_an_embedding_may_be_zero(tmp_path: Path) -> None:
    row, spec = make_row(1, 4), make_spec(taps=(0, 2))
    states = make_states(row, spec)
    states[0, 2] = 0
    with StoreWriter(tmp_path / "s", spec) as writer:
        assert writer.add(row, states)
        states = make_states(make_row(2, 4), spec)
        states[1, 2] = 0
        with pytest.raises(CaptureError, match="tap 2, position 2"):
            writer.add(make_row(2, 4), states)


def test_a_key_that_is_not_the_hash_is_refused(tmp_path: Path) -> None:
    row = make_row(1, 5)
    liar = Row(row.ids, ~row.mask, row.key)
    with StoreWriter(tmp_path / "s", SPEC) as writer, pytest.raises(CaptureError, match="not the hash"):
        writer.add(liar, make_states(row, SPEC))


def test_strided_states_are_stored_right(tmp_path: Path) -> None:
    row = make_row(1, 40)
    truth = make_states(row, SPEC)
    strided = truth.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert not strided.is_contiguous()
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        writer.add(row, strided)
    assert same_bits(Store.open(tmp_path / "s")[row.key].states, truth)


def test_a_second_copy_is_skipped(tmp_path: Path) -> None:
    row = make_row(1, 5)
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        assert add(writer, row) and not add(writer, row)
        writer.seal()
        assert not add(writer, row) and row.key in writer.done
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        assert not add(writer, row)
    assert len(shard_files(tmp_path / "s")) == 1


# --- joining a store --------------------------------------------------------------------------------------------------


def test_a_store_goes_on(tmp_path: Path) -> None:
    """ST-14: pairing is by content. Ten rows are stored; with one more row put first, that one alone is new."""
    rows = [make_row(seed, 4) for seed in range(10)]
    write_store(tmp_path / "s", rows)
    before = [file.read_bytes() for file in shard_files(tmp_path / "s")]
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        assert set(writer.done) == {row.key for row in rows} and len(writer.done) == 10
        assert [add(writer, row) for row in [make_row(99, 4), *rows]] == [True] + [False] * 10
    assert [file.read_bytes() for file in shard_files(tmp_path / "s")][: len(before)] == before
    assert len(Store.open(tmp_path / "s")) == 11


def test_done_grows_only_by_what_is_sealed(tmp_path: Path) -> None:
    rows = [make_row(seed, 4) for seed in range(6)]
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        for row in rows:
            add(writer, row)
        assert len(writer.done) == 0 and not shard_files(tmp_path / "s")
        writer.seal()
        assert set(writer.done) == {row.key for row in rows}
        assert set(Store.open(tmp_path / "s")) == set(writer.done)


def test_done_of_very_many_keys(tmp_path: Path) -> None:
    from headrace.store.index import KeySet
    from headrace.store.writer import DoneKeys

    keys = [f"{i * 7919:032x}" for i in range(150_000)]
    done = DoneKeys(KeySet(np.empty(0, "u8"), np.empty(0, "u8")))
    for start in range(0, len(keys), 40_000):
        done.update(keys[start : start + 40_000])
    assert len(done) == len(keys) and all(key in done for key in keys[::997]) and f"{1:032x}" not in done
    assert set(done) == set(keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_hash": "f" * 16}, "config_hash"),
        ({"final_normed": False}, "final_normed"),
        ({"taps": (2, 4, 6, "final")}, "taps"),
        ({"dtype": "float16"}, "dtype"),
        ({"tokenizer_hash": "x"}, "tokenizer_hash"),
    ],
)
def test_another_spec_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_store(tmp_path / "s", [make_row(1, 4)])
    with pytest.raises(SpecMismatchError, match=message):
        StoreWriter(tmp_path / "s", make_spec(**change))


def test_where_the_target_was_found_does_not_matter(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [make_row(1, 4)])
    with StoreWriter(tmp_path / "s", make_spec(target="elsewhere")) as writer:
        assert add(writer, make_row(2, 4))


def test_codec_and_policy_are_the_stores(tmp_path: Path) -> None:
    """ST-15: one format a store."""
    write_store(tmp_path / "s", [make_row(1, 4)], codec="fp8", final_positions="supervised")
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        assert writer.dataset.codec == "fp8" and writer.dataset.final_positions == "supervised"
    with pytest.raises(SpecMismatchError, match="codec: 'fp8' != 'raw'"):
        StoreWriter(tmp_path / "s", SPEC, codec="raw")
    with pytest.raises(SpecMismatchError, match="final_positions"):
        StoreWriter(tmp_path / "s", SPEC, final_positions="all")
    with pytest.raises(ConfigError, match="gzip"):
        StoreWriter(tmp_path / "new", SPEC, codec="gzip")
    assert not (tmp_path / "new").exists()


def test_folders_are_made_or_refused_at_the_start(tmp_path: Path) -> None:
    """ST-13: a path that cannot be written is an error before the first row, not a warning at each."""
    with StoreWriter(tmp_path / "a" / "b" / "s", SPEC) as writer:
        add(writer, make_row(1, 3))
    assert len(Store.open(tmp_path / "a" / "b" / "s")) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot make a store at .*file"):
        StoreWriter(tmp_path / "file" / "s", SPEC)
    with pytest.raises(StoreError, match="cannot make a store at /proc"):
        StoreWriter("/proc/headrace", SPEC)


def test_a_file_url_is_its_folder(tmp_path: Path) -> None:
    with StoreWriter(f"file://{tmp_path / 's'}", SPEC) as writer:
        assert add(writer, make_row(1, 3))
    assert len(Store.open(tmp_path / "s")) == 1 and len(shard_files(tmp_path / "s")) == 1


# --- sealing ----------------------------------------------------------------------------------------------------------


def test_shards_are_sealed_by_captures_bytes_and_age(tmp_path: Path) -> None:
    rows = [make_row(seed, 50) for seed in range(9)]
    write_store(tmp_path / "captures", rows, captures_a_shard=4)
    assert len(shard_files(tmp_path / "captures")) == 3
    with StoreWriter(tmp_path / "bytes", SPEC, codec="raw", shard_bytes=15_000) as writer:
        for row in rows:
            add(writer, row)
    assert len(shard_files(tmp_path / "bytes")) == 5  # a capture is 6.4 kB of states and 0.4 kB of tables
    with StoreWriter(tmp_path / "age", SPEC, options=WriterOptions(shard_seconds=0.05)) as writer:
        for row in rows[:3]:
            add(writer, row)
            time.sleep(0.06)
        add(writer, rows[3])
        deadline = time.monotonic() + 20
        while len(shard_files(tmp_path / "age")) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(shard_files(tmp_path / "age")) >= 2, "no shard was sealed by its age"


def test_a_capture_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    rows = [make_row(1, 3), make_row(2, 900), make_row(3, 3)]
    with StoreWriter(tmp_path / "s", SPEC, shard_bytes=10_000) as writer:
        for row in rows:
            add(writer, row)
    store = Store.open(tmp_path / "s")
    assert all(same_bits(store[row.key].states, make_states(row, SPEC)) for row in rows)
    assert len(shard_files(tmp_path / "s")) == 3


def test_an_error_in_the_block_does_not_cost_finished_work(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "s", SPEC) as writer:
        add(writer, make_row(1, 3))
        raise KeyboardInterrupt
    assert len(Store.open(tmp_path / "s")) == 1


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        pass
    writer.close()
    with pytest.raises(StoreError, match="is closed"):
        add(writer, make_row(1, 3))
    assert len(Store.open(tmp_path / "s")) == 0


def test_threads_may_add_at_the_same_time(tmp_path: Path) -> None:
    rows = [make_row(seed, seed % 30 + 1) for seed in range(200)]
    options = WriterOptions(shard_captures=17, queue_bytes=20_000, workers=3)
    with StoreWriter(tmp_path / "s", SPEC, options=options) as writer:
        threads = [
            threading.Thread(target=lambda part: [add(writer, row) for row in part], args=(rows[i::2],))
            for i in range(2)
        ]
        threads += [threading.Thread(target=lambda: [add(writer, row) for row in rows[:100]])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store = Store.open(tmp_path / "s")
    assert len(store) == 200 and check_store(LocalFolder(tmp_path / "s")).ok
    assert all(same_bits(store[row.key].states, make_states(row, SPEC)) for row in rows)


def test_two_runs_give_the_same_content(tmp_path: Path) -> None:
    rows = [make_row(seed, seed + 1) for seed in range(20)]
    for name in ("a", "b"):
        write_store(tmp_path / name, rows)
    for one, two in zip(shard_files(tmp_path / "a"), shard_files(tmp_path / "b"), strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_provenance_is_kept_by_store_and_shard(tmp_path: Path) -> None:
    from headrace.store.info import store_info

    for number in range(2):
        with StoreWriter(tmp_path / "s", SPEC, provenance={"engine": "x", "version": number}) as writer:
            add(writer, make_row(number, 3))
    store = Store.open(tmp_path / "s")
    assert store.provenance == {"engine": "x", "version": 0}
    assert store_info(store)["sessions"] == [{"engine": "x", "version": 0}, {"engine": "x", "version": 1}]


# --- towards the end --------------------------------------------------------------------------------------------------

MANY = [make_row(seed, 50) for seed in range(120)]
STATES_BYTES = 50 * SPEC.bytes_per_token
ENCODED_BYTES = 4 * (50 * 32 + 24) + 5 * 50 + 64  # by codec raw: states, and their tables
SHARD_BYTES, SMALL_SHARD = 20 * ENCODED_BYTES, 3 * ENCODED_BYTES


def captures_of_shards(
    path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[int | None], shard_bytes: int = SHARD_BYTES
) -> list[int]:
    """Write MANY, telling the writer to ``expect`` so much before each part of them; how many each shard got."""
    monkeypatch.setattr(writer_module, "SMALL_SHARD", SMALL_SHARD)
    with StoreWriter(path, SPEC, codec="raw", shard_bytes=shard_bytes) as writer:
        for number, row in enumerate(MANY):
            part, first = divmod(number, len(MANY) // len(expected))
            if not first and (states_bytes := expected[part]) is not None:
                writer.expect(states_bytes)
            assert add(writer, row)
    store = Store.open(path)
    assert len(store) == len(MANY) and check_store(LocalFolder(path)).ok
    assert all(same_bits(store[row.key].states, make_states(row, SPEC)) for row in MANY)
    counts = np.bincount(store.index.shard, minlength=len(shard_files(path))).tolist()
    assert len(counts) == len(shard_files(path)) and sum(counts) == len(MANY)
    return list(counts)


def test_without_a_word_of_what_comes_all_shards_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert captures_of_shards(tmp_path / "s", monkeypatch, [None]) == [20] * 6


def test_the_last_shards_get_smaller_and_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that hardly anything is left to write when the last state has come."""
    counts = captures_of_shards(tmp_path / "s", monkeypatch, [len(MANY) * STATES_BYTES])
    assert counts[:2] == [20, 20], "as long as much is to come"
    assert counts == sorted(counts, reverse=True)
    for index, count in enumerate(counts[:-1]):
        to_come = sum(counts[index:])
        assert count <= max(to_come / 2, SMALL_SHARD // ENCODED_BYTES)
        assert (count + 1) * ENCODED_BYTES > SMALL_SHARD, "none but the last is smaller than a small one"
    assert counts[-1] <= 3 and len(counts) <= 14
    assert 20 > counts[3] > counts[4] > counts[5] > 3, "by and by"


def test_what_is_small_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that were to be smaller than a small one are not made larger."""
    total = len(MANY) * STATES_BYTES
    counts = captures_of_shards(tmp_path / "s", monkeypatch, [total], shard_bytes=2 * ENCODED_BYTES)
    assert counts == [2] * 60


@pytest.mark.parametrize(
    ("expected", "least"),
    [
        ([0], 3),
        ([-1], 3),
        ([STATES_BYTES], 3),
        ([len(MANY) * STATES_BYTES // 3], 3),
        ([len(MANY) * STATES_BYTES * 10], 20),
        ([None, 60 * STATES_BYTES], 3),
        ([10 * STATES_BYTES, 60 * STATES_BYTES], 3),
    ],
    ids=["nothing", "less", "one", "a third", "ten times", "said late", "corrected"],
)
def test_a_wrong_guess_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[int | None], least: int
) -> None:
    """Nor makes splinters: of one too low no shard is smaller than a small one, of one too high all are full."""
    counts = captures_of_shards(tmp_path / "s", monkeypatch, expected)
    assert max(counts) <= 20 and least <= min(counts[:-1])


# --- encoders ---------------------------------------------------------------------------------------------------------


class Gated(Raw):
    """Encodes when the gate is open."""

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self.gate = threading.Event()

    def encode(self, bits: Bits) -> tuple[list[Buffer], None]:
        assert self.gate.wait(10)
        return super().encode(bits)


def test_a_row_as_large_as_the_queue_does_not_wait_until_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders that have finished one long row would have to wait for the next to come."""
    codec = Gated(SPEC.dtype)
    monkeypatch.setattr(writer_module, "open_codec", lambda name, dtype: codec)
    options = WriterOptions(queue_bytes=2 * STATES_BYTES, workers=2)
    with StoreWriter(tmp_path / "s", SPEC, codec="raw", options=options) as writer:
        assert add(writer, MANY[0])  # half of the queue
        large = make_row(7, 150)
        added = threading.Thread(target=add, args=(writer, large))
        added.start()
        added.join(5)
        stuck = added.is_alive()
        codec.gate.set()
        added.join()
    assert not stuck, "it waits for what is being encoded"
    assert same_bits(Store.open(tmp_path / "s")[large.key].states, make_states(large, SPEC))


# --- memory -----------------------------------------------------------------------------------------------------------


def pool_used() -> int:
    gc.collect()
    return shared_pool().used


def test_a_closed_writer_holds_no_memory(tmp_path: Path) -> None:
    """Also one that somebody still refers to."""
    before = pool_used()
    writer = StoreWriter(tmp_path / "s", SPEC, shard_bytes=1 << 20)
    assert pool_used() == before + (2 << 20), "one shard being filled, one being written"
    for row in MANY[:10]:
        add(writer, row)
    writer.seal()
    for row in MANY[10:20]:
        add(writer, row)
    writer.close()
    assert pool_used() == before
    writer.close()
    again = StoreWriter(tmp_path / "s", SPEC, shard_bytes=1 << 20)
    assert again.done == writer.done and not add(again, MANY[19])
    again.close()
    assert pool_used() == before


def test_a_writer_that_failed_holds_no_memory_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StorageFullError(28, "full")

    before = pool_used()
    monkeypatch.setattr(writer_module, "write_shard", refuse)
    writer = StoreWriter(tmp_path / "s", SPEC, shard_bytes=1 << 20)
    for row in MANY[:10]:
        add(writer, row)
    with pytest.raises(StorageFullError):
        writer.close()
    del writer
    assert pool_used() == before


# --- while a shard is written -----------------------------------------------------------------------------------------


def pieces(sizes: list[int]) -> list[bytes | memoryview]:
    """Buffers of ``sizes``, all different, of both kinds in turn."""
    random = np.random.default_rng(len(sizes))
    arrays = [random.integers(0, 256, size, np.uint8) for size in sizes]
    return [array.data if index % 2 else array.tobytes() for index, array in enumerate(arrays)]


@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 200), st.integers(62, 66)), max_size=40),
    st.integers(0, 70),
)
def test_each_byte_is_written_and_let_go_of_twice_at_most(sizes: list[int], before: int) -> None:
    """Once to have the disk begin, once when it is there."""
    calls: list[tuple[int, int, int]] = []

    def fadvise(fd: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((start, start + length, os.fstat(fd).st_size))

    buffers = pieces(sizes)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile() as file:
        patch.setattr(files, "WRITE_AHEAD", 64)
        patch.setattr(os, "posix_fadvise", fadvise, raising=False)
        file.write(b"x" * before)
        write_through(file, buffers)
        file.seek(0)
        assert file.read() == b"x" * before + b"".join(buffers)
    end = before + sum(sizes)
    times = np.zeros(end + 1, np.int64)
    for start, stop, there in calls:
        assert before <= start < stop <= there <= end, "only what has been handed to the system"
        times[start:stop] += 1
    assert times.max() <= 2
    assert len(calls) <= (end - before) // 64
    asked = max((stop for _, stop, _ in calls), default=before)
    assert end - asked < 64, "the disk has less than a part still to begin with"
    if calls:
        assert (times[before : calls[-1][0]] == 2).all() and (times[calls[-1][0] : asked] >= 1).all()


def test_a_system_without_advice_is_written_to_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITE_AHEAD", 64)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    file, buffers = io.BytesIO(), pieces([100, 3, 77])
    write_through(file, buffers)
    assert file.getvalue() == b"".join(buffers)


def cached_bytes(path: Path) -> int:
    """How much of a file the system holds in memory."""
    size, libc = path.stat().st_size, ctypes.CDLL(None, use_errno=True)
    seen = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        failed = libc.mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(seen.ctypes.data)
        )
    assert not failed, os.strerror(ctypes.get_errno())
    return int((seen & 1).sum()) * mmap.PAGESIZE


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux says what it caches and drops what it is told to"
)
def test_what_is_on_the_disk_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk as fast as the writer: each part is there before the next is written."""
    part, path, plain = 2 << 20, tmp_path / "through", tmp_path / "plain"
    data = np.random.default_rng(0).integers(0, 256, 8 * part, np.uint8)
    with plain.open("wb") as file:
        file.write(data.data)
        os.fdatasync(file.fileno())
        held = cached_bytes(plain)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if held < 7 * part or cached_bytes(plain) > part:
        pytest.skip("this file system keeps all or nothing in memory")
    monkeypatch.setattr(files, "WRITE_AHEAD", part)

    def parts() -> Iterator[memoryview]:
        for start in range(0, len(data), part // 4):
            if start % part == 0:
                os.fdatasync(file.fileno())
            yield data[start : start + part // 4].data

    with path.open("wb") as file:
        write_through(file, parts())
        os.fsync(file.fileno())
    assert cached_bytes(path) <= 2 * part, f"of {len(data)} bytes"
    assert path.read_bytes() == data.tobytes()


# --- leftovers --------------------------------------------------------------------------------------------------------


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    """ST-07, ST-18: nothing is locked; a dead writer is known by host, boot and process, an unknown one by its age."""
    shards = write_store(tmp_path / "s", [make_row(1, 3)]) / "shards"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    def leftover(host: str, pid: int, age: float = 0.0) -> Path:
        name = new_shard_name(1).replace(place(), host)
        name = re.sub(r"-\d+-(\d{6})-", rf"-{pid}-\1-", name)
        file = shards / f".{name}.{pid}.0a1b2c3d.tmp"
        file.write_bytes(b"half a shard")
        os.utime(file, (time.time() - age, time.time() - age))
        return file

    mine_dead, mine_alive = leftover(place(), dead.pid), leftover(place(), os.getpid())
    other_new, other_old = leftover("far_12345678", dead.pid), leftover("far_12345678", dead.pid, 2 * 86_400)
    with StoreWriter(tmp_path / "s", SPEC) as writer:
        assert sorted(writer.removed) == sorted([mine_dead.name, other_old.name])
    assert not mine_dead.exists() and not other_old.exists() and mine_alive.exists() and other_new.exists()
    assert len(Store.open(tmp_path / "s")) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.store import StoreWriter, WriterOptions
from headrace.testing.store import make_row, make_spec, make_states
spec = make_spec()
writer = StoreWriter(sys.argv[1], spec, options=WriterOptions(shard_captures=5))
for seed in range(int(sys.argv[2])):
    row = make_row(seed, 30)
    writer.add(row, make_states(row, spec))
print(len(writer.done), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_and_go_on_gives_the_same_store(tmp_path: Path) -> None:
    """ST-01: killed again and again, the store ends as an uninterrupted one does."""
    path = tmp_path / "s"
    for count in (12, 20):
        result = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), str(count)], capture_output=True, text=True, timeout=120
        )
        assert result.returncode == -9, result.stderr
        assert check_store(LocalFolder(path)).ok
        assert len(Store.open(path)) >= int(result.stdout)
    rows = [make_row(seed, 30) for seed in range(23)]
    write_store(path, rows)
    store = Store.open(path)
    assert set(store) == {row.key for row in rows}
    assert all(same_bits(store[row.key].states, make_states(row, SPEC)) for row in rows)
    assert check_store(LocalFolder(path)).ok
