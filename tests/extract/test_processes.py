"""Worker processes of one host: the store of one process, whoever of them or of their driver is killed, and nobody left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from headrace.engines import vllm
from headrace.engines.fake import FingerprintEngine, FingerprintOptions
from headrace.engines.sglang import engine as sglang
from headrace.engines.vllm_reply import Facts
from headrace.errors import CaptureError, ConfigError, EngineError, HeadraceError, PreflightError
from headrace.extract.config import ExtractConfig
from headrace.extract.crew import LostError, options_of
from headrace.extract.crew_run import _options
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.extract.own_server import die_with_parent
from headrace.extract.parts import make_writer
from headrace.extract.processes import THREADS, VISIBLE, ProcessCluster, ProcessHandle, share_gpus
from headrace.extract.remote_worker import RemoteWorker
from headrace.extract.run import run_extraction
from headrace.files import read_json
from headrace.store import Store
from headrace.testing.extraction import compare_store, make_rows, write_rows
from headrace.types import CaptureSpec

ROWS = make_rows(900)
TOKENS = sum(map(len, ROWS))


def config_for(folder: Path, model: Path, **changes: Any) -> ExtractConfig:
    """About three seconds of work for three workers, in some twenty shards."""
    values = {
        "rows": folder / "rows",
        "model": str(model),
        "out": folder / "store",
        "engine": "fake",
        "engine_options": {"tokens_in_flight": 500, "tokens_per_second": TOKENS / 9},
        "shard_bytes": TOKENS * 128 // 20,
        "min_free": 0,
        "workers": 3,
    }
    return ExtractConfig.model_validate({**values, **changes})


def extract(config: ExtractConfig) -> dict[str, Any]:
    return run_extraction(config, lambda text: None).done()


def events(config: ExtractConfig, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunFiles(config.out).events) if event["event"] == kind]


def assert_whole(config: ExtractConfig) -> None:
    """Equal to an undisturbed run's, and the account of the last session adds up."""
    comparison = compare_store(config.out, ROWS)
    assert comparison.equal, comparison
    end = events(config, "end")[-1]["result"]
    assert end["stored"] + end["skipped"] == end["rows"] == len(ROWS)
    last = events(config, "progress")[-1]
    assert last["rows_done"] == len(ROWS) and last["rows_in_flight"] == last["rows_behind"] == 0
    assert not [path for path in config.out.rglob(".*") if path.is_file()], "temporary files were left"


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """No test may leave a process, not even one that waits to be reaped."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows", ROWS)
    return tmp_path


# --- without a process ------------------------------------------------------------------------------------------------------


def test_workers_here_and_on_ray_exclude_each_other(folder: Path, config_only: Path) -> None:
    with pytest.raises(ConfigError, match=r"--workers 3.*--ray .*--ray-workers"):
        extract(config_for(folder, config_only, ray="auto"))
    assert not (folder / "store").exists(), "nothing was begun"


def test_one_worker_is_this_process(folder: Path, config_only: Path) -> None:
    for workers in (0, 1):
        config = config_for(folder, config_only, workers=workers, out=folder / f"store{workers}", limit=50)
        assert extract(config)["stored"] == 50
        assert not events(config, "worker_joined")


def test_servers_are_shared_out() -> None:
    def urls(count: int, workers: int) -> list[list[str]]:
        given = [f"u{n}" for n in range(count)]
        return [options_of({"url": ["u0"], "x": 1}, given, workers, p)["url"] for p in range(workers)]

    assert urls(1, 3) == [["u0"]] * 3
    assert urls(2, 3) == [["u0"], ["u1"], ["u0"]]
    assert urls(3, 2) == [["u0", "u2"], ["u1"]]
    assert options_of({"url": "u0"}, ["u0", "u1"], 2, 1) == {"url": "u1"}
    assert options_of({"x": 1}, [], 2, 1) == {"x": 1}
    with pytest.raises(ConfigError, match="3 of them need as many workers, and there are 2"):
        options_of({"url": "u0"}, ["u0", "u1", "u2"], 2, 0)


def test_clients_of_one_server_divide_its_staging(tmp_path: Path, config_only: Path) -> None:
    def clients(urls: int, workers: int, engine: str = "sglang", **options: Any) -> int | None:
        given = {"url": [f"http://h:{n}" for n in range(urls)], "workers": workers, "engine_options": options}
        made = _options(config_for(tmp_path, config_only, engine=engine, **given))
        return made.get("clients")

    assert [clients(1, 3), clients(2, 3), clients(2, 2), clients(3, 2)] == [3, 2, None, None]
    assert clients(1, 3, clients=7) == 7
    assert clients(1, 3, "vllm") == 3


def test_several_clients_ask_a_server_for_no_more_than_one_does(spec: CaptureSpec) -> None:
    facts: Any = SimpleNamespace(staging_bytes=1 << 30, settings={"chunked_prefill_size": 8192, "dp_size": 2})
    for share in (sglang._appetite, lambda facts, n: sglang._room(facts, spec, n)):
        alone = share(facts, 1)
        assert [n * share(facts, n) / alone for n in (2, 4, 8)] == pytest.approx([1, 1, 1], rel=1e-3)
        assert 0 < share(facts, 20) < share(facts, 4)
    at_vllm = Facts(max_num_batched_tokens=8192)
    assert [n * vllm._appetite(at_vllm, n) for n in (1, 2, 4)] == [32768] * 3
    assert vllm._appetite(at_vllm, 20) == 8192


def test_each_worker_has_its_gpus(tmp_path: Path, config_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(gpus: int, engine: str = "hf", device: str = "", **changes: Any) -> list[str] | None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        config = config_for(tmp_path, config_only, engine=engine, **changes)
        return share_gpus(config, {"device": device} if device else {}, config.workers)

    monkeypatch.delenv(VISIBLE, raising=False)
    assert shares(4) == ["0", "1", "2"]
    assert shares(8, workers=2, ray_gpus=4) == ["0,1,2,3", "4,5,6,7"]
    assert shares(0) is None and shares(4, device="cpu") is None
    assert shares(1, "fake") is None, "it needs none"
    assert shares(4, "sglang") == ["0", "1", "2"], "for the servers that workers start"
    config = config_for(tmp_path, config_only, engine="sglang", url=["http://h:1"])
    assert share_gpus(config, {"url": ["http://h:1"]}, 3) is None
    for engine in ("hf", "vllm", "sglang"):
        with pytest.raises(
            ConfigError, match="--workers 3 with 1 GPU each need 3 GPUs, and this host shows 2"
        ):
            shares(2, engine)
    with pytest.raises(ConfigError, match="2 GPUs each need 6 GPUs, and this host shows 0"):
        shares(0, "sglang", ray_gpus=2)
    with pytest.raises(ConfigError, match="--device cuda:1"):
        shares(4, device="cuda:1")
    monkeypatch.setenv(VISIBLE, "5, GPU-7a,2")
    assert shares(3) == ["5", "GPU-7a", "2"]


def test_cores_are_shared_out(
    tmp_path: Path, config_only: Path, spec: CaptureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("extract.processes", "store.encode"):
        monkeypatch.setattr(f"headrace.{module}.available_cores", lambda: 24)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv(THREADS, raising=False)
    config = config_for(tmp_path, config_only, engine="hf")
    cluster = ProcessCluster(config, lambda options: options, {})
    assert cluster._environment(0) == {THREADS: "8"}
    monkeypatch.setenv(THREADS, "5")
    assert cluster._environment(0) == {}

    def encoders(workers: int, codec: str = "raw") -> int:
        config = config_for(tmp_path / codec, config_only, workers=workers, shard_bytes=1 << 16)
        with make_writer(config, spec, codec, FingerprintEngine(spec, FingerprintOptions())) as writer:
            return writer._encoders._max_workers

    assert [encoders(workers) for workers in (0, 1, 2, 4, 100)] == [8, 8, 6, 3, 1]
    assert [encoders(workers, "fp8") for workers in (1, 2, 4)] == [4, 4, 3], "no more than pay off"


# --- one process ------------------------------------------------------------------------------------------------------------


class Other(CaptureError):
    """An error as a plug-in may have: made from more than its message."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(f"row {row}: {why}")


