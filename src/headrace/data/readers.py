"""Bytes on disk → records, a small chunk at a time: JSON lines, JSON, Parquet, plain or compressed.

Nothing is parsed here beyond what finding the borders of records takes; a chunk goes to a worker as it is. Whatever is
wrong with a file (cut archive, broken JSON array, foreign bytes) raises InputError with the file and the line reached.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headrace.errors import InputError

CHUNK_RECORDS = 256
CHUNK_BYTES = 1 << 20
_BLOCK = 1 << 20
_LONGEST_VALUE = 1 << 28  # a JSON value that does not end within this many characters is taken for broken
_SUFFIXES = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet"}
_PACKED = (".gz", ".zst")


@dataclass(slots=True)
class Chunk:
    """Consecutive records of one source."""

    source: int
    """Index of the source."""
    first: int
    """Number of the first record within the source, counted from 0."""
    lines: list[int] = field(default_factory=list)
    """1-based line (JSON) or record number (Parquet, datasets) of each record."""
    texts: list[bytes] = field(default_factory=list)
    """Raw JSON of each record; empty when ``arrow`` is set."""
    arrow: Any = None
    """pyarrow.Table of the records."""
    position: int = 0
    """Bytes of the file read so far, for progress."""

    def __len__(self) -> int:
        return len(self.lines)

    def part(self, start: int, stop: int) -> Chunk:
        """Records ``start`` to ``stop`` of the chunk, itself when that is all of them."""
        start, stop = min(max(0, start), len(self)), min(stop, len(self))
        if (start, stop) == (0, len(self)):
            return self
        arrow = None if self.arrow is None else self.arrow.slice(start, max(0, stop - start))
        return Chunk(
            self.source,
            self.first + start,
            self.lines[start:stop],
            self.texts[start:stop],
            arrow,
            self.position,
        )


def file_kind(path: Path) -> str | None:
    """``lines``, ``json`` or ``parquet`` by the file's name; None for a name that is none of these."""
    name = path.name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return _SUFFIXES.get(Path(name).suffix)


def read_file(path: Path, source: int, name: str) -> Iterator[Chunk]:
    """Chunks of one file. Raises InputError, with ``name`` and the line reached, for a file that cannot be read."""
    kind = file_kind(path)
    try:
        with open(path, "rb", buffering=_BLOCK) as file:
            if kind == "parquet":
                yield from _read_parquet(file, source, name)
            elif kind == "json":
                yield from _in_chunks(_json_values(file, name), source, file.tell)
            else:
                yield from _in_chunks(_lines(file, name), source, file.tell)
    except FileNotFoundError:
        raise InputError(f"{name} does not exist; check the path") from None
    except PermissionError as exc:
        raise InputError(f"{name} cannot be read ({exc.strerror}); change its permissions") from exc


def _in_chunks(records: Iterator[tuple[int, bytes]], source: int, tell: Callable[[], int]) -> Iterator[Chunk]:
    chunk, size = Chunk(source, 0), 0
    for number, (line, text) in enumerate(records, 1):
        chunk.lines.append(line)
        chunk.texts.append(text)
        size += len(text)
        if len(chunk) >= CHUNK_RECORDS or size >= CHUNK_BYTES:
            chunk.position = tell()
            yield chunk
            chunk, size = Chunk(source, number), 0
    if len(chunk):
        chunk.position = tell()
        yield chunk


# --- bytes --------------------------------------------------------------------------------------------------------


