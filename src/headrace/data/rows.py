"""The row folder: token ids and loss masks on disk, what every later stage reads.

    rows/
      manifest.json        kind, format, fingerprints of tokenizer and template, policies, counts, one entry a split
      train.parquet        key, input_ids, loss_mask, tokens, supervised, source, line, conversation, turns, ...
      validation.parquet   the same columns; it is there even when it has no rows
      dropped.parquet      what prepare left out: reason, source, line (written by prepare and merge only)

Plain Parquet, so that any tool can read it. A folder appears whole or not at all; nothing in it holds a clock time, so
equal inputs give equal bytes. Reading streams one row group (about a million tokens) at a time.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from headrace._version import __version__
from headrace.data.folder import (
    file_hash,
    refuse_foreign_folder,
    remove_dead_leftovers,
    replace_folder,
    seal_file,
    translate_full,
    work_folder,
)
from headrace.data.tables import SCHEMA, Facts, rows_to_table, table_to_rows
from headrace.demo import cache_root
from headrace.errors import CorruptError, InputError
from headrace.files import FULL_ERRNOS, read_json, write_json
from headrace.remote import fetch_folder, is_url, tidy
from headrace.types import Row, row_key

__all__ = ["FORMAT", "KIND", "SPLITS", "Facts", "RowFolder", "RowWriter"]

KIND = "headrace.rows"
FORMAT = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
GROUP_TOKENS = 1 << 20  # a row group is closed at this many tokens: 4 MiB of ids
GROUP_ROWS = 8192


class RowWriter:
    """Writes a row folder at ``path``; it appears when the ``with`` block ends well, and not at all otherwise.

    ``manifest`` is merged into ``manifest.json`` (fingerprints, policies, counts). An existing row folder at ``path``
    is replaced in one step at the end; anything else there is refused with UsageError. Rows must be unique by key:
    :meth:`add` raises ValueError for a second one.
    """

    def __init__(self, path: Path | str, manifest: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.manifest: dict[str, Any] = dict(manifest or {})
        refuse_foreign_folder(self.path, KIND)
        self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
        remove_dead_leftovers(self.path)
        self.folder = work_folder(self.path)
        self._splits: dict[str, _SplitWriter] = {}
        self._keys: set[str] = set()

    def __enter__(self) -> Self:
        self.folder.mkdir()
        try:
            self._splits = {name: _SplitWriter(self.folder / f"{name}.parquet") for name in SPLITS}
        except OSError as exc:
            self._discard()
            raise translate_full(exc, self.path) from exc
        return self

    def add(self, row: Row, split: str = "train", facts: Facts | None = None) -> None:
        """Append one row. Raises ValueError for an unknown split, a repeated key, or a key that is not the row's hash."""
        if row.key in self._keys:
            raise ValueError(f"row {row.key} was added before; keys are unique within a folder")
        if row.key != row_key(row.ids, row.mask):
            raise ValueError(f"row {row.key} does not hash to its key; build rows with Row.make")
        self._keys.add(row.key)
        self.split(split).add(row, facts or Facts())

    def add_table(self, table: pa.Table, split: str) -> None:
        """Append many rows in the columns of ``SCHEMA``; the caller answers for unique and true keys."""
        self.split(split).add_table(table)

    def split(self, name: str) -> _SplitWriter:
        """The writer of one split. Raises ValueError for a name that is not a split."""
        if name not in self._splits:
            raise ValueError(f"split {name!r} is not one of {list(SPLITS)}, or the writer is not open")
        return self._splits[name]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._discard()
            if isinstance(error, OSError) and error.errno in FULL_ERRNOS:
                raise translate_full(error, self.path) from error
            return
        try:
            self._commit()
        except BaseException as exc:
            self._discard()
            if isinstance(exc, OSError):
                raise translate_full(exc, self.path) from exc
            raise

    def _commit(self) -> None:
        entries = {name: split.close() for name, split in self._splits.items()}
        digest = xxhash.xxh3_128()
        for name, split in self._splits.items():
            digest.update(f"{name}:{split.key_sum:032x}".encode())
        write_json(
            self.folder / "manifest.json",
            {
                "kind": KIND,
                "format": FORMAT,
                "version": __version__,
                "rows": sum(e["rows"] for e in entries.values()),
                "tokens": sum(e["tokens"] for e in entries.values()),
                "supervised": sum(e["supervised"] for e in entries.values()),
                "content_hash": digest.hexdigest(),
                "splits": entries,
                **self.manifest,
            },
        )
        replace_folder(self.folder, self.path)

    def _discard(self) -> None:
        for split in self._splits.values():
            split.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)


