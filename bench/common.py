"""What every benchmark shares: the command line, the machine, interleaved repeats, one table and one JSON file.

A benchmark is ``main(run)`` with a ``run(bench)`` that adds rows and targets; see any file beside this one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Bench:
    """One run of one benchmark."""

    name: str
    quick: bool
    args: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    """Machine, date and commit of rows that were measured elsewhere and earlier."""

    def row(self, **values: Any) -> None:
        """Add a row; rows share their keys."""
        self.rows.append(values)

    def target(self, name: str, value: float, target: float, ok: bool) -> None:
        """Add a target with whether it is met."""
        self.targets.append({"name": name, "value": value, "target": target, "ok": ok})

    def merge(self, files: Sequence[Path]) -> None:
        """Measure nothing: take the rows and targets of earlier results, one table of runs on one machine."""
        for file in files:
            found = json.loads(file.read_text(encoding="utf-8"))
            self.rows += found["rows"]
            self.targets += found["targets"]
            self.measured = {key: found[key] for key in ("machine", "date", "commit")}

    def save(self) -> None:
        """Write the JSON file, if one was asked for: also in the middle, so that a run that is cut short keeps what it has."""
        file = self.args.json
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self.result(), indent=1) + "\n", encoding="utf-8")

    def result(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {
            "benchmark": self.name,
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "quick": self.quick,
            "rows": self.rows,
            "targets": self.targets,
            **self.measured,
        }


def main(
    name: str,
    run: Callable[[Bench], None],
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    merged: Callable[[Bench], None] | None = None,
) -> None:
    """Parse ``--quick``, ``--json`` and ``--merge`` (and what ``arguments`` adds), run, print the table, write the file.

    With ``--merge`` nothing runs but ``merged``, which may judge the rows anew.

    Exits 1 when a target is missed, except in quick mode, whose work is too small to judge by.
    """
    parser = argparse.ArgumentParser(description=f"benchmark {name}")
    parser.add_argument(
        "--quick", action="store_true", help="smaller work, the same code, under a minute on 2 cores"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="measure nothing: one table of these results",
    )
    if arguments is not None:
        arguments(parser)
    args = parser.parse_args()
    bench = Bench(name, args.quick, args)
    # Told to end (by timeout, say), take down in order what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.merge:
        bench.merge(args.merge)
    work = merged if args.merge else run
    if work is not None:
        work(bench)
    print_table(bench.rows)
    print_table(bench.targets)
    if args.json:
        bench.save()
        if args.json.resolve().parent == ROOT / "bench" / "results":
            print("docs/performance.md is made of these files; run: python tools/make_docs.py")
    if not args.quick and not all(target["ok"] for target in bench.targets):
        sys.exit(1)


def machine() -> str:
    """Processor, cores, memory, accelerator, Python and torch, in one line."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = (
        f", {torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    )
    return f"{_processor()}, {cores} cores, {memory:.0f} GiB{gpu}, Python {platform.python_version()}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Short hash of the checked-out commit, with ``+`` when files differ from it; ``""`` outside a checkout."""
    try:
        hash_ = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return hash_.stdout.strip() + ("+" if dirty.stdout.strip() else "")


@dataclass(frozen=True)
class Timing:
    """Seconds of the repeats of one contestant."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def interleaved(
    contestants: Mapping[str, Callable[[], object]], repeats: int = 5, *, until: float = float("inf")
) -> dict[str, Timing]:
    """Time each contestant ``repeats`` times, in turns, after one warm-up each, so that a busy moment hits all alike.

    One that returns a float has measured its own seconds, of that part of its work that is compared. No turn begins that would not end before ``until``, a time of ``time.perf_counter()``; the first is always taken.
    """
    for work in contestants.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats):
        longest = sum(max(values, default=0.0) for values in seconds.values())
        if turn and time.perf_counter() + longest > until:
            break
        for name, work in contestants.items():
            start = time.perf_counter()
            own = work()
            seconds[name].append(own if isinstance(own, float) else time.perf_counter() - start)
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys as an aligned table."""
    if not rows:
        return
    columns = list(rows[0])
    body = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in body)) for i, column in enumerate(columns)]
    for line in [columns, ["-" * width for width in widths], *body]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
