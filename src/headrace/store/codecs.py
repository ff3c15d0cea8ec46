"""How states become bytes: one small class a codec, each working on chunks that decode alone.

A chunk is up to ``chunk_rows`` consecutive rows of one (capture, tap). Codecs are pure: bytes in, bytes out.
Everything heavy in them (numpy loops, zstd) releases the GIL, and is done for many chunks at a time: to take the GIL again can
cost a thread on a busy virtual machine as much as the work on one chunk.

Ours are in :data:`CODECS`; other packages add theirs by the entry-point group ``headrace.codecs`` (docs/add-a-codec.md).
Ours need no entry point, so that a store opens wherever this file can be imported.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import zstandard

from headrace import plugins
from headrace.bits import SAFETENSORS_DTYPES, Bits, floats_of, magnitudes, round_floats
from headrace.errors import ConfigError, CorruptError
from headrace.memory import shared_pool

PLANE_BYTES = 131_072
"""Bytes of one compressed plane: the size of a zstd block, beyond which bigger frames win nothing."""
TOP_FP8 = 448.0
FP8_BLOCK = 1 << 16
"""States of which the fp8 codec makes its steps, one after the other: they stay in cache, and are worth giving up the GIL for."""
Buffer = bytes | memoryview
ENTRY_POINT_GROUP = "headrace.codecs"


class Chunks(NamedTuple):
    """Consecutive chunks, encoded."""

    payload: Buffer
    """One after the other."""
    sizes: list[int]
    """Bytes of each."""
    scales: list[np.ndarray[Any, Any]]
    """Of each, float32 [rows]; empty when the codec has none."""


class Codec(ABC):
    """One way to write chunks of states.

    A lossy codec has scales and writes row after row, each row as many bytes: that is how its error is measured.
    ``bits`` is always uint16 or uint32 [rows, hidden], C-contiguous; ``scales`` is float32 [rows], used only by codecs
    with ``has_scales``. Instances may be shared by threads.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    has_scales: ClassVar[bool] = False

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    @abstractmethod
    def encode(self, bits: Bits) -> tuple[list[Buffer], np.ndarray[Any, Any] | None]:
        """Buffers whose concatenation is the chunk's payload, and its scales. May alias ``bits``."""

    def encode_chunks(self, bits: Bits, chunk_rows: int) -> Chunks:
        """What :meth:`encode` makes of every ``chunk_rows`` rows of ``bits``; to be overridden where it is quicker done together."""
        buffers: list[Buffer] = []
        sizes, scales = [], []
        for start in range(0, len(bits), chunk_rows):
            parts, of_rows = self.encode(bits[start : start + chunk_rows])
            buffers += parts
            sizes.append(sum(memoryview(part).nbytes for part in parts))
            if of_rows is not None:
                scales.append(of_rows)
        payload = memoryview(buffers[0]).cast("B") if len(buffers) == 1 else b"".join(buffers)
        return Chunks(payload, sizes, scales)

    @abstractmethod
    def decode(self, payload: memoryview, scales: np.ndarray[Any, Any] | None, out: Bits) -> None:
        """Fill ``out`` [rows, hidden]. Raises CorruptError when the payload cannot be of that shape."""

    @abstractmethod
    def tensor(self, rows: int, hidden: int, payload_bytes: int) -> tuple[str, list[int]]:
        """safetensors dtype and shape of a tap's whole payload."""


class Raw(Codec):
    """The states as they are: any safetensors reader sees [rows, hidden] in the right dtype."""

    name = "raw"
    lossless = True

    def encode(self, bits: Bits) -> tuple[list[Buffer], None]:
        return [bits.data], None

    def encode_chunks(self, bits: Bits, chunk_rows: int) -> Chunks:
        rows = (min(chunk_rows, len(bits) - start) for start in range(0, len(bits), chunk_rows))
        return Chunks(bits.reshape(-1).view(np.uint8).data, [count * bits.strides[0] for count in rows], [])

    def decode(self, payload: memoryview, scales: np.ndarray[Any, Any] | None, out: Bits) -> None:
        _require_size(len(payload), out.nbytes)
        np.copyto(out, np.frombuffer(payload, out.dtype).reshape(out.shape))

    def tensor(self, rows: int, hidden: int, payload_bytes: int) -> tuple[str, list[int]]:
        return SAFETENSORS_DTYPES[self.dtype], [rows, hidden]


