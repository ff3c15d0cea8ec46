"""Codecs: lossless means every bit, lossy means a known error, and a chunk stands alone."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.bits import TORCH_DTYPES, bits_of, first_bad_row, magnitudes, tensor_of
from headrace.errors import ConfigError
from headrace.store import codecs
from headrace.store.codecs import CODECS, Fp8, Planes, Raw, chunk_rows, default_codec, open_codec
from headrace.store.encode import encoder_threads
from headrace.testing.store import CodecTests, LossyCodecTests, bit_arrays, decode, encode


class TestRaw(CodecTests):
    codec = Raw


class TestPlanes(CodecTests):
    codec = Planes
    dtypes = ("bfloat16", "float16")

    def test_payload_is_the_low_bytes_and_one_standard_zstd_frame(self) -> None:
        bits = bits_of(torch.randn(7, 5).bfloat16())
        payload, _ = encode(Planes("bfloat16"), bits)
        assert bytes(payload[:35]) == (bits & 255).astype(np.uint8).tobytes()
        # any zstd reader, not only ours, gets the high bytes
        high = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(payload[35:])).read()
        assert high == (bits >> 8).astype(np.uint8).tobytes()

    def test_float32_is_refused_with_the_mend(self) -> None:
        with pytest.raises(ConfigError, match="use raw or fp8"):
            Planes("float32")

    def test_states_shrink_to_about_two_thirds(self) -> None:
        bits = bits_of((torch.randn(512, 576) * torch.rand(576) * 3).bfloat16())
        payload, _ = encode(Planes("bfloat16"), bits)
        assert len(payload) / bits.nbytes < 0.72


class TestFp8(LossyCodecTests):
    codec = Fp8

    def test_golden_values(self) -> None:
        """Hand-computed: scale = max/448; 1.0/0.03125 = 32 exactly; 0.3/0.03125 = 9.6 rounds to 10 (step 1 in 8..16)."""
        bits = bits_of(torch.tensor([[14.0, 1.0, -0.3, 0.0]]))
        payload, scales = encode(Fp8("float32"), bits)
        assert scales is not None and scales.tolist() == [0.03125]
        assert torch.tensor(list(payload), dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist() == [
            448.0,
            32.0,
            -10.0,
            0.0,
        ]
        out = tensor_of(decode(Fp8("float32"), payload, scales, (1, 4)), "float32")
        assert out.tolist() == [[14.0, 1.0, -0.3125, 0.0]]

    @given(bit_arrays("bfloat16"))
    def test_error_of_normal_values_is_at_most_half_a_step(self, bits: np.ndarray) -> None:
        rows = [i for i in range(len(bits)) if first_bad_row(bits[i : i + 1], "bfloat16") is None]
        if not rows:
            return
        bits = np.ascontiguousarray(bits[rows])
        payload, scales = encode(Fp8("bfloat16"), bits)
        true = tensor_of(bits, "bfloat16").double()
        got = tensor_of(decode(Fp8("bfloat16"), payload, scales, bits.shape), "bfloat16").double()
        top = true.abs().amax(dim=1, keepdim=True)
        if (
            float(top.max()) > 1e38 or float(top.min()) < 1e-30
        ):  # float32 scales of such rows over- or underflow
            return
        # 3 mantissa bits: half a step is 1/16 of the value; below 2^-6 of e4m3's range the step is fixed; bfloat16 adds 2^-8
        allowed = true.abs() * (1 / 16 + 1 / 200) + top / 448 * 2.0**-10 * 1.01
        assert bool(((got - true).abs() <= allowed).all())

    def test_rows_have_scales_of_their_own(self) -> None:
        values = torch.randn(4, 64) * torch.tensor([1e-6, 1.0, 1e3, 1e6])[:, None]
        payload, scales = encode(Fp8("bfloat16"), bits_of(values.bfloat16()))
        got = tensor_of(decode(Fp8("bfloat16"), payload, scales, (4, 64)), "bfloat16").float()
        relative = (got - values).norm(dim=1) / values.norm(dim=1)
        assert float(relative.max()) < 0.04

    def test_rows_too_small_for_a_scale_of_their_own_are_no_nan(self) -> None:
        """Of a scale below 2.9e-39 there is no inverse in float32; beside a NaN or not, the row is the same."""
        tops = torch.tensor([1e-36, 4e-37, 1e-38, 1e-40, 0.0, float("nan")])
        seeded = torch.Generator().manual_seed(7)
        values = torch.randn(6, 64, generator=seeded).clamp(-1, 1) * tops[:, None]
        for dtype in ("float32", "bfloat16"):
            bits = bits_of(values.to(TORCH_DTYPES[dtype]))
            payload, scales = encode(Fp8(dtype), bits)
            got = tensor_of(decode(Fp8(dtype), payload, scales, bits.shape), dtype)
            assert torch.isfinite(got[:5]).all() and torch.isnan(got[5]).all()
            # Half a step of e4m3, and of bfloat16's smallest values (9.2e-41) on the way in and out.
            assert torch.allclose(got[:3].double(), values[:3].double(), rtol=0.075, atol=2e-40)
            alone, _ = encode(Fp8(dtype), np.ascontiguousarray(bits[:5]))
            assert alone == payload[: len(alone)]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_rounds_as_torch_does(self, dtype: str) -> None:
        """Every 16-bit pattern, NaN among them, and values a hair off the middle between two codes; there and back."""
        rng = np.random.default_rng(5)
        if dtype == "float32":
            codes = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float().double()
            middles = ((codes[1:] + codes[:-1]) / 2).float().numpy()
            near = [np.nextafter(middles, np.float32(way)) for way in (-1e9, 1e9)]
            row = np.concatenate([middles, *near, [448.0]]).astype(np.float32)
            bits = (np.stack([row, -row, row * 3, row * 1e-30]).astype(np.float32)).view(np.uint32)
        else:
            bits = rng.permutation(np.arange(1 << 16, dtype=np.uint16)).reshape(64, 1024)
        codec = Fp8(dtype)
        payload, scales = encode(codec, bits)
        assert scales is not None
        values = tensor_of(bits.copy(), dtype).float()
        top = values.abs().amax(dim=1)
        least = torch.full((), torch.finfo(torch.float32).tiny)
        wanted = torch.where(top > 0, torch.maximum(top / 448, least), torch.ones(()))
        assert np.array_equal(scales, wanted.numpy(), equal_nan=True)
        scaled = (values * (1 / wanted)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert bytes(payload) == scaled.view(torch.uint8).numpy().tobytes()
        got = decode(codec, payload, scales, bits.shape)
        back = (scaled.float() * wanted[:, None]).to(TORCH_DTYPES[dtype])
        assert torch.equal(tensor_of(got, dtype).nan_to_num(7.0), back.nan_to_num(7.0))

    def test_nan_and_infinity_come_back_as_nan_and_rows_beside_them_as_they_are(self) -> None:
        values = torch.randn(3, 700)
        values[1, 5], values[2, 6] = float("nan"), float("inf")
        payload, scales = encode(Fp8("bfloat16"), bits_of(values.bfloat16()))
        got = tensor_of(decode(Fp8("bfloat16"), payload, scales, (3, 700)), "bfloat16").float()
        assert torch.isnan(got[1]).nonzero().tolist() == [[5]] and torch.isnan(got[2, 6])
        assert float((got[0] - values[0]).norm() / values[0].norm()) < 0.04

    def test_blocks_and_pieces_make_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows are worked on in blocks, and a block in pieces; a row wider than a piece too."""
        bits = bits_of(torch.randn(37, 24).bfloat16())
        payload, scales = encode(Fp8("bfloat16"), bits)
        out = decode(Fp8("bfloat16"), payload, scales, bits.shape)
        for piece, block in ((50, 100), (24, 24), (7, 9), (1 << 15, 200)):
            monkeypatch.setattr(codecs, "FP8_PIECE", piece)
            monkeypatch.setattr(codecs, "FP8_BLOCK", block)
            again = encode(Fp8("bfloat16"), bits)
            assert again[0] == payload and np.array_equal(again[1], scales)
            assert np.array_equal(decode(Fp8("bfloat16"), payload, scales, bits.shape), out)

    def test_inference_mode_leaves_nothing_behind(self) -> None:
        bits = bits_of(torch.randn(5, 16).bfloat16())
        codec = Fp8("bfloat16")
        with torch.inference_mode():
            payload, scales = encode(codec, bits)
            inside = decode(codec, payload, scales, bits.shape)
        assert encode(codec, bits)[0] == payload
        assert np.array_equal(decode(codec, payload, scales, bits.shape), inside)

    def test_no_thread_of_torch_is_started(self) -> None:
        """Sixteen encoder threads had torch divide each of their steps among sixteen of its own, and wrote 0.13 GB/s."""
        code = """
            import numpy as np, torch
            from pathlib import Path
            from headrace.store.codecs import Fp8, chunk_rows

            torch.set_num_threads(4)
            bits = np.ones((300, 4096), np.uint16)
            before = len(list(Path("/proc/self/task").iterdir()))
            codec = Fp8("bfloat16")
            chunks = codec.encode_chunks(bits, chunk_rows(4096))
            codec.decode(memoryview(chunks.payload), np.concatenate(chunks.scales), bits)
            print(len(list(Path("/proc/self/task").iterdir())) - before)
            torch.ones(1 << 24).add_(1)
            print(len(list(Path("/proc/self/task").iterdir())) - before)
        """
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
        )
        ours, divided = map(int, run.stdout.split())
        assert ours == 0 and divided > 0, run.stdout

    def test_many_chunks_at_a_time_are_those_of_one_each(self) -> None:
        bits = bits_of(torch.randn(1000, 576).bfloat16())
        codec = Fp8("bfloat16")
        together = codec.encode_chunks(bits, chunk_rows(576))
        alone = [codec.encode(bits[at : at + 227]) for at in range(0, 1000, 227)]
        assert bytes(together.payload) == b"".join(bytes(part[0]) for part, _ in alone)
        assert np.array_equal(np.concatenate(together.scales), np.concatenate([s for _, s in alone]))
        assert together.sizes == [227 * 576] * 4 + [92 * 576]


