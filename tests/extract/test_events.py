"""The event log: whole lines after any kill, bounded files, cheap tails, readable while it grows."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from headrace.extract import events
from headrace.extract.events import EventLog, read_events, rotated, tail_events

fork = multiprocessing.get_context("fork")


def numbers(found: list[dict[str, object]]) -> list[object]:
    return [event["n"] for event in found]


def test_written_and_read_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for n in range(50):
        log.write("x", n=n, text="naïve \n line")
    log.close()
    assert numbers(list(read_events(log.path))) == list(range(50))
    assert numbers(tail_events(log.path, 7)) == list(range(43, 50))
    assert all(line.endswith("}") for line in log.path.read_text().splitlines())


def test_rotation_bounds_the_files_and_keeps_the_newest(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", max_bytes=2000, keep=3)
    for n in range(1000):
        log.write("x", n=n)
    log.close()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["events.1.jsonl", "events.2.jsonl", "events.3.jsonl", "events.jsonl"]
    assert all(p.stat().st_size <= 2000 for p in tmp_path.iterdir())
    kept = numbers(list(read_events(log.path)))
    assert kept == list(range(1000 - len(kept), 1000)) and len(kept) > 100
    assert numbers(tail_events(log.path, 100)) == list(range(900, 1000))  # reaches back into a rotated file


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for n in range(5):
        log.write("x", n=n)
    log.close()
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    expected = [0, 1, 2, 3] if cut > 1 else [0, 1, 2, 3, 4]  # losing only the newline loses nothing
    assert numbers(list(read_events(path))) == expected
    log = EventLog(path)
    log.write("x", n=9)
    log.close()
    assert numbers(list(read_events(path))) == [*expected, 9]
    assert numbers(tail_events(path, 2)) == [expected[-1], 9]


def test_no_log_reads_as_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none.jsonl")) == tail_events(tmp_path / "none.jsonl") == []


def test_tail_cost_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    with open(path, "w") as file:
        for n in range(100_000):
            file.write(json.dumps({"time": 1.0, "event": "x", "n": n}) + "\n")
    looked_at: list[bytes] = []
    real = events.parse_event
    monkeypatch.setattr(events, "parse_event", lambda line: looked_at.append(line) or real(line))
    assert numbers(tail_events(path, 50)) == list(range(99_950, 100_000))
    assert len(looked_at) < 5000


def write_for_ever(path: Path) -> None:
    log = EventLog(path, max_bytes=20_000, keep=50)
    n = 0
    while True:
        log.write("x", n=n, pad="y" * (n % 300))
        n += 1


@pytest.mark.slow
def test_killed_at_random_moments_no_line_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for kill in range(12):
        child = fork.Process(target=write_for_ever, args=(path,))
        child.start()
        time.sleep(0.02 + 0.013 * kill)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    broken = 0
    for file in [path, *(rotated(path, n) for n in range(1, 51))]:
        if file.exists():
            for line in file.read_bytes().splitlines():
                try:
                    json.loads(line)
                except ValueError:
                    broken += bool(line)
    assert broken <= 12  # at most the line each kill tore, and they stand alone
    assert len(list(read_events(path))) > 100


def test_a_full_disk_costs_events_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("x", n=0)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 20:
            real(fd, data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    log.write("x", n=1)
    log.write("x", n=2)
    monkeypatch.setattr(
        os, "write", lambda fd, data: real(fd, data[:15])
    )  # a short write tells of it in another way
    log.write("x", n=3)
    monkeypatch.undo()
    log.write("x", n=4)
    assert numbers(list(read_events(log.path))) == [0, 4]
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(OSError, match="I/O error"):
        log.write("x", n=5)
