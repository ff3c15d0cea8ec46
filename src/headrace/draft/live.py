"""Training straight from an engine: something that reads like a store and captures each row in the moment it is read.

The order of packs, resuming and everything above are those of training from a store, because to them this is one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._version import __version__
from headrace.bits import Bits, bits_of
from headrace.errors import ConfigError
from headrace.extract.config import ExtractConfig
from headrace.store.reader import Entry
from headrace.target import Target
from headrace.types import CaptureSpec, Row, Tap

if TYPE_CHECKING:
    from headrace.data.rows import RowFolder
    from headrace.draft.config import TrainConfig
    from headrace.extract.stream import Stream


class LiveStore:
    """The part of a :class:`headrace.store.Store` that training uses, over a :class:`Stream`. Threads may share it."""

    final_positions = "all"

    def __init__(
        self, stream: Stream, spec: CaptureSpec, rows: Rows, provenance: dict[str, Any], name: str
    ) -> None:
        self.stream, self.spec, self.rows = stream, spec, rows
        self.provenance, self.name = provenance, name

    def keys(self) -> list[str]:
        """Keys of all rows: each can be had."""
        return list(self.rows.lengths)

    def lengths_of(self, keys: Sequence[str]) -> np.ndarray:
        """int32 [len(keys)]: tokens. Raises KeyError."""
        return np.array([self.rows.lengths[key] for key in keys], np.int32)

    def entry(self, key: str) -> Entry:
        """What is known of a capture before it is made."""
        row = self.rows.get(key)
        return Entry(key, "", 0, len(row), row.supervised)

    def tokens_of(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 [tokens] and mask bool [tokens]. Raises KeyError."""
        row = self.rows.get(key)
        return row.ids.copy(), row.mask.copy()

    def final_kept(self, key: str) -> np.ndarray:
        """bool [tokens]: everywhere."""
        return np.ones(self.rows.lengths[key], bool)

    def read_bits(self, key: str, out: Bits, taps: Sequence[Tap] | None = None, **_: Any) -> None:
        """Capture ``key`` into ``out``, bits [taps, tokens, hidden]. Raises CaptureError for a row that gives no capture, and the engine's errors."""
        states = bits_of(self.stream.ask(key).result())
        for place, tap in enumerate(self.spec.taps if taps is None else taps):
            out[place] = states[self.spec.tap_index(tap)]

    def expect(self, key: str, taps: Sequence[Tap] | None = None) -> None:
        """Nothing: a capture is asked for when it is read."""

    def close(self) -> None:
        """End the workers; kept captures are sealed first. Idempotent."""
        self.stream.close()


class Rows:
    """Rows by key for many threads."""

    def __init__(self, folder: RowFolder) -> None:
        self.lengths = dict(zip(folder.keys(), map(int, folder.lengths()), strict=True))
        self._folder = folder
        self._lock = threading.Lock()

    def get(self, key: str) -> Row:
        """The row. Raises KeyError."""
        with self._lock:
            return self._folder.get(key)


def open_live(config: TrainConfig, target: Target, folder: RowFolder) -> LiveStore:
    """Open the engines that ``config.from_engine`` names. Errors as of :func:`headrace.extract.crew_run.open_stream`.

    Raises ConfigError for workers both here and on Ray, and for a ``keep`` that holds something already: half of its rows would be of another run.
    """
    from headrace.extract.crew_run import open_stream

    live = config.live
    spec = target.spec(live.taps, dtype=live.dtype)
    if live.keep is not None and live.keep.exists() and any(live.keep.iterdir()):
        raise ConfigError(
            f"--live.keep {live.keep} is not empty; give a new folder, or train from that store"
        )
    if live.workers and live.ray and "ray" in live.model_fields_set:
        raise ConfigError(
            f"--live.workers {live.workers} are processes of this host, --live.ray {live.ray} is a cluster; leave one out "
            "(--live.ray-workers is their number there)"
        )
    rows = Rows(folder)
    extraction = ExtractConfig.model_validate(
        {
            **live.model_dump(exclude={"keep", "in_flight"}),
            "ray": "" if live.workers else live.ray,
            "rows": str(config.rows),
            "model": config.model,
            "revision": config.revision,
            "out": live.keep or Path(),
            "engine": config.from_engine,
        }
    )
    longest = max(rows.lengths.values(), default=1)
    stream = open_stream(extraction, spec, longest, rows.get, keep=live.keep is not None)
    provenance = {"engine": stream.provenance, "headrace": __version__}
    return LiveStore(stream, spec, rows, provenance, f"engine {config.from_engine}")
