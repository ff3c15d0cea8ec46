"""One process fills a store: refusal, take-over, and the ways in which both go wrong elsewhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from headrace.errors import StoreError, UsageError
from headrace.extract import lock as lock_module
from headrace.extract.lock import STALE_SECONDS, Owner, RunLock, is_live, read_owner

fork = multiprocessing.get_context("fork")


def quiet(text: str) -> None:
    """Nobody listens."""


def hold(path: Path, ready: multiprocessing.synchronize.Event, seconds: float) -> None:
    RunLock.acquire(path, quiet)
    ready.set()
    time.sleep(seconds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "store" / "extract"
    folder.mkdir(parents=True)
    return folder / "lock.json"


def test_second_one_refuses_and_names_the_first(path: Path) -> None:
    first = RunLock.acquire(path, quiet)
    with pytest.raises(UsageError, match=f"process {os.getpid()} on"):
        RunLock.acquire(path, quiet)
    first.release()
    RunLock.acquire(path, quiet).release()
    assert not path.exists()


def test_a_killed_holder_is_taken_over(path: Path) -> None:
    ready = fork.Event()
    child = fork.Process(target=hold, args=(path, ready, 60))
    child.start()
    assert ready.wait(10)
    with pytest.raises(UsageError):
        RunLock.acquire(path, quiet)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    said: list[str] = []
    taken = RunLock.acquire(path, said.append)
    assert said and f"process {child.pid}" in said[0]
    taken.release()


def test_a_reused_process_id_is_not_the_holder(path: Path) -> None:
    """After a reboot of a container the same pid may be someone else: the start time tells."""
    lock = RunLock.acquire(path, quiet)
    path.write_text(json.dumps({"host": lock.owner.host, "pid": os.getpid(), "started": "1", "token": "t"}))
    owner = read_owner(path)
    assert owner is not None and not is_live(path, owner)
    RunLock.acquire(path, quiet).release()


def test_another_machines_lock_lives_by_its_heartbeat(path: Path) -> None:
    other = {"host": "elsewhere/boot/pid", "pid": 1, "started": "5", "token": "t"}
    path.write_text(json.dumps(other))
    with pytest.raises(UsageError, match="process 1 on elsewhere"):
        RunLock.acquire(path, quiet)
    old = time.time() - STALE_SECONDS - 60
    os.utime(path, (old, old))
    RunLock.acquire(path, quiet).release()


def test_clock_set_back_keeps_a_lock_alive(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liveness never reads the wall clock: neither an hour back nor a year ahead changes it."""
    lock = RunLock.acquire(path, quiet)
    for shift in (-3600.0, 3.2e7):
        real = time.time()
        monkeypatch.setattr(time, "time", lambda real=real, shift=shift: real + shift)
        assert is_live(path, lock.owner)
    lock.beat()
    lock.release()


def test_losing_the_lock_stops_the_run(path: Path) -> None:
    lock = RunLock.acquire(path, quiet)
    path.unlink()
    with pytest.raises(StoreError, match="someone who deleted it"):
        lock.beat()
    thief = RunLock.acquire(path, quiet)
    with pytest.raises(StoreError, match="lost"):
        lock.beat()
    lock.release()  # must not release what is not ours
    assert read_owner(path) == thief.owner
    thief.release()


def test_an_unreadable_lock_goes_stale_like_a_foreign_one(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="unreadable"):
        RunLock.acquire(path, quiet)
    os.utime(path, (1, 1))
    RunLock.acquire(path, quiet).release()


def test_a_lock_published_meanwhile_survives_the_take_over(path: Path) -> None:
    """Two processes see the same dead lock; the slower one must not take away the quicker one's."""
    dead = Owner("elsewhere", 1, "1", "dead")
    quick = RunLock.acquire(path, quiet)
    assert not lock_module._take_away(path, dead)
    assert read_owner(path) == quick.owner
    quick.release()


def race(
    path: Path, start: multiprocessing.synchronize.Event, winners: multiprocessing.queues.Queue[int]
) -> None:
    start.wait()
    try:
        RunLock.acquire(path, quiet)
    except UsageError:
        winners.put(0)
        return
    winners.put(1)
    time.sleep(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("dead_lock", [False, True])
def test_of_many_at_once_one_wins(path: Path, dead_lock: bool) -> None:
    if dead_lock:
        path.write_text(
            json.dumps({"host": lock_module._host(), "pid": 2**22 + 1, "started": "1", "token": "t"})
        )
    start, winners = fork.Event(), fork.Queue()
    children = [fork.Process(target=race, args=(path, start, winners)) for _ in range(12)]
    for child in children:
        child.start()
    start.set()
    won = sum(winners.get(timeout=20) for _ in children)
    for child in children:
        child.join()
    assert won == 1


def test_without_hard_links(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT and some FUSE mounts refuse ``link``; creating exclusively takes its place."""

    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lock = RunLock.acquire(path, quiet)
    with pytest.raises(UsageError):
        RunLock.acquire(path, quiet)
    lock.release()
