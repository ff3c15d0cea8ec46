"""Real SGLang servers that are killed and come back, clients that are killed, and a staging folder that is far too small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.data.rows import RowWriter
from headrace.engines import Engine, open_engine
from headrace.store import Store
from headrace.target import Target
from headrace.testing.engine import EngineTests, Reference, mixed_rows, row_error, transformers_reference
from headrace.testing.servers import ServerMaker, ServerProcess
from headrace.types import FINAL, Capture, Row

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TAPS = (2, 3, 5, FINAL)
TEXT = "2,3,5,final"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return transformers_reference(model, TAPS)


@pytest.fixture(scope="module")
def small_staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system with room for the longest prompt and not for much more; an ordinary folder where mounting is refused."""
    folder = tmp_path_factory.mktemp("small-staging")
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def server(make_server: ServerMaker, model: Path, small_staging: Path) -> Iterator[ServerProcess]:
    """Overlap off, prefix cache on, and a staging budget a hundred times what the file system holds."""
    flags = ("--disable-overlap-schedule",)
    with make_server(
        model, taps=TEXT, prefix_cache=True, flags=flags, staging=str(small_staging / "staging")
    ) as running:
        yield running


def connect(model: Path, *servers: ServerProcess, **options: Any) -> Engine:
    target = Target.open(str(model))
    spec = target.spec(list(TAPS), dtype="float32")
    return open_engine("sglang", target, spec, {"url": [server.url for server in servers], **options})


def check(results: list[Any], rows: list[Row], reference: Reference) -> None:
    assert sorted(result.key for result in results) == sorted(row.key for row in rows)
    by_key = {row.key: row for row in rows}
    for result in results:
        assert isinstance(result, Capture), result
        assert row_error(result.states, reference(by_key[result.key])) <= TOLERANCE


class TestConformance(EngineTests):
    """The suite every engine runs, on the server with four megabytes of staging."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, server: ServerProcess, model: Path) -> Iterator[Engine]:
        with connect(model, server, tokens_in_flight=2000) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, model: Path) -> Reference:
        return transformers_reference(model, TAPS)


def test_more_in_flight_than_the_folder_holds(
    server: ServerProcess, model: Path, reference: Reference, small_staging: Path
) -> None:
    """Captures that meet a full file system are refused with the reason and asked for again; none is lost or torn."""
    rows = mixed_rows(60, longest=400, vocab=40_000, seed=21)
    assert sum(len(row) for row in rows) * 4 * 64 * 4 > 4 << 20
    with connect(model, server, tokens_in_flight=20_000) as engine:
        check(list(engine.capture(iter(rows))), rows, reference)
    left = [file for file in small_staging.rglob("*") if file.suffix in (".part", ".safetensors")]
    assert left == []


def test_same_prefixes_with_the_cache_on(server: ServerProcess, model: Path, reference: Reference) -> None:
    """EX-01: two rows that share their first ten ids, one after the other, and the same row twice."""
    shared = list(range(500, 510))
    first, second = (Row.make([*shared, *range(a, a + 5)], [True] * 15) for a in (600, 700))
    with connect(model, server, tokens_in_flight=15) as engine:
        for row in (first, second, first):
            check(list(engine.capture(iter([row]))), [row], reference)


def test_killed_extraction_goes_on(
    server: ServerProcess, model: Path, reference: Reference, small_staging: Path, tmp_path: Path
) -> None:
    """kill -9 of ``headrace extract`` with requests in flight; the same command again finds a clean folder and ends complete."""
    rows = [
        Row.make(row.ids, [True] * len(row)) for row in mixed_rows(150, longest=300, vocab=40_000, seed=31)
    ]
    with RowWriter(tmp_path / "rows") as writer:
        for row in rows:
            writer.add(row)
    store = tmp_path / "store"
    command = [
        sys.executable,
        "-m",
        "headrace",
        "extract",
        str(tmp_path / "rows"),
        "--model",
        str(model),
        "--out",
        str(store),
    ]
    command += [
        "--taps",
        TEXT,
        "--dtype",
        "float32",
        "--codec",
        "raw",
        "--engine",
        "sglang",
        "--url",
        server.url,
    ]
    command += ["--seal-minutes", "0.005", "--engine-options", "tokens_in_flight=2000", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "wb") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + 200
        while (
            not list(store.glob("shards/*.safetensors"))
            and first.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert first.poll() is None, (tmp_path / "log").read_text()[-3000:]
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    result = json.loads(again.stdout)
    assert result["captures"] == len(rows) and 0 < result["stored"] < len(rows), result
    captured = Store.open(store)
    assert sorted(captured.keys()) == sorted(row.key for row in rows)
    for row in rows:
        assert row_error(captured[row.key].states, reference(row)) <= TOLERANCE
    left = [file for file in small_staging.rglob("*") if file.suffix in (".part", ".safetensors")]
    assert left == [], "what the killed client left stays"


def test_extraction_refuses_a_server_that_fails_a_check(
    server: ServerProcess, model: Path, tmp_path: Path
) -> None:
    with RowWriter(tmp_path / "rows") as writer:
        writer.add(Row.make([5, 6, 7], [True] * 3))
    arguments = [
        "extract",
        str(tmp_path / "rows"),
        "--model",
        str(model),
        "--out",
        str(tmp_path / "store"),
        "--taps",
        "2,4,final",
    ]
    assert (
        main([*arguments, "--dtype", "float32", "--codec", "raw", "--engine", "sglang", "--url", server.url])
        == 3
    )
    assert not list(tmp_path.glob("store/shards/*"))


def test_killed_server_and_back(
    make_server: ServerMaker, server: ServerProcess, model: Path, reference: Reference
) -> None:
    """Two servers; one is killed with rows in flight, its rows go to the other; started again, it is used again."""
    other = make_server(model, taps=TEXT)
    again = make_server(model, taps=TEXT, port=int(other.url.rsplit(":", 1)[1]), staging=staging_of(other))
    rows = mixed_rows(90, longest=200, vocab=40_000, seed=41)
    killed = False
    sent: list[Row] = []

    def feed() -> Iterator[Row]:
        for place, row in enumerate(rows):
            if (
                place == 60
            ):  # by now the other one has answered alone; wait until the killed one is back and seen
                again.wait_healthy()
                deadline = time.monotonic() + 30
                while engine.gauges()["servers_up"] < 2 and time.monotonic() < deadline:
                    time.sleep(0.1)
            sent.append(row)
            yield row

    with other, connect(model, other, server, tokens_in_flight=1500, patience_s=120.0) as engine:
        results = []
        for result in engine.capture(feed()):
            results.append(result)
            if len(results) == 10 and not killed:
                other.kill()
                killed = True
                again.start()
        check(results, rows, reference)
        gauges = engine.gauges()
        assert gauges["servers_up"] == 2 and gauges["server_faults"] > 0
        again.stop()
    assert not list(Path(staging_of(other)).glob("*/*.safetensors")), "what the killed server staged is gone"


def staging_of(server: ServerProcess) -> str:
    """The staging folder a server was started with."""
    from headrace.sglang_plugin.protocol import ENVIRONMENT, PluginConfig

    return PluginConfig.from_json(server.env[ENVIRONMENT]).staging
