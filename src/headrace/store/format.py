"""The bytes of a shard: values ↔ bytes, no I/O. docs/format.md is the prose, tests/store/test_format.py pins the bytes.

A shard is a plain safetensors file. Its **tables** (ids, masks, offsets, checksums) come first, its **payloads**
(the states, tap by tap) last. Every byte before the first payload is covered by the digest that opens the header, every
payload byte by the checksum of its chunk, and the sizes must add up to the file's: no bit can change unseen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash

from headrace.errors import CorruptError
from headrace.types import CaptureSpec, Tap

FORMAT = "headrace-shard"
VERSION = 1
ALIGNMENT = 64
"""The header's end and the first payload's start are multiples of this."""
MAX_HEADER = 100_000_000
"""Longest header that safetensors readers accept."""
KEY_BYTES = 16
FinalPositions = Literal["all", "supervised"]
Array = np.ndarray[Any, np.dtype[Any]]

_OPENING = b'{"__metadata__":{"digest":"'
_DIGEST_AT = 8 + len(_OPENING)
_DIGEST_CHARS = 16
_NUMPY: dict[str, str] = {"U8": "|u1", "I32": "<i4", "I64": "<i8", "U64": "<u8", "F32": "<f4"}
_NAMES: dict[str, str] = {numpy: name for name, numpy in _NUMPY.items()}


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What a shard says about itself, as JSON in its header."""

    spec: CaptureSpec
    """Its ``taps`` are the taps of this shard."""
    codec: str
    chunk_rows: int
    """Rows of a chunk; only the last chunk of a (capture, tap) is shorter."""
    final_positions: FinalPositions = "all"
    """``supervised``: the final tap is kept only at positions whose next token is supervised."""
    provenance: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, dict[str, float]] = field(default_factory=dict)
    """Per tap: sampled norms, and the measured error of a lossy codec."""

    def to_json(self) -> str:
        value = {
            "format": FORMAT,
            "version": VERSION,
            "spec": self.spec.to_dict(),
            "codec": self.codec,
            "chunk_rows": self.chunk_rows,
            "final_positions": self.final_positions,
            "provenance": self.provenance,
            "stats": self.stats,
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ShardInfo:
        """Raises ValueError for another format or version, KeyError or TypeError for missing fields."""
        value = json.loads(text)
        if value["format"] != FORMAT or value["version"] != VERSION:
            raise ValueError(
                f"format {value['format']!r} version {value['version']!r} is not {FORMAT!r} version {VERSION}"
            )
        return cls(
            spec=CaptureSpec.from_dict(value["spec"]),
            codec=value["codec"],
            chunk_rows=value["chunk_rows"],
            final_positions=value["final_positions"],
            provenance=value["provenance"],
            stats=value["stats"],
        )


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Everything in a shard but the states. n captures; per-tap things are keyed by tap."""

    keys: Array
    """uint8 [n, 16]"""
    offsets: Array
    """int64 [n+1]: tokens of capture i are ``offsets[i]:offsets[i+1]`` of ``ids`` and ``mask``."""
    rows: Array
    """int64 [n+1, taps]: stored rows of capture i at tap t are ``rows[i,t]:rows[i+1,t]`` of that tap."""
    supervised: Array
    """int32 [n]"""
    ids: Array
    """int32 [tokens]"""
    mask: Array
    """uint8, bits little-endian over all tokens of the shard, then zero padding."""
    checksums: dict[Tap, Array]
    """uint64 [chunks]: xxh3_64 of each chunk's payload, captures in order."""
    ends: dict[Tap, Array]
    """int64 [chunks]: end of each chunk inside the tap's payload."""
    scales: dict[Tap, Array] = field(default_factory=dict)
    """float32 [rows], for codecs with scales."""
    parents: Array | None = None
    """uint8 [n, 16]: zeros where a capture has no parent."""
    shared: Array | None = None
    """int32 [n]: how many first tokens take their states from the parent."""

    def named(self) -> list[tuple[str, Array]]:
        """Tensor names and arrays in file order: wide types first, so that each stays aligned without gaps."""
        out = [("offsets", self.offsets), ("rows", self.rows)]
        out += [(f"checksums.{tap}", a) for tap, a in self.checksums.items()]
        out += [(f"ends.{tap}", a) for tap, a in self.ends.items()]
        out += [("supervised", self.supervised)]
        out += [("shared", self.shared)] if self.shared is not None else []
        out += [("ids", self.ids)]
        out += [(f"scales.{tap}", a) for tap, a in self.scales.items()]
        out += [("keys", self.keys)]
        out += [("parents", self.parents)] if self.parents is not None else []
        return [*out, ("mask", self.mask)]


@dataclass(frozen=True, slots=True)
class Payload:
    """Where a tap's payload lies (or will lie) in the file."""

    dtype: str
    """safetensors name"""
    shape: list[int]
    size: int
    """bytes"""


@dataclass(frozen=True)
class Prefix:
    """A shard's parsed beginning: what it says, its tables, and where each tap's payload starts."""

    info: ShardInfo
    tables: Tables
    starts: dict[Tap, int]
    """First byte of each tap's payload in the file."""
    digest: str
    size: int
    """Bytes before the first payload."""
    file_size: int


def pack_mask(mask: Array, before: int) -> Array:
    """Pack bools into little-endian bits, padded so that ``before`` bytes plus the result is a multiple of ALIGNMENT."""
    bits = np.packbits(mask, bitorder="little")
    return np.concatenate([bits, np.zeros(-(before + len(bits)) % ALIGNMENT, np.uint8)])


def unpack_mask(packed: Array, start: int, stop: int) -> Array:
    """bool [stop - start] out of packed bits."""
    first = start // 8
    bits = np.unpackbits(packed[first : (stop + 7) // 8], bitorder="little")
    return bits[start - 8 * first : stop - 8 * first].astype(bool)


def build_prefix(info: ShardInfo, tables: Tables, payloads: dict[Tap, Payload]) -> bytes:
    """Everything before the first payload. ``tables.mask`` must have been packed to keep the alignment."""
    named = tables.named()
    entries: dict[str, Any] = {}
    at = 0
    for name, array in named:
        entries[name] = _entry(_NAMES[array.dtype.str], list(array.shape), at, array.nbytes)
        at += array.nbytes
    for tap, payload in payloads.items():
        entries[f"tap.{tap}"] = _entry(payload.dtype, payload.shape, at, payload.size)
        at += payload.size
    opening = _OPENING + b"0" * _DIGEST_CHARS + b'","headrace":' + json.dumps(info.to_json()).encode() + b"},"
    header = opening + json.dumps(entries, separators=(",", ":")).encode()[1:]
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    prefix = bytearray().join(
        [len(header).to_bytes(8, "little"), header, *(np.ascontiguousarray(a).tobytes() for _, a in named)]
    )
    prefix[_DIGEST_AT : _DIGEST_AT + _DIGEST_CHARS] = xxhash.xxh3_64_hexdigest(prefix).encode()
    return bytes(prefix)


def _entry(dtype: str, shape: list[int], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def header_end(first: bytes, file_size: int, name: str) -> int:
    """Offset of the data section, from a file's first 8 bytes. Raises CorruptError for what cannot be a shard."""
    size = int.from_bytes(first[:8], "little")
    if len(first) < 8 or size > MAX_HEADER or 8 + size > file_size:
        raise CorruptError(
            f"{name} is cut short or no shard: it has {file_size} bytes and announces a header of {size}"
        )
    return 8 + size


def payload_start(header: bytes, file_size: int, name: str) -> int:
    """Offset of the first payload, from the bytes up to :func:`header_end`; also checks the declared size of the file."""
    entries, _ = _parse_header(header, name)
    try:
        end: int = len(header) + max(entry["data_offsets"][1] for entry in entries.values())
        start: int = len(header) + min(
            e["data_offsets"][0] for key, e in entries.items() if key.startswith("tap.")
        )
    except (KeyError, TypeError, IndexError, ValueError) as exc:
        raise CorruptError(f"{name}: its header is damaged ({type(exc).__name__})") from exc
    if end != file_size:
        raise CorruptError(
            f"{name} has {file_size} bytes where its header declares {end}; it was cut or padded"
        )
    if not len(header) <= start <= file_size:
        raise CorruptError(f"{name}: its header is damaged (payload at byte {start})")
    return start


def parse_prefix(data: bytes | memoryview, file_size: int, name: str) -> Prefix:
    """Parse and prove everything before the first payload.

    ``data`` reaches from byte 0 to :func:`payload_start`. Raises CorruptError naming ``name`` for any byte that is not
    as written. The arrays returned are views of ``data``.
    """
    found = bytes(data[_DIGEST_AT : _DIGEST_AT + _DIGEST_CHARS])
    digest = xxhash.xxh3_64(bytes(data[:_DIGEST_AT]))
    digest.update(b"0" * _DIGEST_CHARS)
    digest.update(data[_DIGEST_AT + _DIGEST_CHARS :])
    if digest.hexdigest().encode() != found:
        raise CorruptError(
            f"{name}: its header or tables are damaged (digest {digest.hexdigest()}, expected {found!r})"
        )
    end = header_end(bytes(data[:8]), file_size, name)
    entries, text = _parse_header(bytes(data[:end]), name)
    try:
        info = ShardInfo.from_json(text)
        return _build(info, entries, data, end, file_size, found.decode())
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptError(f"{name} is not a shard this version reads: {exc}") from exc


def _parse_header(header: bytes, name: str) -> tuple[dict[str, Any], str]:
    if not header[8:].startswith(_OPENING):
        raise CorruptError(f"{name} is not a Headrace shard, or its first bytes are damaged")
    try:
        entries = json.loads(header[8:])
        text = entries.pop("__metadata__")["headrace"]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptError(f"{name}: its header is damaged ({type(exc).__name__})") from exc
    return entries, text


def _build(
    info: ShardInfo, entries: dict[str, Any], data: bytes | memoryview, base: int, file_size: int, digest: str
) -> Prefix:
    def array(name: str) -> Array:
        entry = entries[name]
        start, stop = entry["data_offsets"]
        return np.frombuffer(data[base + start : base + stop], _NUMPY[entry["dtype"]]).reshape(entry["shape"])

    taps = info.spec.taps
    tables = Tables(
        keys=array("keys"),
        offsets=array("offsets"),
        rows=array("rows"),
        supervised=array("supervised"),
        ids=array("ids"),
        mask=array("mask"),
        checksums={tap: array(f"checksums.{tap}") for tap in taps},
        ends={tap: array(f"ends.{tap}") for tap in taps},
        scales={tap: array(f"scales.{tap}") for tap in taps if f"scales.{tap}" in entries},
        parents=array("parents") if "parents" in entries else None,
        shared=array("shared") if "shared" in entries else None,
    )
    starts = {tap: base + entries[f"tap.{tap}"]["data_offsets"][0] for tap in taps}
    sizes = {tap: entries[f"tap.{tap}"]["data_offsets"][1] - starts[tap] + base for tap in taps}
    _check_shape(tables, info, sizes)
    return Prefix(info, tables, starts, digest, min(starts.values()), file_size)


def _check_shape(tables: Tables, info: ShardInfo, sizes: dict[Tap, int]) -> None:
    """The tables agree with each other; guards against a wrong writer, not against damage, which the digest catches."""
    n, tokens = len(tables.keys), len(tables.ids)
    if (
        tables.keys.shape != (n, KEY_BYTES)
        or tables.offsets.shape != (n + 1,)
        or tables.rows.shape != (n + 1, len(info.spec.taps))
    ):
        raise ValueError("its tables disagree on the number of captures or taps")
    if (
        int(tables.offsets[0])
        or int(tables.offsets[-1]) != tokens
        or bool((np.diff(tables.offsets) < 1).any())
    ):
        raise ValueError("its token offsets do not cover its ids")
    if len(tables.mask) < (tokens + 7) // 8:
        raise ValueError("its mask is shorter than its ids")
    for index, tap in enumerate(info.spec.taps):
        chunks = -(-np.diff(tables.rows[:, index]) // info.chunk_rows)
        ends = tables.ends[tap]
        if len(ends) != int(chunks.sum()) or len(tables.checksums[tap]) != len(ends):
            raise ValueError(f"the chunk table of tap {tap} does not fit its rows")
        if (int(ends[-1]) if len(ends) else 0) != sizes[tap] or bool((np.diff(ends) < 0).any()):
            raise ValueError(f"the chunks of tap {tap} do not cover its payload")
