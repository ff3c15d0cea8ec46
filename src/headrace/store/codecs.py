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
from headrace.bits import SAFETENSORS_DTYPES, Bits, floats_of, magnitudes, tensor_of
from headrace.errors import ConfigError, CorruptError
from headrace.memory import shared_pool

PLANE_BYTES = 131_072
"""Bytes of one compressed plane: the size of a zstd block, beyond which bigger frames win nothing."""
TOP_FP8 = 448.0
FP8_BLOCK = 1 << 20
"""States of which the fp8 codec makes its steps, one after the other: as many as are worth giving up the GIL for, though they leave the
fastest cache."""
FP8_PIECE = (1 << 15) - 1
"""States that torch works on alone: from one more on, it would ask other threads to help."""
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
    threads: ClassVar[int] = 8
    """Of one process that encode the more, the more there are."""

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
        # Not tensors: one that is made in inference mode cannot be written to outside of it.
        self.values, self.halves = np.empty(0, np.float32), np.empty(0, np.int16)

    def blocks(self, rows: int, hidden: int) -> _Blocks:
        """How so many rows are taken, with scratch memory for the largest block."""
        piece = max(1, FP8_PIECE // hidden)
        step = min(rows, piece * max(1, FP8_BLOCK // (piece * hidden)))
        if len(self.halves) < step * hidden:
            self.values = np.empty(step * hidden, np.float32)
            self.halves = np.empty(step * hidden, np.int16)
        values, halves = (mine[: step * hidden].reshape(step, hidden) for mine in (self.values, self.halves))
        return _Blocks(piece, range(0, rows, step), torch.from_numpy(values), halves)


class _Blocks(NamedTuple):
    """Rows taken some at a time."""

    piece: int
    """Rows of which torch takes one step."""
    starts: range
    """First rows of the blocks."""
    values: torch.Tensor
    """float32 [rows of a block, hidden]"""
    halves: Bits
    """int16, of the same shape"""


class Fp8(Codec):
    """Lossy: e4m3 with one float32 scale a row, so that the row's largest value becomes 448, the largest e4m3.

    A block of rows is handed to torch as a list of pieces, in one call that does not hold the GIL meanwhile. A piece is smaller
    than what torch divides among threads of its own, which would be a set for each of ours.
    """

    name = "fp8"
    lossless = False
    has_scales = True
    threads = 4

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self._tools = _Fp8Tools()

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
        top = floats_of(magnitudes(bits, self.dtype), self.dtype)
        # The smallest scale is one whose inverse is finite; a row of zeros is stored with scale 1.
        scales = np.maximum(top / np.float32(TOP_FP8), np.finfo(np.float32).tiny)
        scales = np.where(top > 0, scales, np.float32(1))
        inverse = torch.from_numpy((np.float32(1) / scales)[:, None])
        codes = torch.empty(bits.shape, dtype=torch.float8_e4m3fn)
        if not codes.numel():
            return codes.view(torch.uint8).numpy(), scales
        piece, starts, scratch, _ = self._tools.blocks(*bits.shape)
        for start in starts:
            part = slice(start, start + starts.step)
            values = scratch[: len(codes[part])]
            floats_of(bits[part], self.dtype, values.numpy())
            pieces = values.split(piece)
            torch._foreach_mul_(pieces, inverse[part].split(piece))
            if np.isnan(top[part]).any():  # whose scale says nothing about a row's other values
                values.clamp_(-TOP_FP8, TOP_FP8)
            torch._foreach_copy_(codes[part].split(piece), pieces)
        return codes.view(torch.uint8).numpy(), scales

    def decode(self, payload: memoryview, scales: np.ndarray[Any, Any] | None, out: Bits) -> None:
        _require_size(len(payload), out.size)
        if scales is None:
            raise CorruptError("its scales are missing")
        if not out.size:
            return
        codes = np.frombuffer(payload, np.int8).reshape(out.shape)
        factors = torch.from_numpy(scales * np.float32(256))[:, None]
        target = tensor_of(out, self.dtype)
        piece, starts, scratch, halves = self._tools.blocks(*out.shape)
        for start in starts:
            part = slice(start, start + starts.step)
            block = codes[part]
            values = scratch[: len(block)]
            pieces = values.split(piece)
            torch._foreach_copy_(pieces, _e4m3_halves(block, halves[: len(block)]).split(piece))
            torch._foreach_mul_(pieces, factors[part].split(piece))
            if block.max() == 0x7F or block.view(np.uint8).max() == 0xFF:
                values.numpy()[block & 0x7F == 0x7F] = np.nan  # the door lets it in only when it is told to
            torch._foreach_copy_(target[part].split(piece), pieces)

    def tensor(self, rows: int, hidden: int, payload_bytes: int) -> tuple[str, list[int]]:
        return "F8_E4M3", [rows, hidden]


def _e4m3_halves(codes: Bits, out: Bits) -> torch.Tensor:
    """float16 tensor in ``out`` (int16): the values of e4m3 ``codes`` (int8), divided by 256, but 1.875 in place of NaN.

    Exponent and fraction are moved to where a float16 has them, whose exponents count from 15 where e4m3 counts from 7.
    """
    np.left_shift(codes, 7, out=out, dtype=np.int16)
    np.bitwise_and(out, ~0x4000, out=out)  # the sign came twice
    return torch.from_numpy(out).view(torch.float16)


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