class _PlaneTools(threading.local):
    """One thread's zstd contexts and scratch memory; a zstd context must not be used by two threads at once."""

    def __init__(self) -> None:
        # Level 1 with a 64-entry hash and 7-byte matches gives up on matches almost at once and leaves the entropy coder:
        # on exponents there is nothing to match, and this is 2-3 times the speed of plain level 1 at the same size.
        params = zstandard.ZstdCompressionParameters.from_level(
            1, hash_log=6, min_match=7, write_checksum=False
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=params)
        self.decompressor = zstandard.ZstdDecompressor()
        self.low = np.empty(0, np.uint8)
        self.high = np.empty(0, np.uint8)

    def split(self, bits: Bits) -> tuple[memoryview, memoryview]:
        """The low bytes and the high bytes of ``bits``, until the next call."""
        flat = bits.reshape(-1)
        if len(self.low) < len(flat):
            self.low, self.high = np.empty(len(flat), np.uint8), np.empty(len(flat), np.uint8)
        low, high = self.low[: len(flat)], self.high[: len(flat)]
        # Contiguous casts, which run several times faster than strided copies.
        np.copyto(low, flat, casting="unsafe")
        np.right_shift(flat, 8, out=high, casting="unsafe")
        return low.data, high.data

    def compress(self, planes: list[Any]) -> list[Buffer]:
        """A frame of each; in one call where zstandard was built with it."""
        if len(planes) > 1 and "multi_compress_to_buffer" in zstandard.backend_features:
            frames: Any = self.compressor.multi_compress_to_buffer(planes, threads=1)
            return [memoryview(frames[index]) for index in range(len(frames))]
        return [self.compressor.compress(plane) for plane in planes]


class Planes(Codec):
    """Lossless, for 16-bit floats: the plane of low bytes as it is, then the plane of high bytes as one zstd frame.

    The high byte holds the sign and the upper exponent bits, which cluster; the low byte is noise that no coder shrinks.
    """

    name = "bf16-planes"
    lossless = True

    def __init__(self, dtype: str) -> None:
        if dtype == "float32":
            raise ConfigError(
                "codec bf16-planes is for bfloat16 and float16 states; use raw or fp8 for float32"
            )
        super().__init__(dtype)
        self._tools = _PlaneTools()

    def encode(self, bits: Bits) -> tuple[list[Buffer], None]:
        low, high = self._tools.split(bits)
        return [low.tobytes(), *self._tools.compress([high])], None

    def encode_chunks(self, bits: Bits, chunk_rows: int) -> Chunks:
        low, high = self._tools.split(bits)
        step = chunk_rows * bits.shape[1]
        starts = range(0, len(low), step)
        frames = self._tools.compress([high[start : start + step] for start in starts])
        sizes = [
            min(step, len(low) - start) + memoryview(frame).nbytes
            for start, frame in zip(starts, frames, strict=True)
        ]
        payload, at = shared_pool().lend(sum(sizes)).data, 0
        for start, frame, size in zip(starts, frames, sizes, strict=True):
            # By memoryview, which keeps the GIL: a copy as short as this is done before another thread would have woken.
            middle = at + size - memoryview(frame).nbytes
            payload[at:middle] = low[start : start + step]
            payload[middle : at + size] = frame
            at += size
        return Chunks(payload, sizes, [])

    def decode(self, payload: memoryview, scales: np.ndarray[Any, Any] | None, out: Bits) -> None:
        size = out.size
        try:
            high = self._tools.decompressor.decompress(payload[size:])
        except zstandard.ZstdError as exc:
            raise CorruptError(f"its zstd frame does not decode ({exc})") from exc
        _require_size(len(high), size)
        flat = out.reshape(-1)
        np.left_shift(np.frombuffer(high, np.uint8), np.uint16(8), out=flat)
        np.bitwise_or(flat, np.frombuffer(payload[:size], np.uint8), out=flat)

    def tensor(self, rows: int, hidden: int, payload_bytes: int) -> tuple[str, list[int]]:
        return "U8", [payload_bytes]


# NaN and infinities, which the door lets in when it is told to, are no news.
_QUIET = functools.partial(np.errstate, invalid="ignore", over="ignore")


