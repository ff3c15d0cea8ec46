"""From encoded captures to one shard in memory, laid out tap by tap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.memory import shared_pool
from headrace.store.codecs import Buffer, Codec
from headrace.store.encode import Encoded
from headrace.store.format import (
    KEY_BYTES,
    Array,
    FinalPositions,
    Payload,
    ShardInfo,
    Tables,
    build_prefix,
    pack_mask,
)
from headrace.types import CaptureSpec, Tap


class Arena:
    """Memory that a shard is gathered in and that the next but one uses again.

    Payloads kept as the blocks the codecs return would be touched for the first time again and again, which costs as much as
    copying them twice, and would leave the heap full of holes, up to twice the size of what it holds.
    """

    def __init__(self, size: int) -> None:
        self._memory = shared_pool().lend(size)  # the system gives pages when they are first written
        self._used = 0

    def keep(self, buffers: list[Buffer]) -> list[Buffer]:
        """Copies of ``buffers``, in here while there is room."""
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if self._used + size > len(self._memory):
            return [b"".join(buffers)]
        place = self._memory[self._used : self._used + size]
        self._used += size
        at = 0
        for buffer in buffers:
            flat = np.frombuffer(buffer, np.uint8)
            place[at : at + len(flat)] = flat  # by numpy, which lets other threads run meanwhile
            at += len(flat)
        return [place.data]

    def clear(self) -> None:
        """Forget everything; what ``keep`` returned must not be used any more."""
        self._used = 0


class ShardBuilder:
    """Collects encoded captures and lays them out as one shard. Not thread-safe; one owner."""

    def __init__(
        self,
        spec: CaptureSpec,
        codec: Codec,
        chunk_rows: int,
        policy: FinalPositions,
        provenance: dict[str, Any],
        arena: Arena | None = None,
    ) -> None:
        self.arena = arena
        self.spec = spec
        self.codec = codec
        self.chunk_rows = chunk_rows
        self.policy: FinalPositions = policy
        self.provenance = provenance
        self.captures: list[Encoded] = []
        self.nbytes = 0

    def append(self, capture: Encoded) -> None:
        """Take one more capture; without an arena, its buffers are kept as they are."""
        if self.arena is not None:
            for tap in capture.taps:
                tap.buffers = self.arena.keep(tap.buffers)
        self.captures.append(capture)
        self.nbytes += capture.nbytes

    def layout(self) -> tuple[bytes, Iterator[Buffer]]:
        """The shard as its prefix and the stream of its payload buffers, in file order."""
        tables, payloads = self._tables(), {}
        for index, tap in enumerate(self.spec.taps):
            size = sum(sum(capture.taps[index].sizes) for capture in self.captures)
            dtype, shape = self.codec.tensor(int(tables.rows[-1, index]), self.spec.hidden_size, size)
            payloads[tap] = Payload(dtype, shape, size)
        info = ShardInfo(
            spec=self.spec,
            codec=self.codec.name,
            chunk_rows=self.chunk_rows,
            final_positions=self.policy,
            provenance=self.provenance,
            stats={str(tap): self._stats(index) for index, tap in enumerate(self.spec.taps)},
        )
        buffers = (
            b
            for index in range(len(self.spec.taps))
            for capture in self.captures
            for b in capture.taps[index].buffers
        )
        return build_prefix(info, tables, payloads), buffers

    def _tables(self) -> Tables:
        rows = [capture.row for capture in self.captures]
        mask = np.concatenate([row.mask for row in rows])
        parents = any(capture.parent for capture in self.captures)
        tables = Tables(
            keys=np.frombuffer(bytes.fromhex("".join(row.key for row in rows)), np.uint8).reshape(
                -1, KEY_BYTES
            ),
            offsets=_starts([len(row) for row in rows]),
            rows=np.stack(
                [_starts([c.taps[i].rows for c in self.captures]) for i in range(len(self.spec.taps))], axis=1
            ),
            supervised=np.array([row.supervised for row in rows], "<i4"),
            ids=np.concatenate([row.ids for row in rows]).astype("<i4", copy=False),
            mask=np.empty(0, np.uint8),
            checksums={tap: self._chunks(i, "checksums", "<u8") for i, tap in enumerate(self.spec.taps)},
            ends={tap: np.cumsum(self._chunks(i, "sizes", "<i8")) for i, tap in enumerate(self.spec.taps)},
            scales=self._scales() if self.codec.has_scales else {},
            parents=self._parents() if parents else None,
            shared=np.array([c.parent.tokens if c.parent else 0 for c in self.captures], "<i4")
            if parents
            else None,
        )
        before = sum(array.nbytes for name, array in tables.named() if name != "mask")
        return dataclasses.replace(tables, mask=pack_mask(mask, before))

    def _chunks(self, index: int, name: str, dtype: str) -> Array:
        return np.array(
            [value for capture in self.captures for value in getattr(capture.taps[index], name)], dtype
        )

    def _scales(self) -> dict[Tap, Array]:
        out: dict[Tap, Array] = {}
        for index, tap in enumerate(self.spec.taps):
            parts = [scales for capture in self.captures for scales in capture.taps[index].scales]
            out[tap] = np.concatenate(parts).astype("<f4", copy=False) if parts else np.empty(0, "<f4")
        return out

    def _parents(self) -> Array:
        keys = "".join(c.parent.key if c.parent else "00" * KEY_BYTES for c in self.captures)
        return np.frombuffer(bytes.fromhex(keys), np.uint8).reshape(-1, KEY_BYTES)

    def _stats(self, index: int) -> dict[str, float]:
        taps = [capture.taps[index] for capture in self.captures]
        norms = np.concatenate([tap.norms for tap in taps])
        stats: dict[str, float] = {"norm_rows": len(norms)}
        if len(norms):
            stats |= {
                "norm_sum": float(norms.sum()),
                "norm_min": float(norms.min()),
                "norm_max": float(norms.max()),
            }
        if not self.codec.lossless:
            stats["error_rows"] = sum(tap.errors for tap in taps)
            stats["error_sum"] = sum(tap.error_sum for tap in taps)
            stats["error_max"] = max((tap.error_max for tap in taps), default=0.0)
        return stats


def _starts(sizes: list[int]) -> Array:
    return np.concatenate([np.zeros(1, "<i8"), np.cumsum(np.array(sizes, "<i8"))])