class Sleeper:
    """Stands for a worker's own server: a process in a session of its own that ignores nothing."""

    def __init__(self, dies_with_parent: bool) -> None:
        self.process = subprocess.Popen(
            ["sleep", "1000"],
            start_new_session=True,
            preexec_fn=die_with_parent if dies_with_parent else None,
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Puppet(RemoteWorker):
    """Does what its order says. Its setup: whether its server dies with it, None without a server."""

    def __init__(self, setup: Any) -> None:
        self._setup, self._server = setup, None

    def open(self) -> Any:
        server = None if self._setup is None else Sleeper(self._setup)
        self._server = server  # type: ignore[assignment]
        seen = {name: os.environ.get(name) for name in (VISIBLE, THREADS)}
        return seen | {"pid": os.getpid(), "server": server.process.pid if server else 0}

    def exchange(self, order: Any) -> Any:
        if isinstance(order, BaseException):
            raise order
        if order == "other":
            raise Other(3, "too long")
        if order == "outputs":
            return [os.fstat(number).st_ino for number in (1, 2)]
        if order == "fork" and (child := os.fork()) == 0:  # as an engine may do; it has the pipe too
            time.sleep(600)
        if order == "fork":
            return child
        if order == "unsendable":
            return lambda: None
        time.sleep(order if isinstance(order, float) else 0.0)
        return order


@pytest.fixture
def puppet() -> Iterator[ProcessHandle]:
    handle = ProcessHandle(Puppet, None, {VISIBLE: "3", THREADS: "2"})
    yield handle
    handle.kill()
    handle.kill()


def result(handle: ProcessHandle, seconds: float = 60.0) -> Any:
    cluster = object.__new__(ProcessCluster)
    deadline = time.monotonic() + seconds
    while not cluster.wait([handle], 0.1):
        assert time.monotonic() < deadline
    return handle.result()


@pytest.mark.slow
def test_calls_and_errors_travel(puppet: ProcessHandle) -> None:
    puppet.open()
    assert result(puppet) == {VISIBLE: "3", THREADS: "2", "pid": puppet.process.pid, "server": 0}
    for error in (PreflightError("no (see headrace doctor)"), LostError("gone", True), ConfigError("a: b")):
        puppet.exchange(error)  # type: ignore[arg-type]
        with pytest.raises(HeadraceError) as caught:
            result(puppet)
        assert type(caught.value) is type(error) and str(caught.value) == str(error)
        assert getattr(caught.value, "host", None) == getattr(error, "host", None)
    puppet.exchange(ZeroDivisionError("by three"))  # type: ignore[arg-type]
    with pytest.raises(
        EngineError, match=r"(?s)failed:\nTraceback.*in exchange.*ZeroDivisionError: by three"
    ):
        result(puppet)
    puppet.exchange("other")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"Other: row 3: too long"):
        result(puppet)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(puppet.process.pid, number)
    puppet.exchange("still here")  # type: ignore[arg-type]
    assert result(puppet) == "still here"
    puppet.exchange("outputs")  # type: ignore[arg-type]
    assert result(puppet) == [os.fstat(2).st_ino] * 2, "only the driver may write to its stdout"
    puppet.exchange("unsendable")  # type: ignore[arg-type]
    with pytest.raises(LostError, match=rf"worker process {puppet.process.pid} ended with exit code 1"):
        result(puppet)


