"""Faults, each many times at random points: how many captures were lost, how many were wrong (both must be 0).

    python bench/faults.py [--quick] [--json FILE]

Every row is one kind of fault. Faults of an engine are injected into its answers; faults of the process, the machine and the
user are done to real processes. Afterwards the command is simply run again until it succeeds, and every capture in
the store is read back and compared, value by value, with what an undisturbed run makes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Bench, main
from headrace.engines.base import Engine
from headrace.engines.fake import FingerprintEngine, FingerprintOptions
from headrace.extract.config import ExtractConfig
from headrace.extract.disk import DiskGuard
from headrace.testing.extraction import (
    compare_store,
    extraction_process,
    kill_after,
    make_rows,
    run_until_finished,
    write_rows,
)
from headrace.testing.faults import SPOILERS, FaultyEngine, Script, random_script
from headrace.testing.models import make_config_only
from headrace.types import CaptureSpec, Row

IN_FLIGHT = 4000
PERSISTENT = ("late", "twice", "stray")


class Ground:
    """Rows and a model in a folder; a store a fault."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.rows = make_rows(count)
        self.tokens = sum(map(len, self.rows))
        write_rows(folder / "rows", self.rows)
        make_config_only(folder / "model")
        self._stores = itertools.count()

    def config(self, seconds: float = 0.0, **changes: Any) -> ExtractConfig:
        """An extraction into a new store that takes about ``seconds`` (0 = as fast as it goes), in about fifteen shards."""
        options = {
            "tokens_in_flight": IN_FLIGHT,
            "tokens_per_second": self.tokens / seconds if seconds else 0.0,
        }
        values = {
            "rows": self.folder / "rows",
            "model": str(self.folder / "model"),
            "out": self.folder / f"store-{next(self._stores)}",
            "engine": "fake",
            "engine_options": options,
            "shard_bytes": self.tokens * 128 // 15,
            "min_free": 0,
            "max_failed_share": 1.0,
            "max_failures_in_a_row": 10_000,  # rows that were never answered come to light together, when the engine ends
            "tries": 12,
            "engine_wait_minutes": 0.05,
            "stall_minutes": 0.01,
        }
        return ExtractConfig.model_validate({**values, **changes})


def engine_fault(ground: Ground, fault: str, seed: int) -> tuple[Path, int]:
    """Answers spoiled at random in one run in five; then the command again until it is through."""
    config = ground.config()
    count = ground.folder / f"injected-{fault}"
    # Rows that are answered last or never stay in flight: at 5 % they would fill it, which is the fault "engine hangs".
    script = random_script({fault: 0.02 if fault in ("missing", "late") else 0.05}, seed)

    def counted(key: str) -> str:
        found = script(key)
        if found:
            with open(count, "a") as file:
                file.write("x")
        return found

    def make(spec: CaptureSpec) -> Engine:
        return FaultyEngine(spec, counted, fast())

    code = kill_after(extraction_process(config, make), 300)
    assert code == 0, f"{fault}: the run ended with {code}; see {config.out}.log"
    run_until_finished(lambda: extraction_process(config))
    return config.out, count.stat().st_size if count.exists() else 0