class _Fp8Tools(threading.local):
    """One thread's scratch memory."""

    def __init__(self) -> None:
        self.first, self.second = np.empty(0, np.uint32), np.empty(0, np.uint32)

    def blocks(self, rows: int, hidden: int) -> tuple[int, Bits, Bits]:
        """Rows of a block that stays in cache, and two arrays uint32 of that shape."""
        step = min(rows, max(1, FP8_BLOCK // hidden))
        size = step * hidden
        if len(self.first) < size:
            self.first, self.second = np.empty(size, np.uint32), np.empty(size, np.uint32)
        return step, self.first[:size].reshape(step, hidden), self.second[:size].reshape(step, hidden)


class Fp8(Codec):
    """Lossy: e4m3 with one float32 scale a row, so that the row's largest value becomes 448, the largest e4m3.

    In numpy and not in torch: torch would divide each conversion among threads of its own, a set for each of ours, and sixteen
    cores wrote no faster than two.
    """

    name = "fp8"
    lossless = False
    has_scales = True

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self._tools = _Fp8Tools()
        # The code of every 16 upper bits of a float32, of which the last is set when any lower bit is: with that, rounding
        # twice gives what rounding once does.
        upper = floats_of(np.arange(1 << 16, dtype=np.uint16), "bfloat16").copy()
        inside = torch.from_numpy(upper).clamp(-TOP_FP8, TOP_FP8)
        self._codes = inside.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def encode(self, bits: Bits) -> tuple[list[Buffer], np.ndarray[Any, Any]]:
        with _QUIET():
            codes, scales = self._round(bits)
        return [codes.reshape(-1).data], scales

    def encode_chunks(self, bits: Bits, chunk_rows: int) -> Chunks:
        with _QUIET():
            codes, scales = self._round(bits)
        parts = [scales[start : start + chunk_rows] for start in range(0, len(bits), chunk_rows)]
        return Chunks(codes.reshape(-1).data, [len(part) * bits.shape[1] for part in parts], parts)

    def _round(self, bits: Bits) -> tuple[Bits, np.ndarray[Any, Any]]:
        """Codes uint8 [rows, hidden] and scales float32 [rows]."""
        scales = floats_of(magnitudes(bits, self.dtype), self.dtype) / np.float32(TOP_FP8)
        # a row of zeros, or of values so small that the division underflows, is stored with scale 1
        scales = np.where(scales > 0, scales, np.float32(1))
        inverse = (np.float32(1) / scales)[:, None]
        codes = np.empty(bits.shape, np.uint8)
        if not codes.size:
            return codes, scales
        step, first, second = self._tools.blocks(*bits.shape)
        for start in range(0, len(bits), step):
            block = bits[start : start + step]
            upper, lower = first[: len(block)], second[: len(block)]
            values = floats_of(block, self.dtype, upper.view(np.float32))
            np.multiply(values, inverse[start : start + step], out=values)
            np.bitwise_and(upper, 0xFFFF, out=lower)
            np.add(lower, 0xFFFF, out=lower)  # carries into bit 16 when any lower bit is set
            np.bitwise_or(upper, lower, out=upper)
            np.right_shift(upper, 16, out=upper)
            np.take(self._codes, upper, out=codes[start : start + step], mode="clip")
        return codes, scales

    def decode(self, payload: memoryview, scales: np.ndarray[Any, Any] | None, out: Bits) -> None:
        _require_size(len(payload), out.size)
        if scales is None:
            raise CorruptError("its scales are missing")
        if not out.size:
            return
        codes = np.frombuffer(payload, np.uint8).reshape(out.shape)
        step, first, second = self._tools.blocks(*out.shape)
        with _QUIET():
            for start in range(0, len(out), step):
                part = codes[start : start + step]
                values = _e4m3_values(part, first[: len(part)], second[: len(part)])
                np.multiply(values, scales[start : start + step, None], out=values)
                round_floats(values, self.dtype, out[start : start + step])

    def tensor(self, rows: int, hidden: int, payload_bytes: int) -> tuple[str, list[int]]:
        return "F8_E4M3", [rows, hidden]


def _e4m3_values(codes: Bits, first: Bits, second: Bits) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The values of e4m3 ``codes``, exactly, in ``first`` (uint32, of their shape, as ``second``): exponent and fraction moved to
    where a float32 has them, whose exponents count from 127 where e4m3 counts from 7."""
    np.left_shift(codes, 20, out=first, dtype=np.uint32)
    np.bitwise_and(first, 1 << 27, out=second)
    np.left_shift(second, 4, out=second)
    np.bitwise_and(first, 0x7F << 20, out=first)
    np.bitwise_or(first, second, out=first)
    values: np.ndarray[Any, np.dtype[np.float32]] = first.view(np.float32)
    np.multiply(values, np.float32(2.0**120), out=values)
    # 480 would be next; e4m3 has NaN there. The door lets none in, unless told to.
    if np.abs(values).max() > TOP_FP8:
        values[np.abs(values) > TOP_FP8] = np.nan
    return values


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Raw, Planes, Fp8)}


def codec_class(name: str) -> type[Codec]:
    """The codec called ``name``, ours or an installed package's. Raises ConfigError when there is none of that name."""
    if name in CODECS:
        return CODECS[name]
    codec: type[Codec] = plugins.load(ENTRY_POINT_GROUP, name, Codec, own=tuple(CODECS))
    if codec.name != name:  # the name is written into every shard and must find the class again
        raise ConfigError(f"codec {name!r} calls itself {codec.name!r}; its entry point must have that name")
    return codec


def open_codec(name: str, dtype: str) -> Codec:
    """The codec called ``name`` for states of ``dtype``. Raises ConfigError for an unknown name or an unfit dtype."""
    return codec_class(name)(dtype)


def default_codec(dtype: str) -> str:
    """The codec a new store gets when none is asked for: lossless, and smaller where that is possible."""
    return Raw.name if dtype == "float32" else Planes.name


def chunk_rows(hidden: int) -> int:
    """Rows of a chunk: as many as make one plane of ``PLANE_BYTES``, at least one."""
    return max(1, PLANE_BYTES // hidden)


def _require_size(got: int, wanted: int) -> None:
    if got != wanted:
        raise CorruptError(f"it decodes to {got} bytes where {wanted} belong")
