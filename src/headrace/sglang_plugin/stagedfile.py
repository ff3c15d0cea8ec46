"""The file a capture is staged in: a plain safetensors file, written in pieces in any order, sealed at the end.

    header     4096 bytes: length, JSON, spaces
    ids        int64 [rows]                 the ids the engine fed to the model
    states     dtype [taps, rows, hidden]   planar: one tap after the other
    segments   uint64 [segments, 2 + taps]  first row, row after the last, then the xxh3-64 of those rows of each tap

Everything but the segment table has a place known from the start, so writers need no order among themselves. The **seal**
is the xxh3-64 of header, ids and segment table: with the digests inside the table it covers every byte of the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

HEADER_BYTES = 4096
_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class StagedFileError(ValueError):
    """A staged file is not what its seal and its header say."""


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a staged file."""

    taps: int
    rows: int
    hidden: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one tap."""
        return self.hidden * _ITEM_BYTES[self.dtype]

    @property
    def ids_bytes(self) -> int:
        return 8 * self.rows

    @property
    def states_bytes(self) -> int:
        return self.taps * self.rows * self.row_bytes

    @property
    def body_bytes(self) -> int:
        """Bytes before the segment table."""
        return HEADER_BYTES + self.ids_bytes + self.states_bytes

    def ids_offset(self, row: int) -> int:
        """Where the id of ``row`` lies."""
        return HEADER_BYTES + 8 * row

    def states_offset(self, tap: int, row: int) -> int:
        """Where the state of ``row`` of tap number ``tap`` begins."""
        return HEADER_BYTES + self.ids_bytes + (tap * self.rows + row) * self.row_bytes

    def header(self, segments: int, metadata: dict[str, str]) -> bytes:
        """The first 4096 bytes. Raises ValueError when the metadata does not fit."""
        ids, states = self.ids_bytes, self.states_bytes
        table = segments * (2 + self.taps) * 8
        fields: dict[str, Any] = {
            "__metadata__": metadata,
            "ids": {"dtype": "I64", "shape": [self.rows], "data_offsets": [0, ids]},
            "states": {
                "dtype": _CODES[self.dtype],
                "shape": [self.taps, self.rows, self.hidden],
                "data_offsets": [ids, ids + states],
            },
            "segments": {
                "dtype": "U64",
                "shape": [segments, 2 + self.taps],
                "data_offsets": [ids + states, ids + states + table],
            },
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        if len(text) > HEADER_BYTES - 8:
            raise ValueError(
                f"the header of a staged file takes {len(text)} bytes, {HEADER_BYTES - 8} are reserved"
            )
        return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def seal(header: bytes, ids: bytes | memoryview, table: bytes | memoryview) -> str:
    """16 hex digits over everything but the states; the table holds their digests."""
    digest = xxhash.xxh3_64(header)
    digest.update(ids)
    digest.update(table)
    return digest.hexdigest()


@dataclass(frozen=True)
class StagedFile:
    """A staged file in memory, every checksum verified."""

    layout: Layout
    metadata: dict[str, str]
    ids: np.ndarray
    """int64 [rows]"""
    states: np.ndarray
    """uint8, the bytes of [taps, rows, hidden]; owned by nobody else"""


def fresh_memory(size: int) -> np.ndarray:
    """uint8 [size] that nobody has used."""
    return np.empty(size, np.uint8)


def read_staged(
    path: Path, expected_seal: str, expected_size: int, memory: Callable[[int], np.ndarray] = fresh_memory
) -> StagedFile:
    """Read a staged file whole into ``memory`` (a function from a size to uint8 [size]) and verify it.

    Raises StagedFileError saying what disagrees, FileNotFoundError when it is gone.
    """
    content = _read(path, expected_size, memory)
    header = content[:HEADER_BYTES].tobytes()
    try:
        fields = json.loads(header[8:])
        taps, rows, hidden = fields["states"]["shape"]
        dtype = {code: name for name, code in _CODES.items()}[fields["states"]["dtype"]]
        layout = Layout(taps, rows, hidden, dtype)
        metadata = dict(fields["__metadata__"])
        segments = fields["segments"]["shape"][0]
        canonical = layout.header(segments, metadata) == header
    except (ValueError, KeyError, TypeError) as exc:
        raise StagedFileError(f"{path.name} has no readable header ({type(exc).__name__}: {exc})") from exc
    if not canonical or layout.body_bytes + segments * (2 + taps) * 8 != expected_size:
        raise StagedFileError(f"{path.name}: the header does not describe the file")
    ids = content[HEADER_BYTES : HEADER_BYTES + layout.ids_bytes]
    states = content[HEADER_BYTES + layout.ids_bytes : layout.body_bytes]
    table = content[layout.body_bytes :]
    if seal(header, ids.data, table.data) != expected_seal:
        raise StagedFileError(f"{path.name}: its seal is not the one the server announced")
    _check_segments(path.name, layout, states, table.tobytes())
    return StagedFile(layout, metadata, np.frombuffer(ids.tobytes(), "<i8"), states)


def _read(path: Path, size: int, memory: Callable[[int], np.ndarray]) -> np.ndarray:
    """The file's bytes. Raises StagedFileError unless there are ``size`` of them."""
    with open(path, "rb", buffering=0) as file:
        there = os.fstat(file.fileno()).st_size
        if there != size:
            raise StagedFileError(f"{path.name} has {there} bytes, the server announced {size}")
        content = memory(size)
        at = 0
        while at < size:
            got = file.readinto(content[at:].data)
            if not got:
                raise StagedFileError(f"{path.name} ends after {at} of {size} bytes")
            at += got
    return content


def _check_segments(name: str, layout: Layout, states: np.ndarray, table: bytes) -> None:
    """Every row covered once, every digest right."""
    rows = np.frombuffer(table, "<u8").reshape(-1, 2 + layout.taps)
    end, size = 0, layout.row_bytes
    for start, stop, *digests in (tuple(int(x) for x in row) for row in rows):
        if start != end or stop <= start:
            raise StagedFileError(f"{name}: rows {end} to {start} are in no segment or in two")
        end = stop
        for tap, digest in enumerate(digests):
            at = (tap * layout.rows + start) * size
            part = states[at : at + (stop - start) * size]
            if xxhash.xxh3_64_intdigest(part.data) != digest:
                raise StagedFileError(
                    f"{name}: rows {start} to {stop} of tap number {tap} fail their checksum"
                )
    if end != layout.rows:
        raise StagedFileError(f"{name}: {end} of {layout.rows} rows are covered")
