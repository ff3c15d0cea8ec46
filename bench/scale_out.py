"""Many workers on Ray: what the Ray path costs a capture beside the local one, and how several workers add up.

    python bench/scale_out.py [--quick] [--json FILE]

Overhead: the simulated engine at 500 captures a second, once in this process and once in a Ray worker, in turns; compared
are captures a second over the middle of the run, so that neither start-up nor the last seal counts; those are in the column of seconds. Scaling: an engine that sleeps for each token,
with 1, 2 and 4 workers on a cluster of four local hosts; each worker adds the same speed, so the rate should be their sum.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Bench, main
from headrace.extract import watch
from headrace.extract.config import ExtractConfig
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.extract.run import run_extraction
from headrace.testing.extraction import make_rows, write_rows
from headrace.testing.models import make_config_only

CAPTURES = 500
"""Captures a second of the simulated engine."""
OVERHEAD = 0.05
EFFICIENCY = 0.95
HOSTS = 4


@dataclass(frozen=True)
class Measured:
    """One run."""

    rate: float
    """Captures a second over its middle."""
    seconds: float
    """From its beginning to its end, engines opened and closed."""


class Ground:
    """Rows, a model, and extractions of them."""

    def __init__(self, folder: Path, rows: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.model = make_config_only(folder / "model")
        self.rows = make_rows(rows, low=24, high=41)
        self.tokens = sum(map(len, self.rows))
        write_rows(folder / "rows", self.rows)
        self._number = 0

    def run(self, rate: float, **changes: Any) -> Measured:
        """Extract all rows at ``rate`` captures a second an engine."""
        self._number += 1
        out = self.folder / f"store-{self._number}"
        values = {
            "rows": self.folder / "rows",
            "model": str(self.model),
            "out": out,
            "engine": "fake",
            "engine_options": {
                "tokens_in_flight": 1000,
                "tokens_per_second": rate * self.tokens / len(self.rows),
            },
            "min_free": 0,
        }
        start = time.perf_counter()
        run_extraction(ExtractConfig.model_validate({**values, **changes}), lambda text: None).done()
        seconds = time.perf_counter() - start
        events = list(read_events(RunFiles(out).events))
        shutil.rmtree(out)
        return Measured(_steady(events), seconds)


def _steady(events: list[dict[str, Any]]) -> float:
    """Captures a second over the middle of a run, from its own event log: all workers there, and a tenth left out at both ends."""
    joined = max(event["time"] for event in events if event["event"] in ("start", "worker_joined"))
    looks = [event for event in events if event["event"] == "progress"]
    total = looks[-1]["rows_total"]
    inside = [
        look for look in looks if look["time"] >= joined and 0.1 * total <= look["rows_done"] <= 0.9 * total
    ]
    if len(inside) < 2:
        raise SystemExit("the run was too short to have a middle; give it more rows")
    first, last = inside[0], inside[-1]
    return (last["rows_done"] - first["rows_done"]) / (last["time"] - first["time"])


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """A Ray cluster of four local hosts of one core each; its address."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    host = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={**host, "include_dashboard": False})
    for _ in range(HOSTS - 1):
        made.add_node(**host)
    # The driver joins once, as a user's does; joining is not what is measured.
    ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield made.address
    finally:
        ray.shutdown()
        made.shutdown()


def overhead(bench: Bench, ground: Ground, address: str, repeats: int) -> None:
    """The Ray path beside the local one."""
    runs: dict[str, list[Measured]] = {"local": [], "ray": []}
    for _ in range(repeats):
        runs["local"].append(ground.run(CAPTURES))
        runs["ray"].append(ground.run(CAPTURES, ray=address, ray_workers=1))
    local = _rate(runs["local"])
    for path, measured in runs.items():
        _row(bench, path, 1, measured, _rate(measured) / local)
    cost = local / _rate(runs["ray"]) - 1
    bench.target("overhead a capture of the Ray path at 500 captures/s", cost, OVERHEAD, cost <= OVERHEAD)


def scaling(bench: Bench, ground: Ground, address: str, rate: float, repeats: int) -> None:
    """One, two and four workers of a sleeping engine."""
    runs: dict[int, list[Measured]] = {1: [], 2: [], 4: []}
    for _ in range(repeats):
        for workers, measured in runs.items():
            measured.append(ground.run(rate, ray=address, ray_workers=workers))
    for workers, measured in runs.items():
        efficiency = _rate(measured) / (workers * _rate(runs[1]))
        _row(bench, f"engines of {rate:g}/s", workers, measured, efficiency)
        if workers > 1:
            bench.target(f"efficiency of {workers} workers", efficiency, EFFICIENCY, efficiency >= EFFICIENCY)


def _rate(runs: list[Measured]) -> float:
    return statistics.median(run.rate for run in runs)


def _row(bench: Bench, path: str, workers: int, runs: list[Measured], ratio: float) -> None:
    rates = [run.rate for run in runs]
    bench.row(
        path=path,
        workers=workers,
        captures_per_s=round(_rate(runs), 1),
        spread=round((max(rates) - min(rates)) / _rate(runs), 3),
        ratio=round(ratio, 4),
        seconds=round(statistics.median(run.seconds for run in runs), 1),
    )


def run(bench: Bench) -> None:
    """Both measurements on one cluster."""
    quick = bench.quick
    watch.PROGRESS_SECONDS = 0.2  # enough looks to find the middle of a run by
    with tempfile.TemporaryDirectory(prefix="headrace-scale-out-") as folder, cluster() as address:
        place = Path(folder)
        ground = Ground(place / "overhead", 2500 if quick else 15_000)
        ground.run(
            CAPTURES * 10, ray=address, ray_workers=1
        )  # warm: the cluster has its worker processes now
        overhead(bench, ground, address, 1 if quick else 5)
        scaling(bench, Ground(place / "scaling", 1000 if quick else 6000), address, 100, 1 if quick else 5)


if __name__ == "__main__":
    main("scale_out", run)
