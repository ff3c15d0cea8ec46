"""A million short captures through the whole pipeline: memory stays flat, a capture costs the same at the end as at the start,
and starting the finished run again takes seconds.

    python bench/scale.py [--quick] [--json FILE] [--folder FOLDER]

The rows are made up, the engine is the fingerprint engine, everything else is what a real run goes through: admission, verification,
encoding, shards on disk, the event log. The extraction runs in a process of its own, whose memory and CPU time are sampled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from common import Bench, main
from headrace.data.rows import RowWriter
from headrace.extract.events import tail_events
from headrace.extract.files import RunFiles
from headrace.testing.models import make_config_only
from headrace.types import Row

SHORT = (8, 25)
MEMORY = 2 << 30
COST_CHANGE = 0.10
RESTART_SECONDS = 10.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside the common ones."""
    parser.add_argument(
        "--folder",
        type=Path,
        help="where rows and store go (default: a temporary folder, removed at the end)",
    )
    parser.add_argument(
        "--rows", type=int, default=0, help="captures (default: 1,000,000; 20,000 with --quick)"
    )


def made_up(count: int) -> Iterator[Row]:
    """Distinct rows: the first ids spell the row's number."""
    rng = np.random.default_rng(0)
    for number in range(count):
        tokens = int(rng.integers(*SHORT))
        ids = rng.integers(0, 70000, tokens)
        ids[:2] = number % 60000, number // 60000
        yield Row.make(ids, np.arange(tokens) >= tokens // 2)


@dataclass(frozen=True)
class Sample:
    """The extracting process at one moment."""

    seconds: float
    cpu_seconds: float
    resident: int
    captures: int


def extract(folder: Path) -> tuple[list[Sample], float]:
    """Run ``headrace extract`` to its end; samples of it, and its wall time."""
    command = [
        sys.executable,
        "-m",
        "headrace",
        "extract",
        str(folder / "rows"),
        "--model",
        str(folder / "model"),
    ]
    command += ["--engine", "fake", "--out", str(folder / "store"), "--shard-bytes", "64MiB"]
    began = time.perf_counter()
    with open(folder / "extract.log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        samples = []
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                cpu, resident = watched.cpu_times(), watched.memory_info().rss
            except psutil.NoSuchProcess:
                break
            samples.append(
                Sample(time.perf_counter() - began, cpu.user + cpu.system, resident, captures(folder))
            )
            time.sleep(0.5)
    if process.wait():
        raise SystemExit(f"the extraction failed; see {folder / 'extract.log'}")
    return samples, time.perf_counter() - began


def captures(folder: Path) -> int:
    """Captures written so far, by the run's own event log."""
    last = [e for e in tail_events(RunFiles(folder / "store").events, 8) if e["event"] == "progress"]
    return int(last[-1]["rows_done"]) if last else 0


def microseconds(samples: list[Sample], begin: float, end: float, cpu: bool) -> float:
    """Cost of a capture between two shares of the whole, by interpolation between samples; the process's start is left out."""
    samples = [s for s in samples if s.captures]
    done = np.array([s.captures for s in samples], dtype=float)
    cost = np.array([s.cpu_seconds if cpu else s.seconds for s in samples])
    moved = np.concatenate(
        [[True], np.diff(done) > 0]
    )  # the log is written every few seconds, samples come more often
    total = done[-1]
    bounds = np.clip([begin * total, end * total], done[0], total)
    at = np.interp(bounds, done[moved], cost[moved])
    return float((at[1] - at[0]) / (bounds[1] - bounds[0]) * 1e6)


def run(bench: Bench) -> None:
    """Make rows, extract them, extract again."""
    count = bench.args.rows or (20_000 if bench.quick else 1_000_000)
    folder = bench.args.folder or Path(tempfile.mkdtemp(prefix="headrace-scale-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        make_config_only(folder / "model")
        began = time.perf_counter()
        with RowWriter(folder / "rows") as writer:
            for row in made_up(count):
                writer.add(row)
        bench.row(what=f"make {count:,} rows", seconds=time.perf_counter() - began, detail="")
        measure(bench, folder, count)
    finally:
        if bench.args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def measure(bench: Bench, folder: Path, count: int) -> None:
    """The extraction and its repetition."""
    samples, seconds = extract(folder)
    end = json.loads(RunFiles(folder / "store").manifest.read_text())["sessions"][-1]["result"]
    peak = max(s.resident for s in samples)
    bench.row(
        what="extract",
        seconds=seconds,
        detail=f"{count / seconds:,.0f} captures/s, peak memory {peak / 2**20:,.0f} MiB",
    )
    costs = {}
    for name, begin, stop in (
        ("first tenth", 0.0, 0.1),
        ("middle tenth", 0.45, 0.55),
        ("last tenth", 0.9, 1.0),
    ):
        costs[name] = microseconds(samples, begin, stop, cpu=True)
        wall = microseconds(samples, begin, stop, cpu=False)
        bench.row(
            what=f"a capture in the {name}",
            seconds=wall / 1e6,
            detail=f"{costs[name]:.0f} µs of CPU, {wall:.0f} µs of time",
        )
    _, restart = extract(folder)
    bench.row(what="start the finished run again", seconds=restart, detail="process start to exit")
    change = costs["last tenth"] / costs["first tenth"] - 1
    bench.target("rows stored", end["stored"], count, end["stored"] == count)
    bench.target("peak memory of the client, MiB", peak / 2**20, MEMORY / 2**20, peak < MEMORY)
    bench.target("change of a capture's CPU cost, first to last", change, COST_CHANGE, change < COST_CHANGE)
    bench.target("seconds to start a finished run again", restart, RESTART_SECONDS, restart < RESTART_SECONDS)


if __name__ == "__main__":
    main("scale", run, arguments)
