"""The format, pinned: exact bytes, readable by anyone, and no bit of a shard can change or go missing unseen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from safetensors import safe_open

from headrace.bits import bits_of
from headrace.errors import CorruptError, HeadraceError
from headrace.store import Store, StoreWriter
from headrace.store.build import ShardBuilder
from headrace.store.codecs import open_codec
from headrace.store.dataset import Dataset
from headrace.store.encode import encode_capture
from headrace.store.folder import MappedFile
from headrace.store.format import ALIGNMENT, pack_mask, unpack_mask
from headrace.store.index import Index
from headrace.store.shard import Shard
from headrace.testing.store import (
    make_row,
    make_spec,
    make_states,
    rows,
    same_bits,
    shard_files,
    specs,
    write_store,
)
from headrace.types import CaptureSpec, Row

GOLDEN = Path(__file__).parent / "golden"


def golden_shard(codec: str) -> tuple[bytes, Row, torch.Tensor, CaptureSpec]:
    """Two captures whose every byte is chosen here."""
    spec = make_spec(hidden_size=4, taps=(2, "final"))
    builder = ShardBuilder(spec, open_codec(codec, spec.dtype), 2, "all", {"engine": "none"})
    row = Row.make([1, 2, 70_000], [False, True, True])
    states = (torch.arange(24).reshape(2, 3, 4) / 8 - 1).bfloat16()
    other = Row.make([5], [False])
    for r, s in ((row, states), (other, states[:, :1] + 3)):
        builder.append(
            encode_capture(r, bits_of(s.contiguous()), spec, builder.codec, chunk_rows=2, policy="all")
        )
    prefix, buffers = builder.layout()
    return prefix + b"".join(memoryview(b).cast("B") for b in buffers), row, states, spec


@pytest.mark.parametrize("codec", ["raw", "fp8"])
def test_golden_bytes(codec: str) -> None:
    """Version 1 of the format is these bytes. If this fails, the format changed: give it a new version number."""
    assert golden_shard(codec)[0].hex() == (GOLDEN / f"{codec}.hex").read_text().strip()


@pytest.mark.parametrize("codec", ["raw", "bf16-planes", "fp8"])
def test_golden_shards_are_read(tmp_path: Path, codec: str) -> None:
    """Shards written by the first version stay readable; zstd may compress otherwise tomorrow, so planes are only read."""
    file = tmp_path / "golden.safetensors"
    file.write_bytes(bytes.fromhex((GOLDEN / f"{codec}.hex").read_text()))
    _, row, states, spec = golden_shard(codec)
    shard = Shard(MappedFile(file))
    assert shard.spec == spec and len(shard) == 2 and shard.key(0) == row.key
    assert shard.ids(0).tolist() == [1, 2, 70_000] and shard.mask(0).tolist() == [False, True, True]
    out = torch.empty(3, 4, dtype=torch.bfloat16)
    shard.read(0, "final", 0, 3, bits_of(out))
    if codec == "fp8":
        torch.testing.assert_close(out, states[1], rtol=0.07, atol=0.01)
    else:
        assert same_bits(out, states[1])


def test_missing_scales_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of another writer, whole by its digests."""
    monkeypatch.setattr(ShardBuilder, "_scales", lambda self: {})
    file = tmp_path / "s.safetensors"
    file.write_bytes(golden_shard("fp8")[0])
    with pytest.raises(CorruptError, match="tap 2 cannot be decoded: its scales are missing"):
        Shard(MappedFile(file)).read(0, 2, 0, 3, np.empty((3, 4), np.uint16))


def test_raw_shard_opens_without_us(tmp_path: Path) -> None:
    captures = [make_row(1, 5), make_row(2, 9)]
    spec = make_spec()
    shard = shard_files(write_store(tmp_path / "s", captures, codec="raw"))[0]
    with safe_open(shard, framework="pt") as file:
        offsets = file.get_tensor("offsets").tolist()
        assert offsets == [0, 5, 14]
        ids, final = file.get_tensor("ids"), file.get_tensor("tap.final")
        assert final.dtype == torch.bfloat16 and list(final.shape) == [14, 16]
        for row, start, stop in zip(captures, offsets, offsets[1:], strict=False):
            assert ids[start:stop].tolist() == row.ids.tolist()
            assert same_bits(final[start:stop], make_states(row, spec)[3])
        assert json.loads(file.metadata()["headrace"])["codec"] == "raw"


