"""Processes that are killed, stopped, started twice, and that run out of disk: the store must equal an undisturbed run's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.engines.base import Engine
from headrace.engines.fake import FingerprintEngine, FingerprintOptions
from headrace.extract.config import ExtractConfig
from headrace.extract.disk import DiskGuard
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.files import read_json
from headrace.store import Store
from headrace.testing.extraction import (
    compare_store,
    extraction_process,
    kill_after,
    make_rows,
    run_until_finished,
    write_rows,
)
from headrace.testing.faults import FaultyEngine
from headrace.types import CaptureSpec, Row

pytestmark = pytest.mark.slow

ROWS = make_rows(2500)
TOKENS = sum(map(len, ROWS))


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows", ROWS)


@pytest.fixture
def config(rows_folder: Path, config_only: Path, tmp_path: Path) -> ExtractConfig:
    """About two seconds of work in shards of about a tenth of it."""
    return ExtractConfig(
        rows=rows_folder,
        model=str(config_only),
        out=tmp_path / "store",
        engine="fake",
        engine_options={"tokens_in_flight": 4000, "tokens_per_second": TOKENS / 2},
        shard_bytes=TOKENS * 128 // 15,  # type: ignore[arg-type]
        min_free=0,  # type: ignore[arg-type]
    )


def log_of(config: ExtractConfig) -> str:
    return config.out.with_name(config.out.name + ".log").read_text()


def faster(config: ExtractConfig) -> ExtractConfig:
    return config.model_copy(update={"engine_options": {"tokens_in_flight": 4000}})


def assert_finished(config: ExtractConfig, rows: list[Row] = ROWS) -> None:
    """Equal to an undisturbed run capture by capture, with nothing left over and an account that adds up."""
    comparison = compare_store(config.out, rows)
    assert comparison.equal, comparison
    files = RunFiles(config.out)
    assert not files.lock.exists()
    assert not [p for p in config.out.rglob(".*") if p.is_file()], "temporary files were left"
    end = [event for event in read_events(files.events) if event["event"] == "end"][-1]
    assert end["outcome"] == "finished"


def test_killed_at_random_points(config: ExtractConfig) -> None:
    rng = random.Random(11)
    # Half as fast as elsewhere: on a busy machine two seconds of work were done before the fourth kill.
    slower = config.model_copy(
        update={"engine_options": {"tokens_in_flight": 4000, "tokens_per_second": TOKENS / 4}}
    )
    killed, latest, before = 0, 1.2, 0
    for attempt in range(30):
        if attempt >= 8 and before:
            break
        killed += kill_after(extraction_process(slower), rng.uniform(0.1, latest)) == -signal.SIGKILL
        before = len(Store.open(config.out)) if (config.out / "dataset.json").exists() else 0
        latest += 0.0 if before else 0.2  # a busy machine seals nothing so soon
    assert killed >= 4
    assert before, "nothing was ever sealed: the kills prove nothing"
    comparison = compare_store(config.out, ROWS)
    assert not comparison.wrong and not comparison.strange
    assert run_until_finished(lambda: extraction_process(faster(config))) == 1
    assert_finished(config)
    assert "taking over from process" in log_of(config)
    outcomes = [session["outcome"] for session in read_json(RunFiles(config.out).manifest)["sessions"]]
    assert set(outcomes[:-1]) == {"crashed"} and outcomes[-1] == "finished"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_what_is_in_flight(config: ExtractConfig, number: int) -> None:
    assert kill_after(extraction_process(config), 1.0, number) == 130
    assert "finishing" in log_of(config) and "Interrupted" in log_of(config)
    stored = Store.open(config.out)
    assert 0 < len(stored) < len(ROWS)
    end = [event for event in read_events(RunFiles(config.out).events) if event["event"] == "end"][-1]
    assert end["outcome"] == "interrupted"
    account = end["result"]
    assert account["stored"] == len(stored)  # all that was written was sealed
    assert account["stored"] + account["not_reached"] == account["rows"] == len(ROWS)
    assert run_until_finished(lambda: extraction_process(faster(config))) == 1
    assert_finished(config)


def deaf(spec: CaptureSpec) -> Engine:
    """As nohup starts a process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return FingerprintEngine(
        spec, FingerprintOptions(tokens_in_flight=4000, tokens_per_second=TOKENS / 1.5, seed=0)
    )


def test_under_nohup_the_end_of_the_terminal_is_ignored(config: ExtractConfig) -> None:
    assert kill_after(extraction_process(config, deaf), 0.8, signal.SIGHUP) == 0
    assert_finished(config)


def hanging(spec: CaptureSpec) -> Engine:
    answers = iter([""] * 300)
    options = FingerprintOptions(tokens_in_flight=4000, tokens_per_second=0.0, seed=0)
    return FaultyEngine(spec, lambda key: next(answers, "hang"), options)