@given(st.data())
def test_largest_magnitude_and_first_bad_row(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    bits = data.draw(bit_arrays(dtype))
    values = tensor_of(bits, dtype)
    bad = [i for i in range(len(values)) if not torch.isfinite(values[i]).all()]
    zero = [i for i in range(len(values)) if bool((values[i] == 0).all())]
    found = first_bad_row(bits, dtype, np.ones(len(bits), bool))
    if bad:
        assert found is not None and found[0] == bad[0]
        assert found[1] == ("NaN" if torch.isnan(values[bad[0]]).any() else "an infinity")
    elif zero:
        assert found == (zero[0], "only zeros")
        assert first_bad_row(bits, dtype) is None
    else:
        assert found is None
        assert torch.equal(tensor_of(magnitudes(bits, dtype), dtype), values.abs().amax(dim=1))


def test_names_and_defaults() -> None:
    assert sorted(CODECS) == ["bf16-planes", "fp8", "raw"]
    assert (default_codec("bfloat16"), default_codec("float16"), default_codec("float32")) == (
        "bf16-planes",
        "bf16-planes",
        "raw",
    )
    with pytest.raises(ConfigError, match="no codec named"):
        open_codec("gzip", "bfloat16")
    assert (chunk_rows(576), chunk_rows(7168), chunk_rows(1_000_000)) == (227, 18, 1)


def test_planes_without_the_compiled_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cffi backend has no call for many frames; the bytes are the same."""
    bits = bits_of(torch.randn(100, 64).to(torch.bfloat16))
    want = Planes("bfloat16").encode_chunks(bits, 16)
    monkeypatch.setattr(zstandard, "backend_features", set())
    got = Planes("bfloat16").encode_chunks(bits, 16)
    assert (bytes(got.payload), got.sizes) == (bytes(want.payload), want.sizes)


@pytest.mark.parametrize(
    ("cores", "planes", "fp8"), [(1, 2, 2), (2, 2, 2), (6, 3, 3), (16, 8, 4), (128, 8, 4)]
)
def test_a_codec_says_how_many_threads_pay_off(
    monkeypatch: pytest.MonkeyPatch, cores: int, planes: int, fp8: int
) -> None:
    monkeypatch.setattr("headrace.store.encode.available_cores", lambda: cores)
    assert encoder_threads(open_codec("bf16-planes", "bfloat16")) == planes
    assert encoder_threads(open_codec("fp8", "bfloat16")) == fp8
