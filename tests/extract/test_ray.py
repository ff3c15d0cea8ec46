"""The real Ray: three hosts on this machine, and workers, hosts and the driver killed at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.cli.parse import parse
from headrace.errors import ConfigError, EngineUnavailableError, PreflightError, StoreError
from headrace.extract.config import ExtractConfig
from headrace.extract.crew_run import open_crew
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.extract.run import run_extraction
from headrace.files import read_json
from headrace.store import Store
from headrace.target import Target
from headrace.testing.extraction import compare_store, make_rows, write_rows
from headrace.testing.served import ServedGround
from headrace.testing.servers import free_port, sglang_capture_server

ROWS = make_rows(1800)
TOKENS = sum(map(len, ROWS))
HOST: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


def config_for(folder: Path, model: Path, **changes: Any) -> ExtractConfig:
    values = {
        "rows": folder / "rows",
        "model": str(model),
        "out": folder / "store",
        "engine": "fake",
        "engine_options": {"tokens_in_flight": 500, "tokens_per_second": TOKENS / 30},
        "shard_bytes": TOKENS * 128 // 20,
        "min_free": 0,
    }
    return ExtractConfig.model_validate({**values, **changes})


# --- without a cluster ----------------------------------------------------------------------------------------------------


def test_ray_alone_on_the_command_line_is_the_cluster_of_this_host() -> None:
    def ray_of(*args: str) -> str:
        return parse(ExtractConfig, "extract", "", ["rows", "--model", "m", "--out", "o", *args]).ray

    assert ray_of() == ""
    assert ray_of("--ray") == ray_of("--ray", "--seed", "3") == "auto"
    assert ray_of("--ray", "10.0.0.1:6379") == ray_of("--ray=10.0.0.1:6379") == "10.0.0.1:6379"


@pytest.mark.slow
def test_ray_is_imported_only_when_asked_for(tmp_path: Path, config_only: Path) -> None:
    write_rows(tmp_path / "rows", ROWS[:20])
    code = (
        "import sys; from headrace.cli import main; code = main(sys.argv[1:]); "
        "assert 'ray' not in sys.modules; sys.exit(code)"
    )
    args = ["extract", str(tmp_path / "rows"), "--model", str(config_only), "--out", str(tmp_path / "store")]
    done = subprocess.run(
        [sys.executable, "-c", code, *args, "--engine", "fake", "--min-free", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_ray_the_command_to_install_it_is_named(
    tmp_path: Path, config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows", ROWS[:20])
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PreflightError, match=r"pip install 'headrace\[ray\]'"):
        run_extraction(config_for(tmp_path, config_only, ray="auto"), lambda text: None)
    assert not (tmp_path / "store").exists(), "nothing was begun"


def test_servers_have_their_gpus_already(tmp_path: Path, config_only: Path) -> None:
    config = config_for(tmp_path, config_only, ray="auto", url=["http://h:1"], ray_gpus=8)
    with pytest.raises(ConfigError, match="--ray-gpus"):
        open_crew(config, Target.open(str(config_only)).spec("eagle3"), "raw", 10)


# --- with one -------------------------------------------------------------------------------------------------------------


class Hosts:
    """A Ray cluster of this machine, and what can be done to it."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={**HOST, "include_dashboard": False})
        self.others = [self.cluster.add_node(**HOST) for _ in range(2)]
        self.address = str(self.cluster.address)

    def lose_one(self, rng: random.Random) -> None:
        """Power off a host that is not the head."""
        self.cluster.remove_node(self.others.pop(rng.randrange(len(self.others))), allow_graceful=False)

    def add_one(self) -> None:
        self.others.append(self.cluster.add_node(**HOST))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    pytest.importorskip("ray")
    made = Hosts()
    yield made
    made.cluster.shutdown()


