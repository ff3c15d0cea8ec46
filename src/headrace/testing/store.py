"""For tests of stores: specs and states that spell out their place, hypothesis strategies, and two conformance suites.

class TestMyFolder(StoreTests):
    def folder(self, path): return MyFolder(...)     # a view of the local store at ``path``

class TestMyCodec(CodecTests):
    codec = MyCodec
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.bits import Bits, bits_dtype, bits_of
from headrace.engines.fake import fingerprint
from headrace.errors import CorruptError, HeadraceError
from headrace.store.check import check_store
from headrace.store.codecs import Codec
from headrace.store.folder import SHARDS, Folder
from headrace.store.format import Array, FinalPositions
from headrace.store.reader import Store, load_index
from headrace.store.writer import StoreWriter, WriterOptions
from headrace.types import FINAL, CaptureSpec, Row, Tap

# --- small true things ------------------------------------------------------------------------------------------------


def make_spec(**changes: Any) -> CaptureSpec:
    """A spec of a made-up 8-layer target, hidden 16, bfloat16, taps 2, 4, 5 and final."""
    fields: dict[str, Any] = {
        "target": "made-up",
        "config_hash": "0123456789abcdef",
        "num_layers": 8,
        "hidden_size": 16,
        "dtype": "bfloat16",
        "taps": (2, 4, 5, "final"),
        "norm_kind": "rms",
        "norm_eps": 1e-5,
    }
    return CaptureSpec(**{**fields, **changes})


def make_row(seed: int, tokens: int, supervised: float = 0.5) -> Row:
    """A row of random ids and mask; equal arguments give equal rows."""
    random = np.random.default_rng((seed, tokens))
    return Row.make(random.integers(3, 60_000, tokens), random.random(tokens) < supervised)


def make_states(row: Row, spec: CaptureSpec) -> torch.Tensor:
    """[taps, tokens, hidden] that name their token, position and tap, with noise behind them so that no two rows compress
    alike; the same for equal rows."""
    states = fingerprint(row.ids, spec)
    for index, tap in enumerate(spec.taps):
        random = np.random.default_rng((int(row.key[:12], 16), 255 if tap == FINAL else int(tap)))
        noise = random.standard_normal((len(row), spec.hidden_size - 8))
        states[index, :, 8:] = torch.from_numpy(noise).to(states.dtype)
    return states


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equality of shape, dtype and every bit: NaN equals the same NaN, and 0.0 is not -0.0."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool((bits_of(got.contiguous()) == bits_of(want.contiguous())).all())


def write_store(
    path: Path,
    rows: Sequence[Row],
    spec: CaptureSpec | None = None,
    *,
    codec: str = "bf16-planes",
    captures_a_shard: int = 3,
    final_positions: FinalPositions = "all",
) -> Path:
    """A store of ``rows`` with their :func:`make_states`, several shards of it."""
    spec = spec or make_spec()
    options = WriterOptions(shard_captures=captures_a_shard)
    with StoreWriter(path, spec, codec=codec, final_positions=final_positions, options=options) as writer:
        for row in rows:
            writer.add(row, make_states(row, spec))
    return path


def shard_files(path: Path) -> list[Path]:
    """The sealed shards of a local store, oldest first."""
    return sorted((path / SHARDS).glob("*.safetensors"))


def flip_bit(path: Path, byte: int, bit: int = 0) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


# --- strategies -------------------------------------------------------------------------------------------------------

# Bit patterns that have bitten someone: zeros of both signs, subnormals, the largest values, infinities, quiet and
# signalling NaNs with payloads. Without them random bits almost never meet the edges.
_SPECIAL_16 = [
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x7F7F,
    0x7BFF,
    0x7F80,
    0xFF80,
    0x7FC0,
    0x7F81,
    0xFFFF,
    0x7C00,
    0x7E01,
]
_SPECIAL_32 = [
    0x0,
    0x8000_0000,
    0x1,
    0x7F7F_FFFF,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
    0x7F80_0001,
    0xFFFF_FFFF,
]


@st.composite
def bit_arrays(draw: st.DrawFn, dtype: str, *, max_rows: int = 40, max_hidden: int = 40) -> Bits:
    """Any bits at all [rows, hidden]: noise, constants, or values clustered as hidden states are; specials sprinkled in."""
    rows, hidden = draw(st.integers(1, max_rows)), draw(st.integers(1, max_hidden))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    wide = bits_dtype(dtype)
    top = np.iinfo(wide).max
    kind = draw(st.sampled_from(["noise", "constant", "states"]))
    if kind == "noise":
        bits = random.integers(0, top, (rows, hidden), endpoint=True).astype(wide)
    elif kind == "constant":
        bits = np.full((rows, hidden), draw(st.integers(0, int(top))), wide)
    else:
        values = torch.from_numpy(random.standard_normal((rows, hidden)) * 10.0 ** draw(st.integers(-4, 3)))
        bits = bits_of(values.to(getattr(torch, dtype))).copy()
    specials = _SPECIAL_32 if dtype == "float32" else _SPECIAL_16
    for _ in range(draw(st.integers(0, 5))):
        bits[draw(st.integers(0, rows - 1)), draw(st.integers(0, hidden - 1))] = draw(
            st.sampled_from(specials)
        )
    return bits


@st.composite
def rows(draw: st.DrawFn, *, max_tokens: int = 30) -> Row:
    """Rows from one token up, with masks that may be all zero or all one."""
    tokens = draw(st.integers(1, max_tokens))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens))
    mask = draw(
        st.one_of(
            st.just([False] * tokens),
            st.just([True] * tokens),
            st.lists(st.booleans(), min_size=tokens, max_size=tokens),
        )
    )
    return Row.make(ids, mask)


def specs() -> st.SearchStrategy[CaptureSpec]:
    """Specs of every dtype, odd widths, one tap or several."""
    taps: list[tuple[Tap, ...]] = [("final",), (0,), (2, 4, 5, "final"), (8, 1)]
    return st.builds(
        make_spec,
        hidden_size=st.sampled_from([1, 7, 16, 33]),
        dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
        taps=st.sampled_from(taps),
    )


# --- conformance of a folder ------------------------------------------------------------------------------------------


class StoreTests(ABC):
    """What reading through any Folder must do. The store is written locally; ``folder`` says how it is looked at."""

    @abstractmethod
    def folder(self, path: Path) -> Folder:
        """A view of the store that lies at ``path`` now; damage done to it later need not show."""

    def store(self, path: Path) -> Store:
        """The store at ``path``, seen through ``folder``."""
        from headrace.store.dataset import read_dataset

        folder = self.folder(path)
        dataset = read_dataset(folder)
        return Store(folder, dataset, load_index(folder, dataset))

    @pytest.mark.parametrize("codec", ["raw", "bf16-planes", "fp8"])
    def test_every_value_comes_back(self, tmp_path: Path, codec: str) -> None:
        wanted = [make_row(seed, tokens) for seed, tokens in enumerate([1, 2, 40, 17, 17, 300])]
        store = self.store(write_store(tmp_path / "store", wanted, codec=codec))
        assert sorted(store.keys()) == sorted(row.key for row in wanted)
        assert store.tokens == sum(map(len, wanted))
        for row in wanted:
            capture = store[row.key]
            truth = make_states(row, store.spec)
            assert np.array_equal(capture.ids, row.ids)
            assert capture.mask is not None and np.array_equal(capture.mask, row.mask)
            if codec == "fp8":
                torch.testing.assert_close(capture.states, truth, rtol=0.07, atol=0.5)
            else:
                assert same_bits(capture.states, truth)

    def test_part_of_a_capture(self, tmp_path: Path) -> None:
        row = make_row(1, 30_000)  # several chunks of 8192 rows
        store = self.store(write_store(tmp_path / "store", [row]))
        truth = make_states(row, store.spec)
        for start, stop in [(0, 1), (8191, 8193), (29_999, 30_000), (5, 5), (8192, 16_384), (-10, None)]:
            capture = store.get(row.key, ("final", 4), start, stop)
            assert same_bits(capture.states, truth[[3, 1], start:stop])
            assert np.array_equal(capture.ids, row.ids[start:stop])

    def test_unknown_names(self, tmp_path: Path) -> None:
        row = make_row(1, 5)
        store = self.store(write_store(tmp_path / "store", [row]))
        with pytest.raises(KeyError, match="not in"):
            store["0" * 32]
        with pytest.raises(KeyError, match="not a row's key"):
            store["nonsense"]
        with pytest.raises(KeyError, match="no tap 7"):
            store.get(row.key, [7])
        assert "nonsense" not in store and "0" * 32 not in store and row.key in store

    @pytest.mark.parametrize("where", ["header", "tables", "payload"])
    def test_damage_is_seen(self, tmp_path: Path, where: str) -> None:
        row = make_row(1, 50)
        path = write_store(tmp_path / "store", [row])
        (path / "index.parquet").unlink()
        shard = shard_files(path)[0]
        flip_bit(shard, {"header": 60, "tables": 2400, "payload": shard.stat().st_size - 1}[where])
        folder = self.folder(path)
        assert not check_store(folder).ok
        with pytest.raises(CorruptError, match=r"\.safetensors"):
            self.store(path)[row.key]

    def test_a_cut_file_is_seen(self, tmp_path: Path) -> None:
        row = make_row(1, 50)
        path = write_store(tmp_path / "store", [row])
        shard = shard_files(path)[0]
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(CorruptError, match="cut or padded"):
            self.store(path)[row.key]

    def test_a_folder_that_is_no_store(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        with pytest.raises(HeadraceError, match="not a Headrace store"):
            self.store(tmp_path / "other")


# --- conformance of a codec -------------------------------------------------------------------------------------------


def encode(codec: Codec, bits: Bits) -> tuple[memoryview, Array | None]:
    """The payload of one chunk as it would lie in a file, and its scales."""
    buffers, scales = codec.encode(bits)
    return memoryview(b"".join(memoryview(buffer).cast("B") for buffer in buffers)), scales


def decode(codec: Codec, payload: memoryview, scales: Array | None, shape: tuple[int, ...]) -> Bits:
    """The inverse, into memory that is not zero beforehand: what a codec does not write must show."""
    out = np.full(shape, 0x5A5A, bits_dtype(codec.dtype))
    codec.decode(payload, scales, out)
    return out


_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no fault of a codec."""