def test_fp8_shard_opens_without_us(tmp_path: Path) -> None:
    row = make_row(1, 5)
    shard = shard_files(write_store(tmp_path / "s", [row], codec="fp8"))[0]
    with safe_open(shard, framework="pt") as file:
        assert file.get_tensor("tap.final").dtype == torch.float8_e4m3fn
        assert list(file.get_tensor("scales.final").shape) == [5]


@pytest.mark.slow
def test_number_of_tensors_does_not_grow_with_captures(tmp_path: Path) -> None:
    """ST-04: headers of files with a tensor or four a sample outgrow what readers accept."""
    few = shard_files(write_store(tmp_path / "few", [make_row(0, 2)]))[0]
    many = shard_files(
        write_store(tmp_path / "many", [make_row(i, 1) for i in range(3000)], captures_a_shard=5000)
    )[0]
    with safe_open(few, framework="np") as a, safe_open(many, framework="np") as b:
        assert len(list(a.keys())) == len(list(b.keys())) < 30
    assert int.from_bytes(many.read_bytes()[:8], "little") < 4096


@pytest.mark.parametrize("codec", ["raw", "bf16-planes", "fp8"])
def test_payload_is_aligned(tmp_path: Path, codec: str) -> None:
    for file in shard_files(write_store(tmp_path / "s", [make_row(i, i + 1) for i in range(7)], codec=codec)):
        shard = Shard(MappedFile(file))
        assert shard.prefix.size % ALIGNMENT == 0


class BytesSource:
    """A shard in memory: thousands of damaged ones can be tried in a second."""

    name = "memory.safetensors"

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def read(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]


def read_all(data: bytes) -> None:
    """Read everything that is in a shard."""
    shard = Shard(BytesSource(data))
    for slot in range(len(shard)):
        shard.check_key(slot)
        for tap in shard.spec.taps:
            rows = shard.rows(slot, tap)
            shard.read(slot, tap, 0, rows, np.empty((rows, shard.spec.hidden_size), np.uint16))


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", "bf16-planes", "fp8"])
def test_every_bit_flip_of_a_shard_is_detected(codec: str) -> None:
    good = golden_shard(codec)[0]
    read_all(good)
    for byte in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[byte] ^= 1 << bit
            with pytest.raises(CorruptError, match=r"memory\.safetensors"):
                read_all(bytes(damaged))


@pytest.mark.parametrize("codec", ["raw", "bf16-planes", "fp8"])
def test_every_truncation_of_a_shard_is_detected(codec: str) -> None:
    """ST-02: a cut file must never be mapped and read as zeros."""
    good = golden_shard(codec)[0]
    for size in range(len(good)):
        with pytest.raises(CorruptError, match=r"memory\.safetensors"):
            read_all(good[:size])
    with pytest.raises(CorruptError, match="cut or padded"):
        read_all(good + b"\0")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100])
def test_a_cut_shard_on_disk(tmp_path: Path, size: int) -> None:
    """ST-02 once more through the memory map, where reading past the end of a file would be a bus error."""
    path = write_store(tmp_path / "s", [make_row(1, 3)], codec="raw")
    file = shard_files(path)[0]
    os.truncate(file, size)
    with pytest.raises(CorruptError, match=file.name):
        Store.open(path)[make_row(1, 3).key]


def test_every_bit_flip_of_dataset_json_is_detected_or_harmless(tmp_path: Path) -> None:
    good = (write_store(tmp_path / "s", [make_row(1, 3)]) / "dataset.json").read_bytes()
    truth = Dataset.parse(good, "dataset.json")
    for byte in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[byte] ^= 1 << bit
            try:
                assert Dataset.parse(bytes(damaged), "dataset.json") == truth
            except HeadraceError as exc:
                assert "dataset.json" in str(exc)


@pytest.mark.slow
def test_every_bit_flip_of_the_index_is_harmless(tmp_path: Path) -> None:
    """The index is derived: a damaged one is noticed, and made again from the shards."""
    good = (write_store(tmp_path / "s", [make_row(i, 3) for i in range(4)]) / "index.parquet").read_bytes()
    truth = Index.from_parquet(good)
    assert truth is not None
    for byte in range(len(good)):
        damaged = bytearray(good)
        damaged[byte] ^= 1 << (byte % 8)
        found = Index.from_parquet(bytes(damaged))
        if found is not None:
            assert found.shards == truth.shards
            assert all(
                np.array_equal(getattr(found, c), getattr(truth, c))
                for c in ("hi", "lo", "shard", "slot", "tokens")
            )


