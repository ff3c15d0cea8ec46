"""Rewriting a store: another codec, other taps, several passes joined, small shards gathered into large ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.errors import ConfigError, StoreError
from headrace.store.codecs import codec_class
from headrace.store.dataset import Dataset
from headrace.store.encode import Parent
from headrace.store.folder import same_place
from headrace.store.format import FinalPositions
from headrace.store.reader import Store
from headrace.store.transfer import encoded_of
from headrace.store.writer import StoreWriter, WriterOptions
from headrace.types import Row, Tap

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


def convert_store(
    source: Store,
    out: str | os.PathLike[str],
    *,
    codec: str = "",
    final_positions: FinalPositions | None = None,
    allow_lossy: bool = False,
    options: WriterOptions | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the captures of ``source`` (at the taps of its ``spec``) to the store ``out``, which may hold some of them already.

    Where the codec stays, encoded chunks are copied as they are. Raises ConfigError for a conversion that would pass
    rounded states for exact ones or needs states that were not kept.
    """
    wanted = Dataset(
        spec=source.spec,
        codec=codec or source.codec,
        final_positions=final_positions or source.final_positions,
        provenance={**source.provenance, "converted_from": {"store": source.name, "codec": source.codec}},
    )
    _refuse(source, wanted, out, allow_lossy)
    copy = wanted.codec == source.codec and wanted.final_positions == source.final_positions
    counts = {"written": 0, "present": 0}
    total, done = source.tokens, 0
    with _writer(out, wanted, options or WriterOptions()) as writer:
        for key in _parents_first(source):
            entry = source.entry(key)
            if key in writer.done:
                counts["present"] += 1
            elif copy and _in_one_shard(source, key):
                counts["written"] += _copy(source, key, writer)
            else:
                counts["written"] += _recode(source, key, writer)
            done += entry.tokens
            if progress is not None:
                progress(done, total)
    result = Store.open(out, source.spec.taps)
    if len(result) < len(source):
        raise StoreError(
            f"{out} has {len(result)} of the {len(source)} captures of {source.name}; run headrace check on both"
        )
    return {
        "out": str(out),
        "captures": len(result),
        "tokens": result.tokens,
        **counts,
        "bytes_raw": result.bytes_raw,
        "bytes_before": source.bytes_stored,
        "bytes_stored": result.bytes_stored,
    }


def _writer(out: str | os.PathLike[str], wanted: Dataset, options: WriterOptions) -> StoreWriter:
    return StoreWriter(
        out,
        wanted.spec,
        codec=wanted.codec,
        final_positions=wanted.final_positions,
        provenance=wanted.provenance,
        # what is in a store has passed a door already
        options=options.model_copy(update={"allow_zeros": True}),
    )


def _refuse(source: Store, wanted: Dataset, out: str | os.PathLike[str], allow_lossy: bool) -> None:
    if same_place(out, source.name):
        raise ConfigError(f"cannot convert {out} onto itself; give another folder with --out")
    codec_class(wanted.codec)  # refused by name before anything is read
    if not codec_class(source.codec).lossless and wanted.codec != source.codec and not allow_lossy:
        raise ConfigError(
            f"{source.name} holds {source.codec} states, which were rounded; a {wanted.codec} store of them would look exact. "
            "Give --allow-lossy if that is meant"
        )
    if source.final_positions == "supervised" and wanted.final_positions == "all":
        raise ConfigError(
            f"{source.name} keeps the final state at supervised positions only; the rest cannot be made, extract again"
        )


def _parents_first(store: Store) -> list[str]:
    """Keys in the order they lie in the shards, those that lean on others after what they lean on."""
    order = np.lexsort((store.index.slot, store.index.shard))
    wanted = set(store.keys())
    seen: dict[str, None] = {}
    for row in order.tolist():
        key = store.key_at(row)
        if key in wanted:
            seen.setdefault(key)
    parents = {key: parent[0] for key in seen if (parent := store.parent(key)) is not None}
    if not parents:
        return list(seen)

    def depth(key: str) -> int:
        steps = 0
        while key in parents:
            key, steps = parents[key], steps + 1
        return steps

    return sorted(seen, key=depth)


def _in_one_shard(store: Store, key: str) -> bool:
    return len({store.place(key, tap)[0].name for tap in store.spec.taps}) == 1


def _copy(store: Store, key: str, writer: StoreWriter) -> bool:
    shard, slot = store.place(key, store.spec.taps[0])
    return writer.add_encoded(encoded_of(shard, slot, store.spec.taps))


def _recode(store: Store, key: str, writer: StoreWriter) -> bool:
    ids, mask = store.tokens_of(key)
    parent = store.parent(key)
    capture = store.get(key, start=parent[1] if parent else 0, missing="zero")
    return writer.add(Row(ids, mask, key), capture.states, parent=Parent(*parent) if parent else None)


def taps_of(store: Store, text: str) -> tuple[Tap, ...]:
    """``"2,15,final"`` as taps that ``store`` has. Raises ConfigError."""
    known = {str(tap): tap for tap in store.taps}
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    missing = [name for name in names if name not in known]
    if missing or not names:
        raise ConfigError(f"{store.name} has no taps {missing or text!r}; it has {list(known)}")
    return tuple(known[name] for name in names)
