"""Many workers on Ray: what the Ray path costs a capture beside the local one, and how several workers add up.

    python bench/scale_out.py [--quick] [--json FILE]

Overhead: the simulated engine at 500 captures a second, once in this process and once in a Ray worker, in turns; compared
are captures a second from the first look at the progress with all workers there to the end, so that no start-up counts. Scaling: an engine that sleeps for each token,
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
from pathlib import Path
from typing import Any

from common import Bench, main
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


class Ground:
    """Rows, a model, and extractions of them."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder = folder
        self.model = make_config_only(folder / "model")
        self.rows = make_rows(rows, low=24, high=41)
        self.tokens = sum(map(len, self.rows))
        write_rows(folder / "rows", self.rows)
        self._number = 0

    def run(self, rate: float, **changes: Any) -> float:
        """Extract all rows at ``rate`` captures a second an engine; captures a second over the middle of the run."""
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
        self.seconds = time.perf_counter() - start
        events = list(read_events(RunFiles(out).events))
        shutil.rmtree(out)
        return _steady(events)


def _steady(events: list[dict[str, Any]]) -> float:
    """Captures a second from the run's own event log, between its first look with all workers there and its end.

    A run too short for that counts from its start.
    """
    joined = max([event["time"] for event in events if event["event"] in ("start", "worker_joined")])
    looks = [event for event in events if event["event"] == "progress"]
    last = looks[-1]
    first = next((look for look in looks if look["time"] >= joined), last)
    if first["rows_done"] > last["rows_done"] / 2:
        start = next(event["time"] for event in events if event["event"] == "start")
        return last["rows_done"] / (last["time"] - start)
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
    rates: dict[str, list[float]] = {"local": [], "ray": []}
    for _ in range(repeats):
        rates["local"].append(ground.run(CAPTURES))
        rates["ray"].append(ground.run(CAPTURES, ray=address, ray_workers=1))
    medians = {path: statistics.median(values) for path, values in rates.items()}
    for path, values in rates.items():
        _row(bench, path, 1, values, medians[path] / medians["local"])
    cost = medians["local"] / medians["ray"] - 1
    bench.target("overhead a capture of the Ray path at 500 captures/s", cost, OVERHEAD, cost <= OVERHEAD)


def scaling(bench: Bench, ground: Ground, address: str, rate: float, repeats: int) -> None:
    """One, two and four workers of a sleeping engine."""
    rates: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for _ in range(repeats):
        for workers, values in rates.items():
            values.append(ground.run(rate, ray=address, ray_workers=workers))
    one = statistics.median(rates[1])
    for workers, values in rates.items():
        efficiency = statistics.median(values) / (workers * one)
        _row(bench, "sleeping engines", workers, values, efficiency)
        if workers > 1:
            bench.target(f"efficiency of {workers} workers", efficiency, EFFICIENCY, efficiency >= EFFICIENCY)


def _row(bench: Bench, path: str, workers: int, rates: list[float], ratio: float) -> None:
    median = statistics.median(rates)
    bench.row(
        path=path,
        workers=workers,
        captures_per_s=round(median, 1),
        spread=round((max(rates) - min(rates)) / median, 3),
        ratio=round(ratio, 4),
    )


def run(bench: Bench) -> None:
    """Both measurements on one cluster."""
    quick = bench.quick
    with tempfile.TemporaryDirectory(prefix="headrace-scale-out-") as folder, cluster() as address:
        ground = Ground(Path(folder), 1500 if quick else 12_000)
        ground.run(
            CAPTURES * 10, ray=address, ray_workers=1
        )  # warm: the cluster has its worker processes now
        overhead(bench, ground, address, 1 if quick else 5)
        scaling(bench, ground, address, 300 if quick else 150, 1 if quick else 5)


if __name__ == "__main__":
    main("scale_out", run)
