"""A capture encoded in parts by many threads is the capture encoded in one go."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bits import Bits, bits_of
from headrace.store import encode
from headrace.store.codecs import Chunks, Codec, Raw, open_codec
from headrace.store.encode import Encoded, Encoding, Parent, encode_capture
from headrace.store.format import FinalPositions
from headrace.testing.store import make_row, make_spec, make_states

POOL = ThreadPoolExecutor(3)


def plain(encoded: Encoded) -> list[tuple[Any, ...]]:
    """Everything in it, as values."""
    return [
        (
            tap.rows,
            b"".join(bytes(buffer) for buffer in tap.buffers),
            tap.checksums,
            tap.sizes,
            np.concatenate(tap.scales).tolist() if tap.scales else [],
            tap.norms.tolist(),
            (tap.errors, pytest.approx(tap.error_sum), tap.error_max),
        )
        for tap in encoded.taps
    ]


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 120),
    chunk_rows=st.integers(1, 9),
    part_rows=st.integers(1, 60),
    codec=st.sampled_from(["raw", "bf16-planes", "fp8"]),
    policy=st.sampled_from(["all", "supervised"]),
    shared=st.integers(0, 5),
)
def test_parts_make_the_whole(
    tokens: int, chunk_rows: int, part_rows: int, codec: str, policy: FinalPositions, shared: int
) -> None:
    spec = make_spec()
    row = make_row(tokens, tokens)
    parent = Parent("0" * 32, min(shared, tokens - 1)) if shared and tokens > 1 else None
    states = bits_of(make_states(row, spec).contiguous())[:, parent.tokens if parent else 0 :]
    coder = open_codec(codec, spec.dtype)
    options: dict[str, Any] = {"chunk_rows": chunk_rows, "policy": policy, "parent": parent}
    whole = encode_capture(row, states, spec, coder, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PART_BYTES", part_rows * states.strides[-2])
        parts = Encoding(POOL, row, states, spec, coder, **options).result()
    assert plain(parts) == plain(whole)
    assert (parts.row, parts.parent, parts.nbytes) == (whole.row, whole.parent, whole.nbytes)


class Meeting(Raw):
    """Encodes only when so many threads are at it at the same moment."""

    def __init__(self, dtype: str, threads: int) -> None:
        super().__init__(dtype)
        self.barrier = threading.Barrier(threads)

    def encode_chunks(self, bits: Bits, chunk_rows: int) -> Chunks:
        self.barrier.wait(timeout=10)
        return super().encode_chunks(bits, chunk_rows)


def encoded_by(threads: int, codec: Codec, tokens: int) -> Encoded:
    spec = make_spec()
    row = make_row(1, tokens)
    states = bits_of(make_states(row, spec).contiguous())
    with ThreadPoolExecutor(threads) as pool:
        return Encoding(pool, row, states, spec, codec, chunk_rows=4, policy="all").result()


def test_a_long_row_is_the_work_of_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread a row left the others without work as soon as a long row came: 0.6 GB/s however many there were."""
    spec = make_spec()
    monkeypatch.setattr(encode, "PART_BYTES", 4 * spec.bytes_per_token // len(spec.taps))
    got = encoded_by(4, Meeting(spec.dtype, 4), 64)
    assert [tap.rows for tap in got.taps] == [64] * len(spec.taps)


def test_a_short_row_is_one_job() -> None:
    spec = make_spec()
    calls = []

    class Counting(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return super().submit(*args, **kwargs)

    row = make_row(1, 30)
    with Counting(1) as pool:
        Encoding(
            pool,
            row,
            bits_of(make_states(row, spec).contiguous()),
            spec,
            Raw(spec.dtype),
            chunk_rows=4,
            policy="all",
        ).result()
    assert len(calls) == 1


def test_what_a_thread_raised_comes_out() -> None:
    spec = make_spec()
    codec = Meeting(spec.dtype, 2)
    codec.barrier.abort()
    with pytest.raises(threading.BrokenBarrierError):
        encoded_by(2, codec, 10)
