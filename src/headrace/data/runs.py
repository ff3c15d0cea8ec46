"""The external shuffle: rows are written once as sorted runs, then merged; memory does not grow with the data.

Every row has a 64-bit place in the shuffle, a hash of its key and the seed. Converted chunks gather in memory until they
hold RUN_TOKENS tokens (or a minute has passed); sorted by place they become one *run*, a Parquet file sealed by a small
JSON beside it that says how far in the input it reaches. A killed preparation goes on behind the last sealed run. The
merge walks the 64-bit range in windows and takes from each run the rows of the window. Input that fits into one run is
never written twice.

Memory: about three runs' worth (0.2 GB) and a row group (a quarter MB) for each run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.data.convert import DROPPED_SCHEMA, ORDER, PART, SOURCE, WORK_SCHEMA, Converted
from headrace.errors import CorruptError
from headrace.files import read_json, write_json

RUN_TOKENS = 1 << 24
RUN_SECONDS = 60.0
RUN_DROPS = 1 << 20
WINDOW_TOKENS = 1 << 22
_GROUP_TOKENS = 1 << 16
_SPAN = 1 << 64
_SORT = [(name, "ascending") for name in (ORDER, "key", SOURCE, "line", PART)]


@dataclass
class Tally:
    """Counts of everything converted so far; plain JSON in a sealed run."""

    records: int = 0
    kept: int = 0
    made: int = 0
    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, part: Converted) -> None:
        """Count one converted chunk."""
        self.records += part.records
        self.kept += part.kept
        self.made += part.made
        self.tokens += int(pc.sum(part.rows["tokens"]).as_py() or 0)
        self.counts += part.counts
        self.notes += part.notes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **vars(self),
            "counts": dict(sorted(self.counts.items())),
            "notes": dict(sorted(self.notes.items())),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tally:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**data, "counts": Counter(data["counts"]), "notes": Counter(data["notes"])})


class Runs:
    """Runs in a folder. ``key`` names what they are made of: runs of another key are removed."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.tally = Tally()
        self.position = (0, 0)
        """Source index and record number (from 0) at which reading goes on."""
        self._sealed: list[Path] = []
        self._open: list[Converted] = []
        self._open_tokens = self._open_drops = 0
        self._opened = time.monotonic()
        self._find_sealed()

    def _find_sealed(self) -> None:
        for marker in sorted(self.folder.glob("run-*.json")):
            entry = read_json(marker)
            files = {self.folder / name: size for name, size in entry["files"].items()}
            sound = all(file.is_file() and file.stat().st_size == size for file, size in files.items())
            if entry["key"] != self.key or not sound or marker.stem != f"run-{len(self._sealed):06d}":
                break
            self._sealed.append(marker.with_suffix(".parquet"))
            self.tally = Tally.from_dict(entry["tally"])
            self.position = (entry["position"][0], entry["position"][1])
        wanted = {p.stem.partition(".")[0] for p in self._sealed}
        for file in self.folder.glob("run-*"):
            if file.name.partition(".")[0] not in wanted:
                file.unlink()

    def add(self, part: Converted, position: tuple[int, int]) -> None:
        """Take the next chunk's result, in input order; ``position`` is where reading goes on behind it."""
        self.tally.add(part)
        self._open.append(part)
        self._open_tokens += int(pc.sum(part.rows["tokens"]).as_py() or 0)
        self._open_drops += part.dropped.num_rows
        self.position = position
        full = self._open_tokens >= RUN_TOKENS or self._open_drops >= RUN_DROPS
        if full or time.monotonic() - self._opened > RUN_SECONDS:
            self._seal()

    def _seal(self) -> None:
        table = self._open_rows()
        rows_file = self.folder / f"run-{len(self._sealed):06d}.parquet"
        dropped_file = rows_file.with_suffix(".dropped.parquet")
        with pq.ParquetWriter(rows_file, WORK_SCHEMA, compression="zstd", compression_level=1) as writer:
            for start, stop in _bounds(table["tokens"].to_numpy(), _GROUP_TOKENS):
                writer.write_table(table.slice(start, stop - start))
        pq.write_table(self._open_dropped(), dropped_file, compression="zstd")
        write_json(
            rows_file.with_suffix(".json"),
            {
                "key": self.key,
                "files": {f.name: f.stat().st_size for f in (rows_file, dropped_file)},
                "position": list(self.position),
                "tally": self.tally.to_dict(),
            },
        )
        self._sealed.append(rows_file)
        self._open, self._open_tokens, self._open_drops = [], 0, 0
        self._opened = time.monotonic()

    def _open_rows(self) -> pa.Table:
        """The rows in memory, in shuffled order."""
        rows = pa.concat_tables([p.rows for p in self._open] or [WORK_SCHEMA.empty_table()])
        return rows.take(pc.sort_indices(rows, sort_keys=_SORT))

    def _open_dropped(self) -> pa.Table:
        """What was left out since the last sealed run, in input order."""
        return pa.concat_tables([p.dropped for p in self._open] or [DROPPED_SCHEMA.empty_table()])

    # --- the merge --------------------------------------------------------------------------------------------

    def dropped(self) -> Iterator[pa.Table]:
        """What was left out so far, in input order."""
        for file in self._sealed:
            yield pq.read_table(file.with_suffix(".dropped.parquet"), schema=DROPPED_SCHEMA)
        yield self._open_dropped()

    def numbers(self, name: str) -> np.ndarray:
        """One numeric column of all rows, in no order that means anything."""
        parts = [pq.read_table(file, columns=[name])[name].to_numpy() for file in self._sealed]
        parts += [p.rows[name].to_numpy() for p in self._open]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def merged(self) -> Iterator[pa.Table]:
        """All rows in the order of the shuffle, window by window; equal keys lie side by side in one window."""
        readers: list[_RunReader] = [_FileRun(file) for file in self._sealed]
        readers.append(_RunReader(iter([self._open_rows()])))
        self._open = []
        windows = max(1, -(-self.tally.tokens // WINDOW_TOKENS))
        for window in range(1, windows + 1):
            bound = _SPAN * window // windows
            parts = [part for reader in readers for part in reader.below(bound)]
            if len(parts) == 1:  # a portion of one run is in order
                yield parts[0]
            elif parts:
                table = pa.concat_tables(parts).combine_chunks()
                yield table.take(pc.sort_indices(table, sort_keys=_SORT))


class _RunReader:
    """Reads one run from its beginning, in portions below a growing bound."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def below(self, bound: int) -> Iterator[pa.Table]:
        """The rows not yet given whose place in the shuffle is below ``bound``."""
        while True:
            if self._rest is None:
                self._rest = next(self._tables, None)
            if self._rest is None:
                return
            places = self._rest[ORDER].to_numpy()
            count = len(places) if bound >= _SPAN else int(np.searchsorted(places, np.uint64(bound)))
            if count:
                yield self._rest.slice(0, count)
            if count < len(places):
                self._rest = self._rest.slice(count)
                return
            self._rest = None


class _FileRun(_RunReader):
    """A run on disk, one row group in memory."""

    def __init__(self, file: Path) -> None:
        super().__init__(self._groups(file))

    @staticmethod
    def _groups(file: Path) -> Iterator[pa.Table]:
        try:
            with pq.ParquetFile(file) as parquet:
                for group in range(parquet.num_row_groups):
                    yield parquet.read_row_group(group).cast(WORK_SCHEMA)
        except pa.ArrowInvalid as exc:
            raise CorruptError(
                f"{file} cannot be read ({exc}); delete its folder and run headrace prepare again"
            ) from exc


def _bounds(tokens: Sequence[int] | np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Cut rows of these lengths into groups of about ``most`` tokens."""
    start = total = 0
    for place, length in enumerate(np.asarray(tokens).tolist()):
        total += length
        if total >= most:
            yield start, place + 1
            start, total = place + 1, 0
    if start < len(tokens):
        yield start, len(tokens)