def test_a_second_signal_stops_at_once(config: ExtractConfig) -> None:
    """With an engine that will never answer, the first signal waits; the second must not."""
    process = extraction_process(config, hanging)
    process.start()
    assert process.pid is not None
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGINT)
    process.join(1.5)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(5)
    assert process.exitcode == 130
    assert not RunFiles(config.out).lock.exists()
    assert run_until_finished(lambda: extraction_process(faster(config))) == 1
    assert_finished(config)


def test_the_same_run_started_twice(config: ExtractConfig) -> None:
    first = extraction_process(config)
    first.start()
    time.sleep(0.7)
    assert kill_after(extraction_process(config), 30) == 2
    assert f"is being filled by process {first.pid}" in log_of(config)
    first.join(60)
    assert first.exitcode == 0
    assert_finished(config)


def test_rows_changed_between_runs(config: ExtractConfig, tmp_path: Path) -> None:
    """Killed, then the folder loses a third of its rows and gains others in another order: keys decide."""
    changing = config.model_copy(update={"rows": tmp_path / "rows"})
    write_rows(tmp_path / "rows", ROWS)
    kill_after(extraction_process(changing), 1.2)
    new = [*reversed(ROWS[800:]), *make_rows(400, seed=9)]
    write_rows(tmp_path / "rows", new)
    assert run_until_finished(lambda: extraction_process(faster(changing))) == 1
    comparison = compare_store(config.out, new)
    assert not comparison.lost and not comparison.wrong
    assert set(comparison.strange) <= {row.key for row in ROWS[:800]}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; skipped where mounting is refused."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def grow(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


def on_small_disk(config: ExtractConfig, small_disk: Path) -> ExtractConfig:
    """10 MB of raw states for 2 MiB of disk, in shards of 170 kB."""
    changes = {
        "out": small_disk / "store",
        "skip_preflight": True,
        "codec": "raw",
        "shard_bytes": TOKENS * 128 // 60,
    }
    return faster(config).model_copy(update=changes)


def without_guard(spec: CaptureSpec) -> Engine:
    """Blinds the disk guard of this (child) process, as another program that fills the disk in a moment would."""
    DiskGuard.look = lambda self: None  # type: ignore[method-assign]
    DiskGuard.take = lambda self, size: True  # type: ignore[method-assign]
    return FingerprintEngine(spec, FingerprintOptions(tokens_in_flight=4000, tokens_per_second=0.0, seed=0))


def test_disk_full_stops_cleanly_and_resumes(config: ExtractConfig, small_disk: Path, tmp_path: Path) -> None:
    """ST-08, where the write itself fails: every shard sealed before stays good, the command fails, a rerun finishes."""
    full = on_small_disk(config, small_disk)
    log = tmp_path / "run.log"
    assert kill_after(extraction_process(full, without_guard, log), 60) == 1
    assert "no space left" in log.read_text() and "it resumes" in log.read_text()
    comparison = compare_store(full.out, ROWS)
    assert comparison.lost and not comparison.wrong and not comparison.strange
    assert len(comparison.lost) < len(ROWS)
    grow(small_disk)
    assert run_until_finished(lambda: extraction_process(full, None, log)) == 1
    assert_finished(full)


def test_disk_full_pauses_says_so_and_goes_on(
    config: ExtractConfig, small_disk: Path, tmp_path: Path
) -> None:
    paused = on_small_disk(config, small_disk)
    log = tmp_path / "run.log"
    process = extraction_process(paused, None, log)
    process.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (log.exists() and "paused" in log.read_text()):
        time.sleep(0.1)
    assert "needed; free some and it goes on by itself" in log.read_text()
    time.sleep(1.0)
    assert process.is_alive()
    grow(small_disk)
    process.join(60)
    assert process.exitcode == 0
    assert_finished(paused)


def test_disk_that_stays_full_fails_the_command_with_all_it_wrote(
    config: ExtractConfig, small_disk: Path, tmp_path: Path
) -> None:
    paused = on_small_disk(config, small_disk).model_copy(update={"pause_minutes": 0.02})
    log = tmp_path / "run.log"
    assert kill_after(extraction_process(paused, None, log), 60) == 1
    assert "paused" in log.read_text() and "run the command again" in log.read_text()
    stored = Store.open(paused.out)
    assert 0 < len(stored) < len(ROWS)
    end = [event for event in read_events(RunFiles(paused.out).events) if event["event"] == "end"][-1]
    assert end["outcome"] == "failed" and end["result"]["stored"] == len(stored)
    grow(small_disk)
    assert run_until_finished(lambda: extraction_process(paused, None, log)) == 1
    assert_finished(paused)
