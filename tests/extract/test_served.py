"""The whole command on the real SGLang, with kill -9 of the client and of the server at random moments (both at once: bench/faults.py)."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing.extraction import kill_after
from headrace.testing.served import ServedGround

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGround]:
    with ServedGround(tmp_path_factory.mktemp("served"), 60) as ground:
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
    assert killed >= 1
    ground.finish(store)
    assert_whole(ground, store)


def test_server_killed_and_started_again_under_a_running_client(ground: ServedGround, tmp_path: Path) -> None:
    """The client waits, goes on by itself, and loses nothing."""
    store = tmp_path / "store"
    client = ground.extraction(store)
    client.start()
    ground.wait_for_captures(store)
    ground.server.kill()
    time.sleep(1.0)
    ground.restart()
    client.join(300)
    assert client.exitcode == 0
    assert_whole(ground, store)