def dying_engine(ground: Ground, fault: str, times: int, seed: int) -> tuple[Path, int]:
    """The engine dies or hangs at a random answer, in run after run."""
    config = ground.config()
    rng = random.Random(seed)

    def script() -> Script:
        answers = itertools.count()
        fatal = rng.randrange(len(ground.rows) // times)
        return lambda key: fault if next(answers) == fatal else ""

    for _ in range(times):
        # The answer at which it dies is drawn here, in the parent: the child's random numbers would repeat.
        doom = script()
        kill_after(extraction_process(config, lambda spec, doom=doom: FaultyEngine(spec, doom, fast())), 120)  # type: ignore[misc]
    run_until_finished(lambda: extraction_process(config))
    return config.out, times


def signalled(ground: Ground, number: int, times: int, seed: int) -> tuple[Path, int]:
    """The process is signalled at a random moment, again and again, and each time started once more."""
    rng = random.Random(seed)
    config = ground.config(seconds=0.3 * times)
    done = 0
    for _ in range(3 * times):
        code = kill_after(extraction_process(config), rng.uniform(0.15, 1.0), number)
        done += code in (-signal.SIGKILL, 130)
        if code == 0 or done >= times:
            break
    run_until_finished(
        lambda: extraction_process(
            config.model_copy(update={"engine_options": {"tokens_in_flight": IN_FLIGHT}})
        )
    )
    return config.out, done


def started_twice(ground: Ground, times: int, seed: int) -> tuple[Path, int]:
    """A second process, and a third, while the first one fills the store."""
    config = ground.config(seconds=0.5 * times)
    first = extraction_process(config)
    first.start()
    refused = 0
    rng = random.Random(seed)
    while first.is_alive() and refused < times:
        time.sleep(rng.uniform(0.05, 0.3))
        refused += kill_after(extraction_process(config), 30) == 2
    first.join()
    run_until_finished(lambda: extraction_process(config))
    return config.out, refused


def rows_changed(ground: Ground, times: int, seed: int) -> tuple[Path, int]:
    """The row folder is written anew, in another order, between kills."""
    rng = random.Random(seed)
    config = ground.config(seconds=0.4 * times, rows=ground.folder / "changing")
    for _ in range(times):
        write_rows(
            config.rows, rng.sample(ground.rows, k=rng.randrange(len(ground.rows) // 2, len(ground.rows)))
        )
        kill_after(extraction_process(config), rng.uniform(0.2, 0.8))
    write_rows(config.rows, ground.rows)
    run_until_finished(lambda: extraction_process(config))
    return config.out, times


def clock_set_back(ground: Ground, times: int, seed: int) -> tuple[Path, int]:
    """The wall clock jumps back while the run goes on; then the run is killed, and started again in that past."""
    rng = random.Random(seed)
    config = ground.config(seconds=0.4 * times)
    for jump in range(times):
        shift = 3600.0 * (jump + 1)

        def make(spec: CaptureSpec, shift: float = shift) -> Engine:
            real = time.time
            time.time = lambda: real() - shift
            return FingerprintEngine(spec, FingerprintOptions.model_validate(config.engine_options))

        kill_after(extraction_process(config, make), rng.uniform(0.3, 0.9))
    run_until_finished(lambda: extraction_process(config))
    return config.out, times


def disk_full(ground: Ground, guarded: bool, times: int) -> tuple[Path, int] | None:
    """A small file system fills up, is grown a little, fills up again; None where none can be mounted."""
    mount = ground.folder / f"small-{guarded}"
    mount.mkdir()
    mebibytes = 2

    def size() -> str:
        return f"size={mebibytes}m"

    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size(), "tmpfs", mount], capture_output=True, check=False
    ).returncode:
        return None
    store = ground.folder / f"store-full-{guarded}"
    try:
        config = ground.config(out=mount / "store", codec="raw", skip_preflight=True, pause_minutes=0.005)
        config = config.model_copy(update={"shard_bytes": ground.tokens * 128 // 100})
        full = 0
        for _ in range(times):
            process = extraction_process(config, None if guarded else blind, ground.folder / "full.log")
            if kill_after(process, 60) == 0:
                break
            full += 1
            mebibytes += 1
            subprocess.run(["mount", "-o", f"remount,{size()}", mount], check=True)
        subprocess.run(["mount", "-o", "remount,size=256m", mount], check=True)
        run_until_finished(lambda: extraction_process(config, None, ground.folder / "full.log"))
        shutil.copytree(mount / "store", store)
    finally:
        subprocess.run(["umount", mount], check=True)
    return store, full


def blind(spec: CaptureSpec) -> Engine:
    """Blinds the disk guard of this process, as another program that fills the disk in a moment would."""
    DiskGuard.look = lambda self: None  # type: ignore[method-assign]
    DiskGuard.take = lambda self, size: True  # type: ignore[method-assign]
    return FingerprintEngine(spec, fast())


def fast() -> FingerprintOptions:
    """Options of an engine that answers as fast as it can."""
    return FingerprintOptions.model_validate({"tokens_in_flight": IN_FLIGHT})


def faults(ground: Ground, times: int) -> dict[str, Callable[[], tuple[Path, int] | None]]:
    """Name → what does it and returns the finished store and how often it struck."""
    table: dict[str, Callable[[], tuple[Path, int] | None]] = {
        "client killed (SIGKILL)": lambda: signalled(ground, signal.SIGKILL, times, 1),
        "client stopped (SIGTERM)": lambda: signalled(ground, signal.SIGTERM, times, 2),
        "client interrupted (SIGINT)": lambda: signalled(ground, signal.SIGINT, times, 3),
        "same run started twice": lambda: started_twice(ground, times, 4),
        "row folder changed between runs": lambda: rows_changed(ground, times, 5),
        "clock set back": lambda: clock_set_back(ground, times, 6),
        "disk full, guard waits": lambda: disk_full(ground, True, times),
        "disk full, write fails": lambda: disk_full(ground, False, times),
        "engine dies": lambda: dying_engine(ground, "die", times, 7),
        "engine hangs": lambda: dying_engine(ground, "hang", min(times, 6), 8),
    }
    for number, fault in enumerate([*SPOILERS, "fail", "missing", *PERSISTENT]):
        table[f"answer: {fault.replace('_', ' ')}"] = lambda fault=fault, number=number: engine_fault(
            ground, fault, number
        )  # type: ignore[misc]
    return table


def served_faults(folder: Path, times: int, bench: Bench) -> tuple[int, int, int]:
    """The real SGLang: kill -9 of the client, of the server under a running client, and of both. (injected, lost, wrong)."""
    from headrace.testing.served import ServedGround

    rng = random.Random(9)
    totals = [0, 0, 0]

    def client_killed(ground: ServedGround, store: Path) -> int:
        return sum(
            kill_after(ground.extraction(store), rng.uniform(0.5, 3.0)) == -signal.SIGKILL
            for _ in range(times)
        )

    def server_killed(ground: ServedGround, store: Path) -> int:
        client = ground.extraction(store)
        client.start()
        killed = 0
        while killed < max(1, times // 4) and client.is_alive():
            ground.wait_for_captures(store)
            time.sleep(rng.uniform(0.0, 2.0))
            ground.server.kill()
            ground.restart()
            killed += 1
        client.join(300)
        return killed

    def both_killed(ground: ServedGround, store: Path) -> int:
        for _ in range(max(1, times // 4)):
            client = ground.extraction(store)
            client.start()
            time.sleep(rng.uniform(1.0, 6.0))
            ground.server.kill()
            client.kill()
            client.join(30)
            ground.restart()
        return max(1, times // 4)

    with ServedGround(folder / "served", 60 if times < 10 else 400) as ground:
        for name, act in (
            ("client killed", client_killed),
            ("server killed", server_killed),
            ("both killed", both_killed),
        ):
            began = time.perf_counter()
            store = folder / f"served-{name.replace(' ', '-')}"
            injected = act(ground, store)
            ground.finish(store)
            comparison = ground.compare(store)
            lost, wrong = len(comparison.lost), len(comparison.wrong) + len(comparison.strange)
            seconds = round(time.perf_counter() - began, 1)
            bench.row(
                fault=f"real SGLang: {name}",
                injected=injected,
                lost=lost,
                wrong=wrong,
                seconds=seconds,
                note="",
            )
            totals = [a + b for a, b in zip(totals, (injected, lost, wrong), strict=True)]
    return totals[0], totals[1], totals[2]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside the common ones."""
    parser.add_argument(
        "--sglang", action="store_true", help="also kill clients and servers of the real SGLang on the CPU"
    )
    parser.add_argument("--only", default="", help="run the faults whose name contains this")


def run(bench: Bench) -> None:
    """All faults, one after another."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="headrace-faults-"))
    lost = wrong = injected = 0
    try:
        ground = Ground(folder, 400 if bench.quick else 4000)
        for name, act in faults(ground, 2 if bench.quick else 25).items():
            if bench.args.only not in name:
                continue
            began = time.perf_counter()
            found = act()
            if found is None:
                bench.row(
                    fault=name, injected=0, lost=0, wrong=0, seconds=0.0, note="no tmpfs can be mounted here"
                )
                continue
            counts = report(bench, name, found, ground.rows, time.perf_counter() - began)
            injected, lost, wrong = injected + found[1], lost + counts[0], wrong + counts[1]
        if bench.args.sglang:
            served = served_faults(folder, 2 if bench.quick else 25, bench)
            injected, lost, wrong = injected + served[0], lost + served[1], wrong + served[2]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bench.target("captures lost", lost, 0, lost == 0)
    bench.target("captures wrong", wrong, 0, wrong == 0)
    bench.target("faults injected", injected, 1, injected > 0)


def report(
    bench: Bench, name: str, found: tuple[Path, int], rows: list[Row], seconds: float
) -> tuple[int, int]:
    """Compare the store and add the row."""
    store, times = found
    comparison = compare_store(store, rows)
    lost, wrong = len(comparison.lost), len(comparison.wrong) + len(comparison.strange)
    bench.row(fault=name, injected=times, lost=lost, wrong=wrong, seconds=round(seconds, 1), note="")
    print(f"{name}: {times} injected, {lost} lost, {wrong} wrong", flush=True)
    shutil.rmtree(store)
    return lost, wrong


if __name__ == "__main__":
    main("faults", run, arguments)