@pytest.mark.slow
def test_a_killed_process_says_by_what_in_the_middle_of_a_call(puppet: ProcessHandle) -> None:
    puppet.open()
    result(puppet)
    puppet.exchange(600.0)  # type: ignore[arg-type]
    time.sleep(0.1)
    os.kill(puppet.process.pid, signal.SIGSEGV)
    with pytest.raises(
        LostError, match=rf"worker process {puppet.process.pid} was killed by SIGSEGV"
    ) as caught:
        result(puppet, 10)
    assert not caught.value.host
    puppet.exchange(0.0)  # type: ignore[arg-type]
    with pytest.raises(LostError):
        result(puppet, 10)


@pytest.mark.slow
def test_a_forked_child_neither_hides_the_death_nor_outlives_it(puppet: ProcessHandle) -> None:
    puppet.open()
    result(puppet)
    puppet.exchange("fork")  # type: ignore[arg-type]
    child = psutil.Process(result(puppet))
    puppet.exchange(600.0)  # type: ignore[arg-type]
    os.kill(puppet.process.pid, signal.SIGKILL)
    with pytest.raises(LostError, match="was killed by SIGKILL"):
        result(puppet, 10)
    puppet.kill()
    _, alive = psutil.wait_procs([child], 10)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_neither_a_worker_nor_its_server_is_left(killed: bool) -> None:
    """The end of the pipe is the driver's: it ends a worker in the middle of a call, which first stops its server. One that
    is killed has its server end by the system."""
    handle = ProcessHandle(Puppet, killed, {})
    try:
        handle.open()
        server = psutil.Process(result(handle)["server"])
        time.sleep(0.3)
        assert server.status() != psutil.STATUS_ZOMBIE, "it ended while its worker lives"
        handle.exchange(600.0)  # type: ignore[arg-type]
        if killed:
            handle.kill()
        else:
            handle.connection.close()
            assert handle.process.wait(10) == 1
        _, alive = psutil.wait_procs([server], 10)
        assert not alive
    finally:
        handle.kill()


# --- whole extractions ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_processes_make_the_store_of_one(folder: Path, config_only: Path) -> None:
    config = config_for(folder, config_only)
    extract(config)
    assert_whole(config)
    joined = events(config, "worker_joined")
    assert len({event["pid"] for event in joined} - {os.getpid()}) == len(joined) == 3
    shards = len(list(config.out.glob("**/*.safetensors")))
    again = extract(config)
    assert again["skipped_by_reason"] == {"already_stored": len(ROWS)} and again["tokens"] == 0
    assert len(events(config, "worker_joined")) == 3, "the second run started none"
    assert len(list(config.out.glob("**/*.safetensors"))) == shards


