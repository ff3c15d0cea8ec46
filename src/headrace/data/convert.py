"""A chunk of raw records → rows in columns, and everything that was left out, by name. The work of one worker.

Nothing here depends on another chunk, so chunks may be converted anywhere in any order with the same result: what a row
is, its place in the shuffle and its split are functions of the row, its conversation and the seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from headrace.data.hygiene import PromptOverlap, signature
from headrace.data.readers import Chunk
from headrace.data.reasons import Bad, Drop
from headrace.data.records import Conversation, Item, RecordReader, Text, prune_none
from headrace.data.render import Draft, Planned, Renderer, RenderPolicy
from headrace.data.tables import SCHEMA, list_array
from headrace.data.template import ChatTemplate
from headrace.types import row_key

ORDER, SOURCE, PART, HELD_OUT, SKETCH = "order", "source_index", "part", "held_out", "sketch"
WORK_SCHEMA = pa.schema(
    [
        *SCHEMA,
        pa.field(ORDER, pa.uint64(), nullable=False),
        pa.field(SOURCE, pa.int32(), nullable=False),
        pa.field(PART, pa.int32(), nullable=False),
        pa.field(HELD_OUT, pa.bool_(), nullable=False),
        pa.field(SKETCH, pa.binary(), nullable=False),
    ]
)
"""A row on its way: its place in the shuffle, its source, its number among the rows of its record, its split."""

DROPPED_SCHEMA = pa.schema(
    [
        pa.field("unit", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("conversation", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
"""dropped.parquet: ``unit`` is record (it gave no row) or row."""


@dataclass(frozen=True)
class ConvertOptions:
    """Everything besides the template that decides rows. Plain values: it travels to workers."""

    policy: RenderPolicy = field(default_factory=RenderPolicy)
    shape: str = "auto"
    aliases: tuple[tuple[str, str], ...] = ()
    max_length: int = 4096
    drop_long: bool = False
    min_supervised: int = 1
    seed: int = 0
    validation: float = 0.05
    vocab_size: int = 0
    """Ids must lie below it; 0 = not checked."""
    names: tuple[str, ...] = ()
    """Name of each source."""
    weights: tuple[float, ...] = ()
    """Weight of each source."""
    sketches: bool = False
    """Compute MinHash signatures."""
    overlap: PromptOverlap | None = None
    stop_at_bad: bool = True


@dataclass
class Converted:
    """What became of a chunk."""

    rows: pa.Table
    dropped: pa.Table
    records: int = 0
    kept: int = 0
    """Records that gave at least one row."""
    made: int = 0
    """Rows made, before row filters."""
    counts: Counter[str] = field(default_factory=Counter)
    """Drops by reason, ``record:REASON`` or ``row:REASON``, and shapes, ``shape:NAME``."""
    notes: Counter[str] = field(default_factory=Counter)
    bad: tuple[str, int, str] | None = None
    """Source, line and what is wrong with the first bad record, when the run must stop there."""


@dataclass(slots=True)
class _Work:
    """A record on its way through a chunk."""

    line: int
    item: Item
    planned: Planned | None
    drafts: list[Draft] = field(default_factory=list)


class Converter:
    """Converts chunks. ``progress`` is called with the line of each record before work on it begins."""

    def __init__(
        self,
        template: ChatTemplate,
        options: ConvertOptions,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.template, self.options = template, options
        self._progress = progress
        self._reader = RecordReader(options.shape, dict(options.aliases))
        self._renderer = Renderer(template, options.policy)

    def __call__(self, chunk: Chunk) -> Converted:
        sheet = _Sheet(chunk.source, self.options)
        self._reader.notes.clear()
        self._renderer.notes.clear()
        works = self._plan_all(chunk, sheet)
        if sheet.bad is None:
            self._finish_all(chunk, works, sheet)
        return sheet.result(self._reader.notes + self._renderer.notes)

    def _plan_all(self, chunk: Chunk, sheet: _Sheet) -> list[_Work]:
        works: list[_Work] = []
        raw: Sequence[Any] = (
            chunk.texts if chunk.arrow is None else [prune_none(r) for r in chunk.arrow.to_pylist()]
        )
        for line, record in zip(chunk.lines, raw, strict=True):
            if self._progress is not None:
                self._progress(chunk.source, line)
            item: Item | None = None
            try:
                item = self._reader.read(self._reader.parse(record) if chunk.arrow is None else record)
                sheet.counts[f"shape:{item.shape}"] += 1
                works.append(self._plan(item, line, chunk.source))
            except Drop as exc:
                sheet.drop_record(line, item, exc.reason, exc.detail)
            except Bad as exc:
                sheet.drop_record(line, item, exc.reason, exc.detail)
                if self.options.stop_at_bad:
                    sheet.bad = (self.options.names[chunk.source], line, exc.detail)
                    break
        return works

    def _plan(self, item: Item, line: int, source: int) -> _Work:
        weight = self.options.weights[source]
        if weight < 1 and _unit(f"weight {source}", item.identity, self.options.seed) >= weight:
            raise Drop("sampled_out")
        if self.options.overlap is not None and (name := self.options.overlap.find(item)) is not None:
            raise Drop("evaluation_overlap", name)
        if isinstance(item, Conversation):
            return _Work(line, item, self._renderer.plan(item))
        draft = self._renderer.text_row(item) if isinstance(item, Text) else self._renderer.token_row(item)
        return _Work(line, item, None, [draft])

    def _finish_all(self, chunk: Chunk, works: list[_Work], sheet: _Sheet) -> None:
        usual = [
            plan.text for w in works if w.planned and w.planned.encode is None for plan in w.planned.plans
        ]
        encoded = iter(self.template.encoder.batch(usual))
        for work in works:
            try:
                if work.planned is not None:
                    encode = work.planned.encode
                    ids = [
                        next(encoded) if encode is None else encode(plan.text) for plan in work.planned.plans
                    ]
                    work.drafts = self._renderer.finish(work.planned, ids)
                self._check_ids(work)
            except Drop as exc:
                sheet.drop_record(work.line, work.item, exc.reason, exc.detail)
                continue
            except Bad as exc:
                sheet.drop_record(work.line, work.item, exc.reason, exc.detail)
                if self.options.stop_at_bad:
                    sheet.bad = (self.options.names[chunk.source], work.line, exc.detail)
                    return
                continue
            sheet.add_rows(work)

    def _check_ids(self, work: _Work) -> None:
        limit = self.options.vocab_size
        if not limit or (work.planned is not None and not work.planned.exact):
            return
        for draft in work.drafts:
            low, high = int(draft.ids.min()), int(draft.ids.max())
            if low < 0 or high >= limit:
                raise Bad(
                    "bad_token_ids",
                    f"has token id {low if low < 0 else high}, the model's vocabulary has {limit}",
                )


class _Sheet:
    """Collects the columns of one chunk's rows."""

    def __init__(self, source: int, options: ConvertOptions) -> None:
        self.source, self.options = source, options
        self.name = options.names[source]
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.bad: tuple[str, int, str] | None = None
        self.records = self.kept = self.made = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in WORK_SCHEMA.names}
        self._dropped: dict[str, list[Any]] = {name: [] for name in DROPPED_SCHEMA.names}

    def drop_record(self, line: int, item: Item | None, reason: str, detail: str) -> None:
        self.records += 1
        self._drop("record", line, reason, detail, item.identity if item else "")

    def _drop(
        self, unit: str, line: int, reason: str, detail: str, conversation: str = "", key: str = ""
    ) -> None:
        self.counts[f"{unit}:{reason}"] += 1
        values = (unit, reason, self.name, line, conversation, key, detail)
        for column, value in zip(self._dropped.values(), values, strict=True):
            column.append(value)

    def add_rows(self, work: _Work) -> None:
        options = self.options
        self.records += 1
        self.kept += 1
        held_out = _unit("split", work.item.identity, options.seed) < options.validation
        sketch = signature(work.item) if options.sketches else b""
        for part, draft in enumerate(work.drafts):
            self.made += 1
            ids, mask = draft.ids, draft.mask
            cut = bool(options.max_length) and len(ids) > options.max_length
            if cut and options.drop_long:
                self._drop("row", work.line, "too_long", f"{len(ids)} tokens", work.item.identity)
                continue
            if cut:
                ids, mask = ids[: options.max_length], mask[: options.max_length]
                self.notes["rows_truncated"] += 1
            supervised = int(np.count_nonzero(mask))
            if supervised < options.min_supervised:
                detail = f"{supervised} of {len(draft.ids)} tokens" + (
                    f", cut at {options.max_length}" if cut else ""
                )
                self._drop("row", work.line, "too_few_supervised", detail, work.item.identity)
                continue
            self._add(work, (part, draft, ids, mask, supervised, cut), held_out, sketch)

    def _add(
        self, work: _Work, row: tuple[int, Draft, Any, Any, int, bool], held_out: bool, sketch: bytes
    ) -> None:
        part, draft, ids, mask, supervised, cut = row
        key = row_key(ids, mask)
        values = (
            key,
            ids,
            mask,
            len(ids),
            supervised,
            self.name,
            work.line,
            work.item.identity,
            draft.turns,
            cut,
            draft.exact,
            draft.finish,
            xxhash.xxh3_64_intdigest(key.encode(), seed=self.options.seed & (2**64 - 1)),
            self.source,
            part,
            held_out,
            sketch,
        )
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)

    def result(self, notes: Counter[str]) -> Converted:
        return Converted(
            self._table(),
            pa.table(self._dropped, schema=DROPPED_SCHEMA),
            self.records,
            self.kept,
            self.made,
            self.counts,
            Counter({k: n for k, n in (self.notes + notes).items() if n}),
            self.bad,
        )

    def _table(self) -> pa.Table:
        columns = self._columns
        lengths = columns["tokens"]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
        ids = np.concatenate(columns["input_ids"]) if lengths else np.zeros(0, np.int32)
        mask = np.concatenate(columns["loss_mask"]) if lengths else np.zeros(0, bool)
        arrays: dict[str, Any] = {**columns}
        arrays["input_ids"] = list_array(offsets, pa.array(ids, pa.int32()))
        arrays["loss_mask"] = list_array(offsets, pa.array(mask, pa.bool_()))
        return pa.table(arrays, schema=WORK_SCHEMA)


def _unit(purpose: str, identity: str, seed: int) -> float:
    """A number in [0, 1) that depends on the purpose, the conversation and the seed alone."""
    return xxhash.xxh3_64_intdigest(f"{purpose}\0{identity}".encode(), seed=seed & (2**64 - 1)) / 2**64
