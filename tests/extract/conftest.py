"""Rows and pipelines for the extraction tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from headrace.engines.base import Engine
from headrace.engines.fake import fingerprint
from headrace.extract.admission import Budget
from headrace.extract.disk import DiskGuard
from headrace.extract.pipeline import Pipeline
from headrace.extract.progress import Progress
from headrace.extract.stages import Limits
from headrace.target import Target
from headrace.testing.extraction import make_rows
from headrace.types import CaptureSpec, Row

__all__ = ["Bench", "MemorySink", "make_rows"]


@pytest.fixture(scope="session")
def spec(config_only: Path) -> CaptureSpec:
    """Four taps of the config-only target: boundaries 2, 4, 5 and the final state, hidden 16."""
    return Target.open(str(config_only)).spec("eagle3")


class MemorySink:
    """Keeps what the pipeline writes; what is not sealed is not durable."""

    def __init__(self, before_add: Callable[[Row], None] = lambda row: None) -> None:
        self.sealed: dict[str, torch.Tensor] = {}
        self.open: dict[str, torch.Tensor] = {}
        self.before_add = before_add

    def add(self, row: Row, states: torch.Tensor) -> None:
        """Keep ``states``; a second capture of a key is a fault of the pipeline."""
        self.before_add(row)
        assert row.key not in self.open and row.key not in self.sealed
        self.open[row.key] = states

    def seal(self) -> None:
        """Make what is open durable."""
        self.sealed.update(self.open)
        self.open.clear()


class Bench:
    """A pipeline on a memory sink, ready to run."""

    def __init__(
        self,
        engine: Engine,
        rows: list[Row],
        folder: Path,
        *,
        limits: Limits | None = None,
        sink: MemorySink | None = None,
        budget: int = 1 << 20,
        min_free: int = 0,
    ) -> None:
        self.rows = {row.key: row for row in rows}
        self.sink = sink or MemorySink()
        self.budget = Budget(budget)
        self.progress = Progress(rows=len(rows), tokens=sum(map(len, rows)), rows_before=0, tokens_before=0)
        self.guard = DiskGuard(folder, min_free, lambda: 0)
        self.pipeline = Pipeline(
            engine,
            self.sink,
            budget=self.budget,
            guard=self.guard,
            progress=self.progress,
            limits=limits or Limits(retry_pause_seconds=0.0),
        )
        self.notes: list[tuple[str, dict[str, object]]] = []
        self.pipeline.on_note = lambda kind, fields: self.notes.append((kind, fields))

    def run(self, rows: Iterable[Row] | None = None) -> None:
        """Run to the end."""
        self.pipeline.run(iter(self.rows.values()) if rows is None else rows, self.rows.__getitem__)

    def kinds(self, note: str) -> list[str]:
        """The ``kind`` of every event named ``note``."""
        return [str(fields["kind"]) for kind, fields in self.notes if kind == note]

    def check(self, missing: Iterable[str] = ()) -> None:
        """Every capture equals its row's fingerprint, and exactly ``missing`` are not there; no budget leaks."""
        assert set(self.sink.sealed) == set(self.rows) - set(missing)
        for key, states in self.sink.sealed.items():
            assert torch.equal(states, fingerprint(self.rows[key].ids, self.pipeline.verifier.spec))
        assert self.budget.used == 0
        assert not self.sink.open
        snapshot = self.progress.snapshot(bytes_stored=0, staging_bytes=0, disk_free=0)
        assert snapshot.rows_in_flight == snapshot.tokens_in_flight == snapshot.rows_behind == 0
