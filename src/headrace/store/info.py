"""What a store holds, as plain values: counts, bytes, and per tap the norms and the measured error of a lossy codec."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from headrace.store.folder import Folder
from headrace.store.reader import Store, open_shard
from headrace.types import FINAL, Tap, hash_json


def store_info(store: Store) -> dict[str, Any]:
    """Everything ``headrace info`` shows, JSON-able. Reads the header of each shard, no states."""
    lengths = store.lengths()
    shards = _ShardSums(store)
    tokens, supervised = store.tokens, store.supervised
    return {
        "store": store.name,
        "spec": store.spec.to_dict(),
        "codec": store.codec,
        "final_positions": store.final_positions,
        "provenance": store.provenance,
        "sessions": shards.provenances,
        "captures": len(store),
        "tokens": tokens,
        "supervised": supervised,
        "supervised_share": supervised / tokens if tokens else 0.0,
        "length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "length_max": int(lengths.max()) if len(lengths) else 0,
        "length_p50": float(np.median(lengths)) if len(lengths) else 0.0,
        "shards": len(store.index.shards),
        "passes": [{"taps": list(taps), "captures": count} for taps, count in shards.passes.items()],
        "bytes_raw": store.bytes_raw,
        "bytes_stored": store.bytes_stored,
        "ratio": store.bytes_stored / shards.bytes_raw if shards.bytes_raw else 0.0,
        "bytes_left_out": shards.left_out,
        "shared_tokens": shards.shared,
        "taps": {str(tap): shards.tap(tap) for tap in store.taps},
    }


class _ShardSums:
    """Sums over the headers and tables of all shards."""

    def __init__(self, store: Store) -> None:
        self._stats: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._extremes: dict[str, list[float]] = defaultdict(lambda: [math.inf, 0.0, 0.0])
        self.provenances: list[dict[str, Any]] = []
        self.passes: dict[tuple[Tap, ...], int] = {}
        self.bytes_raw = 0
        self.left_out = 0
        """Bytes of final states that ``final_positions="supervised"`` did not store."""
        self.shared = 0
        """Tokens whose states are a parent's."""
        self._seen: set[str] = set()
        for shard in store.index.shards:
            self._add(store.folder, shard.name, store)

    def _add(self, folder: Folder, name: str, store: Store) -> None:
        shard = open_shard(folder, name, store.dataset)
        tables, spec = shard.tables, shard.spec
        if hash_json(shard.info.provenance) not in self._seen:
            self._seen.add(hash_json(shard.info.provenance))
            self.provenances.append(shard.info.provenance)
        self.passes[spec.taps] = self.passes.get(spec.taps, 0) + len(shard)
        self.bytes_raw += len(tables.ids) * spec.bytes_per_token
        shared = 0 if tables.shared is None else int(tables.shared.sum(dtype=np.int64))
        self.shared += shared
        for index, tap in enumerate(spec.taps):
            rows = int(tables.rows[-1, index])
            if tap == FINAL:
                self.left_out += (len(tables.ids) - shared - rows) * (spec.bytes_per_token // len(spec.taps))
            self._add_tap(
                str(tap),
                rows,
                shard.info.stats[str(tap)],
                int(tables.ends[tap][-1]) if len(tables.ends[tap]) else 0,
            )

    def _add_tap(self, tap: str, rows: int, stats: dict[str, float], nbytes: int) -> None:
        sums = self._stats[tap]
        sums["rows"] += rows
        sums["bytes"] += nbytes
        for key in ("norm_rows", "norm_sum", "error_rows", "error_sum"):
            sums[key] += stats.get(key, 0.0)
        low, high, error = self._extremes[tap]
        self._extremes[tap] = [
            min(low, stats.get("norm_min", math.inf)),
            max(high, stats.get("norm_max", 0.0)),
            max(error, stats.get("error_max", 0.0)),
        ]

    def tap(self, tap: Tap) -> dict[str, Any]:
        """Norms, and relative errors |decoded - true| / |true| of a lossy codec, measured at every 16th state."""
        sums, (low, high, error) = self._stats[str(tap)], self._extremes[str(tap)]
        return {
            "rows": int(sums["rows"]),
            "bytes": int(sums["bytes"]),
            "norm_mean": sums["norm_sum"] / max(1.0, sums["norm_rows"]),
            "norm_min": low if math.isfinite(low) else 0.0,
            "norm_max": high,
            "relative_error_mean": sums["error_sum"] / max(1.0, sums["error_rows"]),
            "relative_error_max": error,
        }