class Driver:
    """``headrace extract --ray`` as a process of its own."""

    def __init__(self, config: ExtractConfig) -> None:
        self.config = config
        self.files = RunFiles(config.out)
        self.log = config.out.with_name("driver.log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start it (again), as its user would: the same command."""
        c = self.config
        command = [
            sys.executable,
            "-m",
            "headrace",
            "extract",
            str(c.rows),
            "--model",
            c.model,
            "--out",
            str(c.out),
        ]
        command += [
            "--engine",
            c.engine,
            "--shard-bytes",
            str(int(c.shard_bytes)),
            "--min-free",
            "0",
            "--ray",
            c.ray,
        ]
        command += ["--store", c.store] if c.store else []
        command += ["--engine-options", ",".join(f"{k}={v}" for k, v in c.engine_options.items())]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        return self.process

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.files.events) if event["event"] == kind]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """Process ids of the workers of this session that were not lost."""
        events = list(read_events(self.files.events))
        begin = max(n for n, event in enumerate(events) if event["event"] == "start")
        lost = {event["worker"] for event in events[begin:] if event["event"] == "worker_lost"}
        joined = [event for event in events[begin:] if event["event"] == "worker_joined"]
        return [event["pid"] for event in joined if event["worker"] not in lost]

    def wait_for_rows(self, rows: int) -> None:
        """Until ``rows`` rows are durable."""
        place = self.config.store or self.config.out

        def sealed() -> int:
            try:
                return len(Store.open(place))
            except StoreError:  # not begun yet
                return 0

        self.wait_for(lambda: sealed() >= rows)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_hosts_and_the_driver_killed_at_random(
    hosts: Hosts, tmp_path: Path, config_only: Path, seed: int
) -> None:
    """The store equals an undisturbed one, capture by capture, and the account of the last session adds up."""
    rng = random.Random(seed)
    write_rows(tmp_path / "rows", ROWS)
    driver = Driver(config_for(tmp_path, config_only, ray=hosts.address))
    driver.start()
    driver.wait_for(lambda: driver.files.events.exists() and len(driver.workers()) >= 2)
    os.kill(rng.choice(driver.workers()), signal.SIGKILL)
    driver.wait_for(lambda: len(driver.events("worker_lost")) >= 1)
    driver.wait_for_rows(rng.randrange(1, 400))
    assert driver.process is not None
    driver.process.kill()
    driver.process.wait()
    before = set(Store.open(driver.config.out).keys())
    assert 0 < len(before) < len(ROWS)

    driver.start()
    driver.wait_for(lambda: len(driver.events("start")) == 2 and len(driver.workers()) >= 1)
    driver.wait_for_rows(len(before) + 1)
    driver.process.send_signal(signal.SIGTERM)  # in order: what is in flight is finished and sealed
    assert driver.process.wait(60) == 130, driver.log.read_text()
    end = driver.events("end")[-1]["result"]
    stopped = len(Store.open(driver.config.out))
    assert stopped == end["stored"] + end["skipped"] > len(before)
    assert stopped + end["not_reached"] == len(ROWS)

    driver.start()
    driver.wait_for(lambda: len(driver.events("start")) == 3 and len(driver.workers()) >= 2)
    time.sleep(rng.uniform(0.0, 1.0))
    hosts.lose_one(rng)
    lost = len(driver.events("worker_lost"))
    hosts.add_one()
    driver.wait_for(
        lambda: len(driver.events("worker_lost")) > lost or len(Store.open(driver.config.out)) > 1500
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(driver.workers()), signal.SIGKILL)
    assert driver.process.wait(120) == 0, driver.log.read_text()

    comparison = compare_store(driver.config.out, ROWS)
    assert comparison.equal, comparison
    end = driver.events("end")[-1]["result"]
    assert end["stored"] + end["skipped"] == end["rows"] == len(ROWS)
    assert end["skipped_by_reason"] == {"already_stored": end["skipped"]} and end["skipped"] == stopped
    last = driver.events("progress")[-1]
    assert last["rows_done"] == len(ROWS) and last["rows_in_flight"] == last["rows_behind"] == 0
    assert [s["outcome"] for s in read_json(driver.files.manifest)["sessions"]] == [
        "crashed",
        "interrupted",
        "finished",
    ]


@pytest.mark.slow
def test_what_the_cluster_cannot_hold_is_refused(hosts: Hosts, tmp_path: Path, config_only: Path) -> None:
    write_rows(tmp_path / "rows", ROWS[:20])
    with pytest.raises(PreflightError, match="can hold a worker of 8 GPUs"):
        run_extraction(config_for(tmp_path, config_only, ray=hosts.address, ray_gpus=8), lambda text: None)
    with pytest.raises(EngineUnavailableError, match="no Ray cluster at"):
        run_extraction(config_for(tmp_path, config_only, ray="127.0.0.1:1"), lambda text: None)


@pytest.mark.sglang
@pytest.mark.slow
def test_two_real_servers_share_the_rows_and_one_of_them_dies(tmp_path: Path) -> None:
    """Each worker drives the server whose URL it has; what the dead one had not given is had from the other."""
    with ServedGround(tmp_path, 120) as ground:
        second = ground.serve.model_copy(
            update={"port": free_port(), "staging": str(tmp_path / "second-staging")}
        )
        other = sglang_capture_server(second, tmp_path / "second.log")
        with other:
            options = {**ground.config(tmp_path / "store").engine_options, "patience_s": 3.0}
            config = ground.config(tmp_path / "store").model_copy(
                update={
                    "url": [ground.server.url, other.url],
                    "ray": "local",
                    "engine_options": options,
                    "seal_minutes": 0.05,
                }
            )

            def kill_when_it_works() -> None:
                ground.wait_for_captures(config.out)
                other.kill()

            killer = threading.Thread(target=kill_when_it_works)
            killer.start()
            result = run_extraction(config, lambda text: None).done()
            killer.join()
    assert result["stored"] == len(ground.rows)
    comparison = ground.compare(config.out)
    assert comparison.equal, comparison
    events = list(read_events(RunFiles(config.out).events))
    assert len([event for event in events if event["event"] == "worker_joined"]) >= 2


@pytest.mark.sglang
@pytest.mark.slow
def test_a_worker_starts_its_own_server_and_takes_it_along(tmp_path: Path) -> None:
    ground = ServedGround(tmp_path, 30)  # never entered: its server is not started
    serve = ground.serve.model_dump(include={"python", "sglang_args", "staging_bytes", "host_bytes"})
    changes = {"url": [], "ray": "local", "ray_workers": 1, "serve": serve}
    config = ground.config(tmp_path / "store").model_copy(update=changes)
    run_extraction(config, lambda text: None).done()
    comparison = ground.compare(config.out)
    assert comparison.equal, comparison

    def left() -> list[int]:
        processes = psutil.process_iter(["pid", "cmdline"])
        return [p.pid for p in processes if str(ground.model) in " ".join(p.info["cmdline"] or [])]

    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left(), "the server outlived its worker"