class _SplitWriter:
    """One Parquet file, written a row group at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = self.tokens = self.supervised = self.key_sum = 0
        self._pending: list[pa.Table] = []
        self._loose: list[tuple[Row, Facts]] = []
        self._pending_tokens = self._pending_rows = 0
        self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1)

    def add(self, row: Row, facts: Facts) -> None:
        self._loose.append((row, facts))
        self._count(1, len(row), row.supervised, int(row.key, 16))

    def add_table(self, table: pa.Table) -> None:
        self._gather_loose()
        table = table.select(SCHEMA.names).cast(SCHEMA)
        self._pending.append(table)
        key_sum = sum(int(key, 16) for key in table["key"].to_pylist())
        tokens, supervised = (int(table[c].to_numpy().sum(dtype=np.int64)) for c in ("tokens", "supervised"))
        self._count(table.num_rows, tokens, supervised, key_sum)

    def _count(self, rows: int, tokens: int, supervised: int, key_sum: int) -> None:
        self.rows += rows
        self.tokens += tokens
        self.supervised += supervised
        self.key_sum = (self.key_sum + key_sum) % (1 << 128)
        self._pending_rows += rows
        self._pending_tokens += tokens
        if self._pending_tokens >= GROUP_TOKENS or self._pending_rows >= GROUP_ROWS:
            self._flush()

    def _gather_loose(self) -> None:
        if self._loose:
            self._pending.append(rows_to_table([r for r, _ in self._loose], [f for _, f in self._loose]))
            self._loose = []

    def _flush(self, last: bool = False) -> None:
        """Write full row groups; the rest waits, so that groups do not depend on the portions rows came in."""
        self._gather_loose()
        table = pa.concat_tables(self._pending or [SCHEMA.empty_table()]).combine_chunks()
        done = 0
        for start, stop, full in _group_bounds(table["tokens"].to_numpy()):
            if full or last:
                self._file.write_table(table.slice(start, stop - start), row_group_size=stop - start)
                done = stop
        rest = table.slice(done)
        self._pending = [rest] if rest.num_rows else []
        self._pending_rows = rest.num_rows
        self._pending_tokens = int(rest["tokens"].to_numpy().sum())

    def close(self) -> dict[str, Any]:
        """Finish the file, make it durable, and describe it."""
        self._flush(last=True)
        self._file.close()
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised": self.supervised,
            **seal_file(self.path),
        }

    def abandon(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._file.close()


def _group_bounds(tokens: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Cut rows of these lengths into row groups of about GROUP_TOKENS tokens: (start, stop, whether it is full)."""
    start = total = 0
    for place, length in enumerate(tokens.tolist()):
        total += length
        if total >= GROUP_TOKENS or place + 1 - start >= GROUP_ROWS:
            yield start, place + 1, True
            start, total = place + 1, 0
    if start < len(tokens):
        yield start, len(tokens), False