@pytest.mark.slow
def test_an_option_refused_in_a_worker_reads_as_in_one_process(folder: Path, config_only: Path) -> None:
    messages = []
    for workers in (1, 2):
        config = config_for(folder, config_only, workers=workers, engine_options={"tokens_in_flight": -5})
        with pytest.raises(ConfigError, match="tokens_in_flight") as caught:
            extract(config)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class Driver:
    """``headrace extract --workers`` as a process in a group of its own, as a shell starts it."""

    def __init__(self, config: ExtractConfig) -> None:
        self.config = config
        self.log = config.out.with_name("driver.log")
        options = ",".join(f"{name}={value}" for name, value in config.engine_options.items())
        self.command = [
            *(sys.executable, "-m", "headrace", "extract", str(config.rows), "--model", config.model),
            *("--out", str(config.out), "--engine", config.engine, "--engine-options", options),
            *(
                "--shard-bytes",
                str(int(config.shard_bytes)),
                "--min-free",
                "0",
                "--workers",
                str(config.workers),
            ),
        ]

    def hurry(self) -> None:
        """The engine as fast as it can be from the next start on."""
        self.command = [word.split(",tokens_per_second")[0] for word in self.command]

    def dawdle(self) -> None:
        """So slow that it is at work still when a killed worker has been replaced, on a busy machine too."""
        self.hurry()
        self.command = [
            f"{word},tokens_per_second={TOKENS / 40}" if word.startswith("tokens_in_flight=") else word
            for word in self.command
        ]

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, process_group=0
            )
        return self.process

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def works(self, sessions: int = 1) -> bool:
        """Whether its session has begun, all workers are there and some rows are sealed."""
        if not RunFiles(self.config.out).events.exists() or len(events(self.config, "start")) < sessions:
            return False
        if len(events(self.config, "worker_joined")) < sessions * self.config.workers:
            return False
        return (self.config.out / "dataset.json").exists() and len(Store.open(self.config.out)) > 50


@pytest.fixture
def driver(folder: Path, config_only: Path) -> Iterator[Driver]:
    slower = {"tokens_in_flight": 500, "tokens_per_second": TOKENS / 14}
    made = Driver(config_for(folder, config_only, engine_options=slower))
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait()


@pytest.mark.slow
def test_a_killed_worker_costs_what_it_had_not_sealed(driver: Driver) -> None:
    driver.dawdle()
    driver.start()
    driver.wait_for(driver.works)
    before = set(Store.open(driver.config.out).keys())
    victim = random.Random(2).choice(driver.workers())
    victim.send_signal(signal.SIGKILL)
    driver.wait_for(lambda: bool(events(driver.config, "worker_lost")))
    assert (
        f"worker process {victim.pid} was killed by SIGKILL"
        in events(driver.config, "worker_lost")[0]["message"]
    )
    assert before <= set(Store.open(driver.config.out).keys())
    driver.wait_for(lambda: len(events(driver.config, "worker_joined")) == 4)  # another one took its place
    driver.process.send_signal(signal.SIGINT)
    assert driver.process.wait(60) == 130, driver.log.read_text()
    assert len(events(driver.config, "worker_lost")) == 1
    assert before <= set(Store.open(driver.config.out).keys())

    driver.hurry()
    driver.start()
    assert driver.process.wait(60) == 0, driver.log.read_text()
    assert_whole(driver.config)


@pytest.mark.slow
def test_workers_end_with_a_killed_driver_and_the_next_run_goes_on(driver: Driver) -> None:
    driver.start()
    driver.wait_for(driver.works)
    workers = driver.workers()
    assert len(workers) == 3
    driver.process.kill()
    driver.process.wait()
    _, alive = psutil.wait_procs(workers, 8)
    assert not alive
    before = len(Store.open(driver.config.out))
    assert 0 < before < len(ROWS)

    driver.start()
    driver.wait_for(lambda: driver.works(2))
    os.killpg(driver.process.pid, signal.SIGINT)  # Ctrl-C, to the whole foreground group
    assert driver.process.wait(30) == 130, driver.log.read_text()
    assert "finishing" in driver.log.read_text() and "Traceback" not in driver.log.read_text()
    end = events(driver.config, "end")[-1]
    stored = len(Store.open(driver.config.out))
    assert end["outcome"] == "interrupted"
    assert before < stored == end["result"]["stored"] + end["result"]["skipped"] < len(ROWS)
    assert stored + end["result"]["not_reached"] == len(ROWS), "all that was written was sealed"
    assert not events(driver.config, "worker_lost")

    driver.hurry()
    driver.start()
    assert driver.process.wait(60) == 0, driver.log.read_text()
    assert_whole(driver.config)
    sessions = read_json(RunFiles(driver.config.out).manifest)["sessions"]
    assert [session["outcome"] for session in sessions] == ["crashed", "interrupted", "finished"]