class _Zstd(io.RawIOBase):
    """Decompresses zstd frames one after another; a frame cut short is an error, which the library's reader hides."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file = file
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._begun = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._frame.unused_data if self._frame.eof else b""
            block = block or self._file.read(_BLOCK)
            if not block:
                if self._begun and not self._frame.eof:
                    raise EOFError("compressed file ended before its last frame did")
                return 0
            if self._frame.eof:
                self._frame = self._new()
            self._begun = True
            self._ready = self._frame.decompress(block)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """The file's content, decompressed when its name says so."""
    if file.name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), _BLOCK)
    if file.name.endswith(".zst"):
        return io.BufferedReader(_Zstd(file), _BLOCK)
    return file


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Non-blank lines with their numbers; a byte order mark at the start is left out."""
    import zstandard

    number = 0
    try:
        for number, line in enumerate(_unpacked(file), 1):
            text = line.strip()
            if number == 1:
                text = text.removeprefix(codecs.BOM_UTF8)
            if text:
                yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as exc:
        raise InputError(
            f"{name} is cut or corrupt after line {number} ({exc}); fetch the file again"
        ) from exc


def _read_parquet(file: IO[bytes], source: int, name: str) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = 0
    try:
        parquet = pq.ParquetFile(file)
        for batch in parquet.iter_batches(batch_size=CHUNK_RECORDS):
            chunk = arrow_chunk(source, first, pa.Table.from_batches([batch]))
            chunk.position = file.tell()
            yield chunk
            first += batch.num_rows
    except pa.ArrowException as exc:
        raise InputError(
            f"{name} is not a sound Parquet file at record {first + 1} ({exc}); fetch it again"
        ) from exc


def arrow_chunk(source: int, first: int, table: Any) -> Chunk:
    """A chunk over an Arrow table."""
    return Chunk(source, first, list(range(first + 1, first + 1 + table.num_rows)), arrow=table)


# --- JSON values --------------------------------------------------------------------------------------------------


class _JsonText:
    """A window over a JSON file's text that knows the line it is at."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self.name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self.text, self.place, self.line = "", 0, 1
        self._ended = False

    def _more(self) -> bool:
        """Read another block; False at the end of the file."""
        if self._ended:
            return False
        block = self._file.read(_BLOCK)
        self._ended = not block
        try:
            self.text = self.text[self.place :] + self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as exc:
            raise InputError(
                f"{self.name} is not UTF-8 after line {self.line} ({exc.reason}); convert it"
            ) from exc
        self.place = 0
        return not self._ended

    def _move(self, place: int) -> None:
        self.line += self.text.count("\n", self.place, place)
        self.place = place

    def peek(self) -> str:
        """The next character that is not white space, ``""`` at the end."""
        while True:
            rest = self.text[self.place : self.place + 4096].lstrip()
            if rest:
                self._move(self.text.index(rest[0], self.place))
                return rest[0]
            self._move(min(self.place + 4096, len(self.text)))
            if self.place >= len(self.text) and not self._more():
                return ""

    def skip(self) -> None:
        """Pass one character."""
        self._move(self.place + 1)

    def value(self) -> tuple[int, bytes]:
        """The next JSON value as (line, its text)."""
        self.peek()
        line = self.line
        while True:
            try:
                _, end = self._json.raw_decode(self.text, self.place)
                # A number at the edge of the window may go on in the next block; objects and arrays cannot.
                if end < len(self.text) or self.text[end - 1] in "]}" or not self._more():
                    break
            except json.JSONDecodeError as exc:
                where = self.line + self.text.count("\n", self.place, exc.pos)
                if len(self.text) - self.place > _LONGEST_VALUE or not self._more():
                    raise InputError(
                        f"{self.name} line {where}: broken JSON ({exc.msg}); repair the file"
                    ) from exc
        text = self.text[self.place : end]
        self._move(end)
        return line, text.encode("utf-8", "surrogatepass")


def _json_values(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """The records of a .json file: the items of its array, or its values one after another (JSON lines in disguise)."""
    import zstandard

    try:
        text = _JsonText(_unpacked(file), name)
        if text.peek() != "[":
            while text.peek():
                yield text.value()
            return
        text.skip()
        if text.peek() == "]":
            return
        while True:
            yield text.value()
            mark = text.peek()
            if mark not in (",", "]"):
                raise InputError(
                    f"{name} line {text.line}: the array has no ',' or ']' after a record; repair the file"
                )
            text.skip()
            if mark == "]":
                break
        if text.peek():
            raise InputError(f"{name} line {text.line}: more text after the array ends; repair the file")
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as exc:
        raise InputError(f"{name} is cut or corrupt ({exc}); fetch the file again") from exc
