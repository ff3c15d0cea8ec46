"""The whole command on the real SGLang, with kill -9 of the client, of the server, and of both, at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.testing.extraction import kill_after
from headrace.testing.served import ServedGround

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGround]:
    with ServedGround(tmp_path_factory.mktemp("served"), 160) as ground:
        yield ground


def assert_whole(ground: ServedGround, store: Path) -> None:
    comparison = ground.compare(store)
    assert comparison.equal, comparison
    staging = Path(ground.serve.staging)
    assert not [path for path in staging.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16], (
        "staged captures were left"
    )


def test_client_killed_at_random_moments(ground: ServedGround, tmp_path: Path) -> None:
    store = tmp_path / "store"
    rng = random.Random(3)
    killed = sum(
        kill_after(ground.extraction(store), rng.uniform(0.5, 3.0)) == -signal.SIGKILL for _ in range(4)
    )
    assert killed >= 2
    ground.finish(store)
    assert_whole(ground, store)


def test_server_killed_and_started_again_under_a_running_client(ground: ServedGround, tmp_path: Path) -> None:
    """The client waits, goes on by itself, and loses nothing."""
    store = tmp_path / "store"
    client = ground.extraction(store)
    client.start()
    wait_for_captures(store)
    ground.server.kill()
    time.sleep(1.0)
    ground.restart()
    client.join(300)
    assert client.exitcode == 0
    assert_whole(ground, store)


def test_both_killed(ground: ServedGround, tmp_path: Path) -> None:
    store = tmp_path / "store"
    client = ground.extraction(store)
    client.start()
    wait_for_captures(store)
    assert client.pid is not None
    ground.server.kill()
    os.kill(client.pid, signal.SIGKILL)
    client.join(30)
    ground.restart()
    ground.finish(store)
    assert_whole(ground, store)


def wait_for_captures(store: Path) -> None:
    """Until the run's log tells of the first captures."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        events = read_events(RunFiles(store).events)
        if any(event["event"] == "progress" and event["rows_done"] > 0 for event in events):
            return
        time.sleep(0.1)
    raise AssertionError("no capture within two minutes")