class CodecTests:
    """What every codec must do. Say which, and for which dtypes."""

    codec: ClassVar[type[Codec]]
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    # The hypothesis tests are functions inside methods: hypothesis refuses one test that several subclasses inherit.

    def test_round_trip(self) -> None:
        @_PATIENT
        @given(st.data())
        def check(data: st.DataObject) -> None:
            codec = self.codec(data.draw(st.sampled_from(self.dtypes)))
            bits = data.draw(bit_arrays(codec.dtype))
            before = bits.copy()
            payload, scales = encode(codec, bits)
            assert np.array_equal(bits, before), "encoding changed its input"
            out = decode(codec, payload, scales, bits.shape)
            assert not codec.lossless or np.array_equal(out, bits)
            assert codec.has_scales == (scales is not None)

        check()

    def test_chunks_encoded_together_are_those_encoded_alone(self) -> None:
        @_PATIENT
        @given(st.data())
        def check(data: st.DataObject) -> None:
            codec = self.codec(data.draw(st.sampled_from(self.dtypes)))
            bits = data.draw(bit_arrays(codec.dtype))
            rows = data.draw(st.integers(1, len(bits) + 1))
            together = codec.encode_chunks(bits, rows)
            alone = [encode(codec, bits[start : start + rows]) for start in range(0, len(bits), rows)]
            assert bytes(together.payload) == b"".join(payload for payload, _ in alone)
            assert together.sizes == [len(payload) for payload, _ in alone]
            scales = [of_rows for _, of_rows in alone if of_rows is not None]
            assert np.array_equal(np.concatenate([*together.scales, [0]]), np.concatenate([*scales, [0]]))

        check()

    def test_what_is_not_a_payload_is_refused(self) -> None:
        @_PATIENT
        @given(st.data())
        def check(data: st.DataObject) -> None:
            codec = self.codec(data.draw(st.sampled_from(self.dtypes)))
            bits = data.draw(bit_arrays(codec.dtype))
            payload, scales = encode(codec, bits)
            cut = data.draw(st.integers(0, len(payload) - 1))
            with pytest.raises(CorruptError):
                decode(codec, payload[:cut], scales, bits.shape)
            with pytest.raises(CorruptError):
                decode(codec, payload, scales, (bits.shape[0] + 1, bits.shape[1]))

        check()

    def test_declared_tensor_fits(self) -> None:
        codec = self.codec(self.dtypes[0])
        bits = bits_of(torch.randn(9, 16).to(getattr(torch, codec.dtype)))
        payload, _ = encode(codec, bits)
        dtype, shape = codec.tensor(9, 16, len(payload))
        width = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}[dtype]
        assert int(np.prod(shape)) * width == len(payload)


class LossyCodecTests(CodecTests):
    """What a codec that rounds must do besides."""

    def test_rows_of_many_chunks_are_decoded_at_once(self) -> None:
        """Also from the middle of one chunk to the middle of another: that is how they are read."""
        codec = self.codec(self.dtypes[0])
        bits = bits_of(torch.randn(23, 16).to(getattr(torch, codec.dtype)))
        chunks = codec.encode_chunks(bits, 5)
        payload, scales, width = (
            memoryview(bytes(chunks.payload)),
            np.concatenate(chunks.scales),
            chunks.sizes[0] // 5,
        )
        alone, at = [], 0
        for size, of_rows in zip(chunks.sizes, chunks.scales, strict=True):
            alone.append(decode(codec, payload[at : at + size], of_rows, (len(of_rows), 16)))
            at += size
        for first, last in ((0, 5), (3, 12), (22, 23), (0, 23)):
            part = payload[first * width : last * width]
            together = decode(codec, part, scales[first:last], (last - first, 16))
            assert np.array_equal(together, np.concatenate(alone)[first:last])
