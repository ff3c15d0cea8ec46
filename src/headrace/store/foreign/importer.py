"""Foreign files → store, one sample at a time. What the files do not say must have been told; nothing is guessed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from headrace.bits import TORCH_DTYPES
from headrace.errors import CaptureError, ConfigError, InputError, StoreError
from headrace.store.config import ImportConfig
from headrace.store.foreign.base import Sample, read_manifest
from headrace.store.foreign.layouts import open_layout
from headrace.store.format import Array
from headrace.store.writer import StoreWriter, WriterOptions
from headrace.target import Target
from headrace.types import FINAL, CaptureSpec, Row, Tap

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class RowSource(Protocol):
    """Where loss masks come from: a row folder, as far as it is needed here."""

    def rows(self) -> Iterator[Row]:
        """All rows."""

    def get(self, key: str) -> Row:
        """The row of a key; KeyError when there is none."""


def import_states(
    config: ImportConfig, rows: RowSource | None, progress: Progress | None = None
) -> dict[str, Any]:
    """Read ``config.source`` into the store ``config.out``; returns counts, dropped samples by reason.

    Raises ConfigError for what has to be told, InputError when nothing usable is there or every file disagrees with the
    target, StoreError when no sample could be kept.
    """
    boundaries = told_boundaries(config)
    layout = open_layout(config, len(boundaries))
    if not config.source.is_dir():
        raise InputError(
            f"{config.source} is not a folder; give the folder that holds the {layout.name} files"
        )
    paths = layout.find(config.source)
    if not paths:
        raise InputError(f"{config.source} holds no {layout.name} samples; check the folder and --layout")
    target = Target.open(config.model)
    lookup = _Lookup(config, rows)
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    writer: StoreWriter | None = None
    try:
        for number, path in enumerate(paths):
            if progress is not None:
                progress(number, len(paths))
            try:
                sample = layout.read(config.source, path)
                found = lookup.rows_of(sample, path)
            except InputError as exc:
                log.warning("dropped: %s", exc)
                dropped["unreadable or unmatched"] += 1
                continue
            if writer is None:
                writer = _open_writer(config, target, boundaries, sample, path)
            _add(writer, sample, found, path, counts, dropped)
    finally:
        if writer is not None:
            writer.close()
    if not counts["written"] and not counts["present"]:
        raise StoreError(
            f"none of the {len(paths)} samples in {config.source} could be kept: {dict(dropped)}"
        )
    return {"out": str(config.out), "samples": len(paths), **counts, "dropped": dict(dropped)}


def told_boundaries(config: ImportConfig) -> tuple[int, ...]:
    """The boundaries of the aux states. Raises ConfigError while anything that only the user can know is missing."""
    manifest = read_manifest(config.source) or {}
    layers, meaning = config.layers, config.layers_are
    if not layers and "boundaries" in manifest:  # an export of ours says what it holds
        layers, meaning = ",".join(map(str, manifest["boundaries"])), "boundaries"
    if not layers or not meaning:
        raise ConfigError(
            f"{config.layout} files do not say which layers their states are of; give --layers (such as 2,15,27) and "
            "--layers-are boundaries or outputs"
        )
    try:
        numbers = [int(part) for part in layers.split(",")]
    except ValueError:
        raise ConfigError(f"--layers {layers!r} is not a list of numbers such as 2,15,27") from None
    return tuple(number + (meaning == "outputs") for number in numbers)


def _told_normed(config: ImportConfig, sample: Sample, path: Path) -> bool:
    told = None if not config.final else config.final == "normed"
    says = sample.final_normed
    if says is None:
        says = (read_manifest(config.source) or {}).get("final_normed")
    if told is None and says is None:
        raise ConfigError(
            f"{config.layout} files do not say whether the final state is normed; give --final normed or unnormed"
        )
    if told is not None and says is not None and told != says:
        raise ConfigError(
            f"{path} says that its final state is {'normed' if says else 'not normed'}, --final says otherwise"
        )
    return bool(told if says is None else says)


def _open_writer(
    config: ImportConfig, target: Target, boundaries: tuple[int, ...], sample: Sample, path: Path
) -> StoreWriter:
    """The spec of the first sample is that of all; what disagrees with the target ends the import."""
    if sample.final.dtype not in _NAMES:
        raise InputError(
            f"{path} holds {sample.final.dtype} states; only {sorted(_NAMES.values())} can be stored"
        )
    if sample.final.shape[1] != target.hidden_size:
        raise InputError(
            f"{path} has states of width {sample.final.shape[1]}, {target.name} has {target.hidden_size}; give the right --model"
        )
    taps: tuple[Tap, ...] = (*boundaries, FINAL)
    spec: CaptureSpec = target.spec(
        taps, dtype=_NAMES[sample.final.dtype], final_normed=_told_normed(config, sample, path)
    )
    return StoreWriter(
        config.out,
        spec,
        codec=config.codec or None,
        provenance={"imported_from": {"layout": config.layout, "folder": str(config.source)}},
        options=WriterOptions(shard_bytes=int(config.shard_bytes)),
    )


def _add(
    writer: StoreWriter,
    sample: Sample,
    found: list[Row],
    path: Path,
    counts: Counter[str],
    dropped: Counter[str],
) -> None:
    if len(sample.aux) != len(writer.spec.taps) - 1:
        raise InputError(
            f"{path} holds {len(sample.aux)} aux states, --layers names {len(writer.spec.taps) - 1}"
        )
    states = torch.stack([*sample.aux, sample.final])
    for row in found:
        try:
            counts["written" if writer.add(row, states) else "present"] += 1
        except CaptureError as exc:
            log.warning("dropped %s: %s", path, exc)
            dropped["refused by the store"] += 1


class _Lookup:
    """From a sample to its rows: ids and mask of its own, or those of a row folder."""

    def __init__(self, config: ImportConfig, rows: RowSource | None) -> None:
        self._config = config
        self._rows = rows
        if config.mask == "rows" and rows is None:
            raise ConfigError("--mask rows needs --rows")
        self._numbered: list[str] = []
        self._by_ids: dict[int, list[str]] = {}
        if rows is not None:
            for row in rows.rows():
                self._numbered.append(row.key)
                self._by_ids.setdefault(_hash(row.ids), []).append(row.key)

    def rows_of(self, sample: Sample, path: Path) -> list[Row]:
        """The rows a sample belongs to: several when rows differ in the mask only. Raises InputError when there is none."""
        tokens = len(sample.final)
        if sample.ids is not None and len(sample.ids) != tokens:
            raise InputError(f"{path} has {len(sample.ids)} ids and {tokens} states")
        if sample.ids is None:
            row = self._named(sample, path)
            if len(row) != tokens:
                raise InputError(
                    f"{path} has {tokens} states, the row it is named after has {len(row)} tokens"
                )
            return [row]
        if self._config.mask == "all":
            return [Row.make(sample.ids, np.ones(tokens, bool))]
        if self._config.mask == "rows":
            return self._matching(sample.ids, path)
        if sample.mask is None:
            raise ConfigError(
                f"{path} has no loss mask; give --rows with --mask rows, or --mask all to supervise every token"
            )
        if len(sample.mask) != tokens:
            raise InputError(f"{path} has {len(sample.mask)} mask values and {tokens} states")
        return [Row.make(sample.ids, sample.mask)]

    def _matching(self, ids: Array, path: Path) -> list[Row]:
        assert self._rows is not None
        rows = [self._rows.get(key) for key in self._by_ids.get(_hash(ids), [])]
        rows = [row for row in rows if np.array_equal(row.ids, ids)]
        if not rows:
            raise InputError(f"{path} holds token ids that no row of --rows has")
        return rows

    def _named(self, sample: Sample, path: Path) -> Row:
        if self._rows is None:
            raise ConfigError(
                f"{path} has no token ids beside it; give --rows and say with --names how samples are named"
            )
        try:
            if self._config.names == "keys":
                return self._rows.get(Path(sample.name).name)
            return self._rows.get(self._numbered[int("".join(filter(str.isdigit, sample.name)))])
        except (KeyError, IndexError, ValueError):
            raise InputError(
                f"{path}: no row of --rows is called {sample.name!r} (--names {self._config.names})"
            ) from None


def _hash(ids: Iterable[int] | Array) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids, dtype="<i4").data)