class RowFolder:
    """A finished row folder. Open with :meth:`open`; rows stream from disk, nothing is held whole."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._index: _KeyIndex | None = None
        self._group: tuple[tuple[str, int], pa.Table] | None = None

    @classmethod
    def open(cls, path: Path | str) -> RowFolder:
        """Open a folder, or a URL, whose files are copied into the cache once. Raises InputError when it is none of ours,
        CorruptError when a file is missing or was cut, StoreError when a bucket cannot be read."""
        folder = _fetched(path) if is_url(path) else Path(tidy(path))
        if not folder.is_dir():
            raise InputError(f"row folder {folder} does not exist; make it with headrace prepare")
        manifest = read_json(folder / "manifest.json") if (folder / "manifest.json").is_file() else {}
        if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
            raise InputError(
                f"{folder} is not a row folder (no manifest.json of kind {KIND}); make it with headrace prepare"
            )
        if manifest.get("format") != FORMAT:
            raise InputError(
                f"{folder} has row format {manifest.get('format')}, this Headrace reads {FORMAT}; prepare it again"
            )
        for name, entry in manifest["splits"].items():
            file = folder / f"{name}.parquet"
            size = file.stat().st_size if file.is_file() else -1
            if size != entry["bytes"]:
                raise CorruptError(
                    f"{file} has {size} bytes, its manifest says {entry['bytes']}; run headrace prepare again"
                )
        return cls(folder, manifest)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, ``train`` first."""
        return tuple(self.manifest["splits"])

    def __len__(self) -> int:
        return int(self.manifest["rows"])

    def rows(self, split: str | None = None) -> Iterator[Row]:
        """Stream rows in stored order, of one split or of all. Raises CorruptError when a row does not hash to its key."""
        for name in self._names(split):
            with self._open(name) as file:
                for group in range(file.num_row_groups):
                    yield from table_to_rows(
                        file.read_row_group(group, columns=_ROW_COLUMNS), self._file(name)
                    )

    def get(self, key: str) -> Row:
        """The row with this key. Raises KeyError when there is none."""
        if self._index is None:
            self._index = _KeyIndex.build(self)
        place = self._index.find(key)
        if place is None:
            raise KeyError(f"{self.path} has no row {key}")
        split, group, offset = place
        if self._group is None or self._group[0] != (split, group):
            with self._open(split) as file:
                self._group = ((split, group), file.read_row_group(group, columns=_ROW_COLUMNS))
        return next(table_to_rows(self._group[1].slice(offset, 1), self._file(split)))

    def __contains__(self, key: object) -> bool:
        if self._index is None:
            self._index = _KeyIndex.build(self)
        return isinstance(key, str) and self._index.find(key) is not None

    def keys(self, split: str | None = None) -> list[str]:
        """Keys in stored order, of one split or of all."""
        return [key for name in self._names(split) for key in self.column("key", name).to_pylist()]

    def lengths(self, split: str | None = None) -> np.ndarray:
        """int32 [rows]: tokens of each row, in stored order."""
        parts = [self.column("tokens", name).to_numpy() for name in self._names(split)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def column(self, name: str, split: str) -> pa.ChunkedArray:
        """One column of one split, whole."""
        with self._open(split) as file:
            return file.read(columns=[name])[name]

    def check(self) -> list[str]:
        """Read every byte; one sentence for each file whose checksum differs from the manifest's. Empty when sound."""
        wrong = []
        for name, entry in self.manifest["splits"].items():
            if file_hash(self._file(name)) != entry["xxh3"]:
                wrong.append(
                    f"{self._file(name)} does not have the checksum of its manifest; run headrace prepare again"
                )
        return wrong

    def _names(self, split: str | None) -> Sequence[str]:
        if split is not None and split not in self.splits:
            raise KeyError(f"{self.path} has no split {split!r}; there are {list(self.splits)}")
        return self.splits if split is None else (split,)

    def _file(self, split: str) -> Path:
        return self.path / f"{split}.parquet"

    def _open(self, split: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._file(split))
        except (pa.ArrowInvalid, OSError) as exc:
            raise CorruptError(
                f"{self._file(split)} cannot be read ({exc}); run headrace prepare again"
            ) from exc


def _fetched(url: Path | str) -> Path:
    folder = fetch_folder(tidy(url), cache_root() / "rows", last=MANIFEST)
    if folder is None:
        raise InputError(f"there is no row folder at {url}; make it with headrace prepare --mirror")
    return folder


_ROW_COLUMNS = ["key", "input_ids", "loss_mask", "source", "line", "conversation"]


class _KeyIndex:
    """key → (split, row group, place in it): sorted 32-byte keys, about 50 bytes a row."""

    def __init__(self, splits: list[str], keys: np.ndarray, places: np.ndarray) -> None:
        order = np.argsort(keys, kind="stable")
        self._splits, self._keys, self._places = splits, keys[order], places[order]

    @classmethod
    def build(cls, folder: RowFolder) -> _KeyIndex:
        keys: list[np.ndarray] = [np.zeros(0, "S32")]
        places: list[np.ndarray] = [np.zeros((0, 3), np.int64)]
        for number, split in enumerate(folder.splits):
            keys.append(np.array(folder.keys(split), dtype="S32"))
            metadata = folder._open(split).metadata
            for group in range(metadata.num_row_groups):
                count = metadata.row_group(group).num_rows
                places.append(
                    np.stack([np.full(count, number), np.full(count, group), np.arange(count)], axis=1)
                )
        return cls(list(folder.splits), np.concatenate(keys), np.concatenate(places))

    def find(self, key: str) -> tuple[str, int, int] | None:
        wanted = np.bytes_(key.encode("ascii", "replace"))
        place = int(np.searchsorted(self._keys, wanted))
        if place == len(self._keys) or self._keys[place] != wanted:
            return None
        split, group, offset = self._places[place].tolist()
        return self._splits[split], group, offset