def test_a_damaged_index_on_disk_is_made_again(tmp_path: Path) -> None:
    row = make_row(1, 3)
    path = write_store(tmp_path / "s", [row])
    for damage in (b"", b"PAR1", (path / "index.parquet").read_bytes()[:-20]):
        (path / "index.parquet").write_bytes(damage)
        store = Store.open(path)
        assert same_bits(store[row.key].states, make_states(row, store.spec))


def test_other_versions_are_refused() -> None:
    data = golden_shard("raw")[0].replace(rb"\"version\":1", rb"\"version\":2")
    end = Shard(BytesSource(golden_shard("raw")[0])).prefix.size
    at = data.index(b'"digest":"') + len(b'"digest":"')
    zeroed = data[:at] + b"0" * 16 + data[at + 16 :]
    data = data[:at] + xxhash.xxh3_64_hexdigest(zeroed[:end]).encode() + data[at + 16 :]
    with pytest.raises(CorruptError, match="version 2"):
        Shard(BytesSource(data))


@given(rows())
def test_mask_bits(row: Row) -> None:
    packed = pack_mask(row.mask, 5)
    assert (5 + len(packed)) % ALIGNMENT == 0
    for start in range(len(row)):
        assert unpack_mask(packed, start, len(row)).tolist() == row.mask[start:].tolist()


@given(specs(), rows(), rows())
def test_any_shape_of_capture_comes_back(spec: CaptureSpec, one: Row, two: Row) -> None:
    """Every codec, dtype and width; one token; nothing or everything supervised. The store's own door is left out, so that
    NaN payloads get in and must come out."""
    for codec in ("raw", "fp8") if spec.dtype == "float32" else ("raw", "bf16-planes", "fp8"):
        builder = ShardBuilder(spec, open_codec(codec, spec.dtype), 4, "all", {})
        truth = {}
        for row in (one, two):
            width = (len(spec.taps), len(row), spec.hidden_size)
            random = np.random.default_rng(int(row.key[:8], 16))
            bits = random.integers(0, 2**16, width).astype(
                np.uint16 if spec.dtype != "float32" else np.uint32
            )
            truth[row.key] = bits
            builder.append(encode_capture(row, bits, spec, builder.codec, chunk_rows=4, policy="all"))
        prefix, buffers = builder.layout()
        shard = Shard(BytesSource(prefix + b"".join(memoryview(b).cast("B") for b in buffers)))
        for slot in range(2):
            shard.check_key(slot)
            bits = truth[shard.key(slot)]
            for index, tap in enumerate(spec.taps):
                out = np.empty_like(bits[index])
                shard.read(slot, tap, 0, len(out), out)
                assert codec == "fp8" or np.array_equal(out, bits[index])


def test_a_shard_of_another_store_is_refused(tmp_path: Path) -> None:
    """ST-15: one format a store; a file that strayed in is an error, not a second truth."""
    path = write_store(tmp_path / "a", [make_row(1, 4)])
    for name, other in (
        ("codec", write_store(tmp_path / "b", [make_row(2, 4)], codec="raw")),
        ("config_hash", write_store(tmp_path / "c", [make_row(2, 4)], make_spec(config_hash="f" * 16))),
    ):
        stray = shard_files(other)[0]
        copy = path / "shards" / stray.name
        copy.write_bytes(stray.read_bytes())
        with pytest.raises(CorruptError, match=name):
            Store.open(path)
        copy.unlink()
    assert len(Store.open(path)) == 1


def test_writer_is_not_fooled_by_the_existing_file(tmp_path: Path) -> None:
    """Two writers in one second and process never share a shard name."""
    names = set()
    for seed in range(5):
        with StoreWriter(tmp_path / "s", make_spec()) as writer:
            row = make_row(seed, 3)
            writer.add(row, make_states(row, make_spec()))
        names = {f.name for f in shard_files(tmp_path / "s")}
    assert len(names) == 5
