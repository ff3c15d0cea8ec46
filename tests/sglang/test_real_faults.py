"""Real SGLang servers that are killed and come back, clients that are killed, and a staging folder that is far too small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engines import Engine, open_engine
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


CLIENT = """
import sys
from headrace.engines import open_engine
from headrace.target import Target
from headrace.testing.engine import mixed_rows
target = Target.open(sys.argv[1])
spec = target.spec([2, 3, 5, "final"], dtype="float32")
engine = open_engine("sglang", target, spec, {"url": [sys.argv[2]], "tokens_in_flight": 20000})
for result in engine.capture(iter(mixed_rows(120, longest=300, vocab=40_000, seed=31))):
    print(result.key, flush=True)
"""


def test_killed_client_and_the_next_one(
    server: ServerProcess, model: Path, reference: Reference, small_staging: Path
) -> None:
    """kill -9 with sixty requests in flight; the next client finds a clean folder and captures the rest."""
    command = [sys.executable, "-c", CLIENT, str(model), server.url]
    client = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert client.stdout is not None
    done = {client.stdout.readline().strip() for _ in range(8)}
    os.kill(client.pid, signal.SIGKILL)
    done |= {line.strip() for line in client.stdout if line.endswith("\n")}
    client.wait()
    client.stdout.close()
    rows = [row for row in mixed_rows(120, longest=300, vocab=40_000, seed=31) if row.key not in done]
    assert len(rows) > 20, "the client was killed too late for the test to test anything"
    with connect(model, server, tokens_in_flight=3000) as engine:
        check(list(engine.capture(iter(rows))), rows, reference)
    deadline = time.monotonic() + 20
    while (left := list(small_staging.rglob("*.part"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == [], "half-written captures of the killed client stay"


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
            if place == 60:  # by now the other one has answered alone; wait for the killed one to come back
                again.wait_healthy()
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
