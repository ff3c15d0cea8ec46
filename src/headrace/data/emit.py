"""The last filters, in shuffled order: duplicates, near duplicates, outliers, limits; then each row goes to its split."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.data.convert import DROPPED_SCHEMA, HELD_OUT, SKETCH, SOURCE
from headrace.data.folder import seal_file
from headrace.data.hygiene import NearDuplicates, histogram, length_edges, outlier_bounds
from headrace.data.rows import SPLITS, RowWriter
from headrace.data.runs import Runs

_LISTED_OUTLIERS = 20
_NO_LIMIT = np.iinfo(np.int64).max
_DROPPED_GROUP = 1 << 16
_SHARE_EDGES = tuple(i / 10 for i in range(10))


@dataclass(frozen=True)
class EmitOptions:
    """Which of the last filters are on."""

    near_duplicates: float = 0.0
    """Jaccard threshold, 0 = off."""
    drop_outliers: bool = False
    limit: int = 0
    """Rows of all, 0 = no limit."""
    limits: tuple[int, ...] = ()
    """Rows of each group of sources, 0 = no limit."""
    groups: tuple[int, ...] = ()
    """The group of each source."""


class Emitter:
    """Takes merged windows of rows and writes what is kept."""

    def __init__(self, options: EmitOptions, runs: Runs) -> None:
        self.options, self._runs = options, runs
        self.kept = 0
        self.dropped: Counter[tuple[str, str]] = Counter()
        for name, count in runs.tally.counts.items():
            unit, _, reason = name.partition(":")
            if unit in ("record", "row"):
                self.dropped[unit, reason] += count
        self._limits = np.array([limit or _NO_LIMIT for limit in options.limits], dtype=np.int64)
        self._groups = np.array(options.groups, dtype=np.int64)
        self._taken = np.zeros(len(options.limits), dtype=np.int64)
        self._near = NearDuplicates(options.near_duplicates) if options.near_duplicates else None
        tokens = runs.numbers("tokens")
        self._length_bounds = outlier_bounds(np.log(np.maximum(tokens, 1)))
        self._share_bounds = outlier_bounds(runs.numbers("supervised") / np.maximum(tokens, 1))
        self._outliers: list[dict[str, Any]] = []
        self._outlier_count = 0
        self._lengths: list[np.ndarray] = []
        self._shares: list[np.ndarray] = []
        self._supervised = self._exact = 0
        self._example = ""
        self._writer: pq.ParquetWriter | None = None
        self._path = Path()
        self._pending: list[pa.Table] = []

    def open(self, path: Path) -> Self:
        """Begin ``dropped.parquet`` with what was left out before the merge."""
        self._path = path
        self._writer = pq.ParquetWriter(path, DROPPED_SCHEMA, compression="zstd")
        for table in self._runs.dropped():
            self._write_dropped(table)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._write_pending(sum(table.num_rows for table in self._pending))
            self._writer.close()

    def emit(self, table: pa.Table, writer: RowWriter) -> None:
        """Filter one window, sorted, and write what is kept."""
        table = self._without_duplicates(table)
        if self._near is not None:
            table = self._without_near_duplicates(table, self._near)
        table = self._outlying(table)
        table = self._within_limits(table)
        self.kept += table.num_rows
        self._lengths.append(table["tokens"].to_numpy())
        self._shares.append(table["supervised"].to_numpy() / np.maximum(self._lengths[-1], 1))
        self._supervised += int(table["supervised"].to_numpy().sum(dtype=np.int64))
        self._exact += int(table["exact_ids"].to_numpy().sum())
        held_out = table[HELD_OUT].to_numpy()
        for split, chosen in zip(SPLITS, (~held_out, held_out), strict=True):
            if chosen.any():
                writer.add_table(table.filter(pa.array(chosen)), split)

    def _without_duplicates(self, table: pa.Table) -> pa.Table:
        """One row of each key. Held out in any copy means held out: new data never moves a row into training."""
        keys = table["key"].to_numpy()
        if len(keys) < 2:
            return table
        first = np.concatenate([[True], keys[1:] != keys[:-1]])
        if first.all():
            return table
        starts = np.flatnonzero(first)
        held_out = np.logical_or.reduceat(table[HELD_OUT].to_numpy(), starts)
        self._drop(table.filter(pa.array(~first)), "duplicate")
        kept = table.filter(pa.array(first))
        place = kept.schema.get_field_index(HELD_OUT)
        return kept.set_column(place, kept.schema.field(place), pa.array(held_out))

    def _without_near_duplicates(self, table: pa.Table, near: NearDuplicates) -> pa.Table:
        conversations = table["conversation"].to_pylist()
        like = [near.like(c, s) for c, s in zip(conversations, table[SKETCH].to_pylist(), strict=True)]
        keep = np.array([other is None for other in like], dtype=bool)
        self._drop(
            table.filter(pa.array(~keep)),
            "near_duplicate",
            [f"like {other}" for other in like if other is not None],
        )
        return table.filter(pa.array(keep))

    def _outlying(self, table: pa.Table) -> pa.Table:
        tokens = np.maximum(table["tokens"].to_numpy(), 1)
        shares = table["supervised"].to_numpy() / tokens
        lengths = np.log(tokens)
        odd = (lengths < self._length_bounds[0]) | (lengths > self._length_bounds[1])
        odd |= (shares < self._share_bounds[0]) | (shares > self._share_bounds[1])
        for place in np.flatnonzero(odd)[: _LISTED_OUTLIERS - len(self._outliers)].tolist():
            facts = {
                name: table[name][place].as_py() for name in ("key", "source", "line", "tokens", "supervised")
            }
            self._outliers.append(facts)
        self._outlier_count += int(odd.sum())
        if not self.options.drop_outliers or not odd.any():
            return table
        self._drop(table.filter(pa.array(odd)), "outlier")
        return table.filter(pa.array(~odd))

    def _within_limits(self, table: pa.Table) -> pa.Table:
        """The first rows of each limited source, then the first of all: in shuffled order, so an unbiased sample."""
        sources = table[SOURCE].to_numpy()
        groups = self._groups[sources]
        keep = np.ones(len(groups), dtype=bool)
        for group in np.unique(groups).tolist():
            mine = np.flatnonzero(groups == group)
            room = int(min(max(0, self._limits[group] - self._taken[group]), len(mine)))
            keep[mine[room:]] = False
            self._taken[group] += room
        self._drop(table.filter(pa.array(~keep)), "source_limit")
        table = table.filter(pa.array(keep))
        room = max(0, self.options.limit - self.kept) if self.options.limit else table.num_rows
        self._drop(table.slice(room), "limit")
        return table.slice(0, room)

    def _drop(self, table: pa.Table, reason: str, details: list[str] | None = None) -> None:
        if not table.num_rows:
            return
        self.dropped["row", reason] += table.num_rows
        count = table.num_rows
        columns = {
            "unit": ["row"] * count,
            "reason": [reason] * count,
            "source": table["source"],
            "line": table["line"],
            "conversation": table["conversation"],
            "key": table["key"],
            "detail": details or [""] * count,
        }
        self._write_dropped(pa.table(columns, schema=DROPPED_SCHEMA))

    def _write_dropped(self, table: pa.Table) -> None:
        if table.num_rows:
            self._pending.append(table)
            self._write_pending(_DROPPED_GROUP)
            if not self._example:
                row = table.slice(0, 1).to_pylist()[0]
                self._example = f"; the first is {row['source']} line {row['line']}: {row['reason']}" + (
                    f" ({row['detail']})" if row["detail"] else ""
                )

    def _write_pending(self, group: int) -> None:
        """Write full groups: what stands in the file must not depend on the portions it came in."""
        assert self._writer is not None  # open() comes first
        while sum(table.num_rows for table in self._pending) >= group > 0:
            table = pa.concat_tables(self._pending)
            self._writer.write_table(table.slice(0, group).combine_chunks())
            self._pending = [table.slice(group)]

    def first_example(self) -> str:
        """The first thing left out, for a message."""
        return self._example

    def describe(self) -> dict[str, Any]:
        """The counts and the shape of what was kept, as JSON values."""
        tally = self._runs.tally
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int32)
        shares = np.concatenate(self._shares) if self._shares else np.zeros(0)
        by_unit = {
            unit: {r: n for (u, r), n in sorted(self.dropped.items()) if u == unit}
            for unit in ("record", "row")
        }
        total: Counter[str] = Counter()
        for (_, reason), count in self.dropped.items():
            total[reason] += count
        return {
            "counts": {
                "records": tally.records,
                "records_kept": tally.kept,
                "records_dropped": by_unit["record"],
                "rows_made": tally.made,
                "rows_kept": self.kept,
                "rows_dropped": by_unit["row"],
                "dropped": dict(sorted(total.items())),
                "shapes": {
                    k.partition(":")[2]: n for k, n in sorted(tally.counts.items()) if k.startswith("shape:")
                },
                "notes": dict(sorted(tally.notes.items())),
            },
            "supervised_share": round(self._supervised / max(1, int(lengths.sum())), 6),
            "rows_with_sampled_ids": self._exact,
            "lengths": histogram(lengths, length_edges(int(lengths.max()))) if len(lengths) else {},
            "supervised_shares": histogram(shares, _SHARE_EDGES) if len(shares) else {},
            "outliers": {"count": self._outlier_count, "rows": self._outliers},
            "dropped_file": seal_file(self._path),
        }
