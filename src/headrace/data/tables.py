"""Rows as Arrow tables: the columns of the row folder, and the way from rows to columns and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.errors import CorruptError
from headrace.types import Origin, Row, row_key

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("loss_mask", pa.list_(pa.field("item", pa.bool_(), nullable=False)), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("conversation", pa.string(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("exact_ids", pa.bool_(), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a row beyond its ids and mask; for people and statistics, never part of its key."""

    turns: int = 1
    """Supervised assistant turns."""
    truncated: bool = False
    """The row was cut at the maximum length."""
    exact_ids: bool = False
    """The supervised ids are those the target sampled, not a re-encoding of its text."""
    finish: str = ""
    """Finish reason of the last supervised turn, ``""`` if unknown."""


def rows_to_table(rows: Sequence[Row], facts: Sequence[Facts]) -> pa.Table:
    """Rows as a table in the columns of ``SCHEMA``."""
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows], dtype=np.int64)]).astype(np.int32)
    ids = np.concatenate([r.ids for r in rows]) if rows else np.zeros(0, np.int32)
    mask = np.concatenate([r.mask for r in rows]) if rows else np.zeros(0, bool)
    columns: dict[str, Any] = {
        "key": [r.key for r in rows],
        "input_ids": list_array(offsets, pa.array(ids, pa.int32())),
        "loss_mask": list_array(offsets, pa.array(mask, pa.bool_())),
        "tokens": [len(r) for r in rows],
        "supervised": [r.supervised for r in rows],
        "source": [r.origin.source for r in rows],
        "line": [r.origin.line for r in rows],
        "conversation": [r.origin.conversation for r in rows],
        "turns": [f.turns for f in facts],
        "truncated": [f.truncated for f in facts],
        "exact_ids": [f.exact_ids for f in facts],
        "finish": [f.finish for f in facts],
    }
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def list_array(offsets: np.ndarray, values: pa.Array) -> pa.Array:
    """A list column over flat ``values``; ``offsets`` int32 [rows + 1]."""
    kind = pa.list_(pa.field("item", values.type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


def table_to_rows(table: pa.Table, file: Path | str = "") -> Iterator[Row]:
    """The rows of a table. Raises CorruptError, naming ``file``, when ids and mask do not hash to the key."""
    for batch in table.to_batches():
        ids, mask = batch.column("input_ids"), batch.column("loss_mask")
        flat_ids = ids.values.to_numpy(zero_copy_only=False)
        flat_mask = mask.values.to_numpy(zero_copy_only=False)
        id_ends, mask_ends = ids.offsets.to_numpy(), mask.offsets.to_numpy()
        keys = batch.column("key").to_pylist()
        origins = zip(*(batch.column(c).to_pylist() for c in ("source", "line", "conversation")), strict=True)
        for place, (key, origin) in enumerate(zip(keys, origins, strict=True)):
            row_ids = flat_ids[id_ends[place] : id_ends[place + 1]].astype(np.int32)
            row_mask = flat_mask[mask_ends[place] : mask_ends[place + 1]].copy()
            if len(row_ids) != len(row_mask) or row_key(row_ids, row_mask) != key:
                raise CorruptError(
                    f"{file}: row {key} does not hash to its key, its bytes changed; run headrace prepare again"
                )
            yield Row(row_ids, row_mask, key, Origin(*origin))
