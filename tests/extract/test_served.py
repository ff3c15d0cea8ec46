"""The whole command on the real SGLang, with kill -9 of the client and of the server at random moments (both at once: bench/faults.py)."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.extract.run import run_extraction
from headrace.store import Store
from headrace.testing.extraction import kill_after
from headrace.testing.served import TOLERANCE, ServedGround

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


def test_two_worker_processes_of_one_server_make_the_store_of_one(
    ground: ServedGround, tmp_path: Path
) -> None:
    """Two clients at a time: neither takes or deletes the other's captures, and both have their part of the staging folder."""
    one, two = ground.config(tmp_path / "one"), ground.config(tmp_path / "two")
    run_extraction(one, lambda text: None).done()
    # Asking for little at a time, else the first worker has all rows before the second is there.
    few = {**two.engine_options, "tokens_in_flight": 400}
    two = two.model_copy(update={"workers": 2, "engine_options": few})
    run_extraction(two, lambda text: None).done()
    assert_whole(ground, one.out)
    assert_whole(ground, two.out)
    alone, shared = Store.open(one.out), Store.open(two.out)
    assert alone.key_set == shared.key_set
    for key in alone.key_set:
        expected = alone[key].states
        error = (shared[key].states - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) <= TOLERANCE
    events = list(read_events(RunFiles(two.out).events))
    assert len([event for event in events if event["event"] == "worker_joined"]) == 2
    assert not [event for event in events if event["event"] in ("worker_lost", "failure", "round")]
    assert not list((Path(ground.serve.staging) / "clients").iterdir()), "a client has not signed out"
