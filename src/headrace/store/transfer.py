"""Moving encoded captures between shards without decoding and encoding them again."""

from __future__ import annotations

import numpy as np

from headrace.bits import bits_dtype
from headrace.errors import CorruptError
from headrace.store.build import ShardBuilder
from headrace.store.codecs import open_codec
from headrace.store.encode import SAMPLE_STRIDE, Encoded, Parent, TapData, sampled_norms
from headrace.store.shard import Shard
from headrace.types import Row, Tap


def encoded_of(shard: Shard, slot: int, taps: tuple[Tap, ...]) -> Encoded:
    """A capture as it is stored, at some of its taps, ready for another shard. Every chunk is checked on the way.

    Raises CorruptError. The buffers are views of the shard's file.
    """
    row = Row(shard.ids(slot).copy(), shard.mask(slot), shard.key(slot))
    parent = shard.parent(slot)
    return Encoded(row, Parent(*parent) if parent else None, [_tap_of(shard, slot, tap) for tap in taps])


def _tap_of(shard: Shard, slot: int, tap: Tap) -> TapData:
    out = TapData(rows=shard.rows(slot, tap))
    base, index = shard.prefix.starts[tap], shard.spec.tap_index(tap)
    for chunk in shard.chunks(slot, tap):
        out.buffers.append(shard.source.read(base + chunk.start, base + chunk.stop))
        out.checksums.append(int(shard.tables.checksums[tap][chunk.number]))
        out.sizes.append(chunk.stop - chunk.start)
    bits = np.empty((out.rows, shard.spec.hidden_size), bits_dtype(shard.spec.dtype))
    shard.read(slot, tap, 0, out.rows, bits)  # proves every chunk
    out.norms = sampled_norms(bits, shard.spec.dtype)
    if tap in shard.tables.scales:
        first = int(shard.tables.rows[slot, index])
        out.scales.append(shard.tables.scales[tap][first : first + out.rows])
        # The true values are gone: a moved capture carries its share of the error measured when its shard was written.
        stats = shard.info.stats[str(tap)]
        out.errors = -(-out.rows // SAMPLE_STRIDE)
        out.error_sum = stats["error_sum"] * out.errors / max(1.0, stats["error_rows"])
        out.error_max = stats["error_max"]
    return out


def builder_like(shard: Shard) -> ShardBuilder:
    """An empty shard of the same kind."""
    info = shard.info
    return ShardBuilder(
        shard.spec,
        open_codec(info.codec, shard.spec.dtype),
        info.chunk_rows,
        info.final_positions,
        info.provenance,
    )


def salvage(shard: Shard, slots: list[int]) -> tuple[ShardBuilder, list[int]]:
    """A new shard of the captures ``slots`` of a damaged one, and the slots that turned out damaged too."""
    builder, bad = builder_like(shard), []
    for slot in slots:
        try:
            builder.append(encoded_of(shard, slot, shard.spec.taps))
        except CorruptError:
            bad.append(slot)
    return builder, bad
