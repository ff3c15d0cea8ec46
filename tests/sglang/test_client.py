"""The client against servers that fail, lie and come back: nothing lost, nothing wrong accepted, nothing doubled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.engines import Engine, open_engine
from headrace.engines.fake import fingerprint
from headrace.engines.sglang.options import SglangOptions
from headrace.engines.sglang.server import Server
from headrace.engines.sglang.session import Link, Session
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.sglang_plugin.protocol import KEY
from headrace.target import Target
from headrace.testing.engine import EngineTests, Reference, mixed_rows
from headrace.testing.loopback import LoopbackServer
from headrace.types import Capture, CaptureSpec, Failure, Row

pytestmark = pytest.mark.slow


@pytest.fixture
def target(config_only: Path) -> Target:
    return Target.open(str(config_only))


@pytest.fixture
def spec(target: Target) -> CaptureSpec:
    return target.spec([2, 4, 5, "final"])


@pytest.fixture
def server(spec: CaptureSpec, tmp_path: Path) -> Iterator[LoopbackServer]:
    with LoopbackServer(spec, tmp_path / "staging") as running:
        yield running


def connect(target: Target, spec: CaptureSpec, *servers: LoopbackServer, **options: Any) -> Engine:
    return open_engine(
        "sglang", target, spec, {"url": [s.url for s in servers], "patience_s": 1.0, **options}
    )


def check(results: list[Capture | Failure], rows: list[Row], spec: CaptureSpec) -> None:
    """Exactly one capture a row, every value right."""
    assert sorted(result.key for result in results) == sorted(row.key for row in rows)
    by_key = {row.key: row for row in rows}
    for result in results:
        assert isinstance(result, Capture), result
        assert torch.equal(result.states, fingerprint(by_key[result.key].ids, spec))


def one(target: Target, spec: CaptureSpec, server: LoopbackServer, **options: Any) -> Capture | Failure:
    """The result of one row of 20 tokens."""
    with connect(target, spec, server, **options) as engine:
        (result,) = engine.capture(iter([Row.make(np.arange(100, 120), np.ones(20, bool))]))
        return result


class TestConformance(EngineTests):
    tolerance = 0.0

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, config_only: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
        target = Target.open(str(config_only))
        spec = target.spec([2, 4, 5, "final"])
        with LoopbackServer(spec, tmp_path_factory.mktemp("staging")) as server:
            yield connect(target, spec, server, tokens_in_flight=2000, reference="none")

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, engine: Engine) -> Reference:
        return lambda row: fingerprint(row.ids, engine.spec)


# --- answers that must not be accepted ----------------------------------------------------------------------------


def test_ids_changed_by_the_server(target: Target, spec: CaptureSpec, server: LoopbackServer) -> None:
    """EX-13: a server that puts BOS in front gets no trimming, and trying again cannot help."""
    server.change_ids = lambda ids: np.concatenate([[1], ids])
    result = one(target, spec, server)
    assert isinstance(result, Failure) and (result.kind, result.retryable) == ("ids_differ", False)
    assert "21 ids for a row of 20" in result.message
    server.change_ids = lambda ids: np.where(np.arange(len(ids)) == 7, 5, ids)
    result = one(target, spec, server)
    assert isinstance(result, Failure) and "id 5 at position 7 where the row has 107" in result.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_states_name_tap_and_position(
    target: Target, spec: CaptureSpec, server: LoopbackServer, value: float
) -> None:
    """EX-20"""

    def spoil(states: torch.Tensor) -> torch.Tensor:
        if states.shape[1] == 20:
            states[2, 7, 3] = value
        return states

    server.change_states = spoil
    result = one(target, spec, server, attempts=2)
    assert isinstance(result, Failure) and result.kind == "non_finite" and result.retryable
    assert "tap 5" in result.message and "position 7" in result.message
    assert server.asked == 3, "the facts, and two tries"


def test_a_corrupt_or_lost_file_is_asked_for_again(
    target: Target, spec: CaptureSpec, server: LoopbackServer
) -> None:
    spoiled: list[str] = []

    def spoil(meta: dict[str, Any]) -> dict[str, Any]:
        staged = meta[KEY][0]["staged"]
        if staged and len(spoiled) < 2:
            path = Path(meta[KEY][0]["facts"]["staging"]) / staged["name"]
            spoiled.append(path.name)
            if len(spoiled) == 1:
                data = bytearray(path.read_bytes())
                data[-100] ^= 1
                path.write_bytes(data)
            else:
                path.unlink()
        return meta

    server.change_reply = spoil
    rows = [Row.make(np.arange(100, 120), np.ones(20, bool))]
    with connect(target, spec, server) as engine:
        check(list(engine.capture(iter(rows))), rows, spec)
    assert len(spoiled) == 2


def test_the_staged_file_is_gone_after_it_was_taken(
    target: Target, spec: CaptureSpec, server: LoopbackServer, tmp_path: Path
) -> None:
    with connect(target, spec, server) as engine:
        list(engine.capture(iter(mixed_rows(8))))
        assert list((tmp_path / "staging").glob("*/*.safetensors")) == []


def test_a_server_must_not_name_files_outside_its_folder(
    target: Target, spec: CaptureSpec, server: LoopbackServer, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")

    def lie(meta: dict[str, Any]) -> dict[str, Any]:
        if meta[KEY][0]["staged"]:
            meta[KEY][0]["staged"]["name"] = "../precious"
        return meta

    server.change_reply = lie
    result = one(target, spec, server)
    assert isinstance(result, Failure) and result.kind == "bad_reply"
    assert precious.exists()


def test_no_proof_no_capture(target: Target, spec: CaptureSpec, server: LoopbackServer) -> None:
    server.change_reply = lambda meta: {"id": meta["id"]}
    with pytest.raises(PreflightError, match="headrace serve"):
        connect(target, spec, server)


def test_proof_that_disappears_ends_the_run(
    target: Target, spec: CaptureSpec, server: LoopbackServer
) -> None:
    """The server was restarted without the plug-in: nothing of it is used, and there is no other."""
    with connect(target, spec, server) as engine:
        server.change_reply = lambda meta: {"id": meta["id"]}
        with pytest.raises(EngineUnavailableError, match="without the capture plug-in's proof"):
            list(engine.capture(iter(mixed_rows(8))))


def test_an_answer_that_is_no_json_is_no_proof(
    target: Target, spec: CaptureSpec, server: LoopbackServer
) -> None:
    server.mischief = lambda body: (200, "<html>a proxy's page</html>")
    with pytest.raises(PreflightError, match="headrace serve"):
        connect(target, spec, server)


# --- what is no fault of the row ----------------------------------------------------------------------------------


def test_a_refused_row_is_its_own_failure(target: Target, spec: CaptureSpec, server: LoopbackServer) -> None:
    """HTTP 400 (a prompt longer than the context, an id outside the vocabulary): not tried again, the others go on."""
    rows = mixed_rows(16)

    def refuse(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (
            (400, {"error": {"message": "longer than the model's context"}})
            if len(body["input_ids"]) == 33
            else None
        )

    server.mischief = refuse
    with connect(target, spec, server) as engine:
        results = list(engine.capture(iter(rows)))
    failures = [result for result in results if isinstance(result, Failure)]
    assert {len(row) for row in rows if row.key in {f.key for f in failures}} == {33}
    assert all(f.kind == "refused" and not f.retryable and "context" in f.message for f in failures)
    assert len(results) == len(rows)


def test_full_staging_is_waited_for(target: Target, spec: CaptureSpec, tmp_path: Path) -> None:
    """A folder that holds three captures of a hundred rows at once, and another client that keeps two of them for a while."""
    with LoopbackServer(spec, tmp_path / "staging", limit=64_000) as server:
        hog = mixed_rows(2, longest=120, seed=5)
        bodies = [
            {
                "input_ids": row.ids.tolist(),
                "rid": f"hog{n}",
                "sampling_params": {"custom_params": _wish(spec, "hog")},
            }
            for n, row in enumerate([Row.make(np.arange(100), np.ones(100, bool)) for _ in hog])
        ]
        held = [server.generate(body)[1]["meta_info"][KEY][0]["staged"]["name"] for body in bodies]
        threading.Timer(1.0, lambda: [(tmp_path / "staging" / name).unlink() for name in held]).start()
        rows = [Row.make(np.arange(k, k + 150), np.ones(150, bool)) for k in range(12)]
        with connect(target, spec, server) as engine:
            started = time.monotonic()
            check(list(engine.capture(iter(rows))), rows, spec)
        assert time.monotonic() - started < 20


def _wish(spec: CaptureSpec, owner: str) -> dict[str, Any]:
    from headrace.sglang_plugin.protocol import Wish

    return Wish(owner=owner, taps=spec.taps).to_params()


def test_a_row_that_never_fits_fails_with_the_mend(target: Target, spec: CaptureSpec, tmp_path: Path) -> None:
    with LoopbackServer(spec, tmp_path / "staging", limit=10_000) as server:
        rows = [Row.make(np.arange(500), np.ones(500, bool))]
        with connect(target, spec, server) as engine:
            (result,) = engine.capture(iter(rows))
    assert isinstance(result, Failure) and result.kind == "too_large" and "--staging-bytes" in result.message


# --- servers that come and go -------------------------------------------------------------------------------------


def test_a_dead_servers_rows_go_to_the_others(target: Target, spec: CaptureSpec, tmp_path: Path) -> None:
    rows = mixed_rows(60)
    with (
        LoopbackServer(spec, tmp_path / "a", run="a") as first,
        LoopbackServer(spec, tmp_path / "b", run="b") as second,
    ):
        first.delay_s = second.delay_s = 0.02
        with connect(target, spec, first, second, tokens_in_flight=600) as engine:
            results = []
            for result in engine.capture(iter(rows)):
                results.append(result)
                if len(results) == 10:
                    first.mischief = lambda body: (0, None)  # dies with what it has
            check(results, rows, spec)
            assert engine.gauges()["servers_up"] == 1
            assert engine.gauges()["server_faults"] > 0


def test_a_row_that_a_server_failed_goes_to_another(spec: CaptureSpec) -> None:
    """One that fails at once always seems to be the first to be done: a row met it five times and was given up."""
    quick, slow = Server("http://quick"), Server("http://slow")
    for server, rate in ((quick, 1000.0), (slow, 10.0)):
        server.facts, server.rate = cast(Any, object()), rate
    session = Session.__new__(Session)
    session._link = Link(spec, SglangOptions(), [quick, slow], cast(Any, None), 0)
    session._free = asyncio.Condition()

    def chosen(*failed: Server) -> Server:
        return asyncio.run(session._choose(10, set(failed)))

    assert chosen() is quick
    assert chosen(quick) is slow
    assert chosen(quick, slow) is quick, "rather one of them than none"


def test_a_restarted_server_is_used_again(target: Target, spec: CaptureSpec, tmp_path: Path) -> None:
    rows = mixed_rows(40)
    server = LoopbackServer(spec, tmp_path / "s", run="first")
    port = server.port
    with connect(target, spec, server, tokens_in_flight=300, patience_s=20.0) as engine:
        results = []
        for result in engine.capture(iter(rows)):
            results.append(result)
            if len(results) == 10:
                server.stop()
                server = LoopbackServer(spec, tmp_path / "s", run="second", port=port)
        check(results, rows, spec)
        assert server.asked > 10
    server.stop()


def test_a_server_back_with_other_taps_is_not_used(target: Target, spec: CaptureSpec, tmp_path: Path) -> None:
    server = LoopbackServer(spec, tmp_path / "s", run="first")
    port = server.port
    with connect(target, spec, server, tokens_in_flight=300, patience_s=6.0) as engine:
        results = iter(engine.capture(iter(mixed_rows(40))))
        next(results)
        server.stop()
        server = LoopbackServer(target.spec([2, 4, 6, "final"]), tmp_path / "s", run="second", port=port)
        with pytest.raises(EngineUnavailableError, match="it captures"):
            list(results)
    server.stop()


def test_all_servers_gone_ends_the_run_with_the_reason(
    target: Target, spec: CaptureSpec, tmp_path: Path
) -> None:
    server = LoopbackServer(spec, tmp_path / "s")
    with connect(target, spec, server, patience_s=0.5) as engine:
        server.stop()
        with pytest.raises(EngineUnavailableError, match="resumes"):
            list(engine.capture(iter(mixed_rows(8))))


def test_a_row_that_kills_servers_is_given_up(
    target: Target, spec: CaptureSpec, server: LoopbackServer
) -> None:
    """One row breaks whatever server has it; the run survives it."""
    rows = mixed_rows(12)
    poison = max(rows, key=len)

    def die(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (500, "boom") if body["input_ids"] == poison.ids.tolist() else None

    server.mischief = die
    with connect(target, spec, server, patience_s=30.0) as engine:
        results = list(engine.capture(iter(rows)))
    failures = [result for result in results if isinstance(result, Failure)]
    assert (
        [f.key for f in failures] == [poison.key]
        and failures[0].kind == "server_fault"
        and failures[0].retryable
    )
    check([r for r in results if isinstance(r, Capture)], [row for row in rows if row is not poison], spec)


def test_one_server_of_two_may_be_down_at_the_start(
    target: Target, spec: CaptureSpec, server: LoopbackServer, tmp_path: Path
) -> None:
    gone = LoopbackServer(spec, tmp_path / "gone")
    gone.stop()
    rows = mixed_rows(8)
    with connect(target, spec, gone, server) as engine:
        check(list(engine.capture(iter(rows))), rows, spec)


def test_nobody_there(target: Target, spec: CaptureSpec, tmp_path: Path) -> None:
    gone = LoopbackServer(spec, tmp_path / "gone")
    gone.stop()
    with pytest.raises(EngineUnavailableError, match="is the server up"):
        connect(target, spec, gone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.spec([2, 3, "final"]), "start it with --taps 2,3,final"),
        (lambda t: t.spec([2, 4, "final"], dtype="float32"), "start it with --dtype float32"),
        (lambda t: t.spec([2, "final"], final_normed=False), "after the final norm"),
    ],
)
def test_what_a_server_cannot_give_is_refused_at_open(
    target: Target, server: LoopbackServer, change: Callable[[Target], CaptureSpec], message: str
) -> None:
    with pytest.raises(PreflightError, match=message):
        connect(target, change(target), server)


def test_servers_that_differ_never_share_a_store(target: Target, spec: CaptureSpec, tmp_path: Path) -> None:
    def other(meta: dict[str, Any]) -> dict[str, Any]:
        meta[KEY][0]["facts"]["settings"]["chunked_prefill_size"] = 128
        return meta

    with LoopbackServer(spec, tmp_path / "a") as first, LoopbackServer(spec, tmp_path / "b") as second:
        second.change_reply = other
        with pytest.raises(PreflightError, match="chunked_prefill_size"):
            connect(target, spec, first, second)


def test_staging_that_is_not_here(
    target: Target, spec: CaptureSpec, server: LoopbackServer, tmp_path: Path
) -> None:
    with pytest.raises(PreflightError, match="on the server's host"):
        connect(target, spec, server, staging=str(tmp_path))


# --- clients that die ---------------------------------------------------------------------------------------------

CLIENT = """
import sys
from pathlib import Path
from headrace.engines import open_engine
from headrace.target import Target
from headrace.testing.engine import mixed_rows
target = Target.open(sys.argv[1])
engine = open_engine("sglang", target, target.spec([2, 4, 5, "final"]), {"url": [sys.argv[2]]})
for n, _ in enumerate(engine.capture(iter(mixed_rows(200)))):
    print(n, flush=True)
"""


def test_what_a_killed_client_left_is_deleted_by_the_next(
    target: Target, spec: CaptureSpec, server: LoopbackServer, tmp_path: Path
) -> None:
    """And what a living client has not read yet is not."""
    server.delay_s = 0.05
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(target.path), server.url], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    for _ in range(3):
        client.stdout.readline()
    os.kill(client.pid, signal.SIGSTOP)  # answers still come, and stay in the folder
    deadline = time.monotonic() + 10
    while not list((tmp_path / "staging").glob("*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    left = set((tmp_path / "staging").glob("*/*.safetensors"))
    assert left, "the stopped client left nothing: the test tests nothing"
    with connect(target, spec, server):
        assert left <= set((tmp_path / "staging").glob("*/*.safetensors")), "the client still lives"
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    client.stdout.close()
    rows = mixed_rows(8, seed=3)
    with connect(target, spec, server) as engine:
        assert not left & set((tmp_path / "staging").glob("*/*.safetensors"))
        check(list(engine.capture(iter(rows))), rows, spec)


def test_closing_early_aborts_at_the_server(
    target: Target, spec: CaptureSpec, server: LoopbackServer
) -> None:
    server.delay_s = 0.3
    with connect(target, spec, server, tokens_in_flight=300) as engine:
        results = engine.capture(iter(mixed_rows(30)))
        next(results)
        results.close()  # type: ignore[attr-defined]
        assert server.aborted, "what was in flight is aborted"
        rows = mixed_rows(3, seed=9)
        server.delay_s = 0.0
        check(list(engine.capture(iter(rows))), rows, spec)


def test_what_the_rows_raise_reaches_the_caller(
    target: Target, spec: CaptureSpec, server: LoopbackServer
) -> None:
    def rows() -> Iterator[Row]:
        yield from mixed_rows(3)
        raise ZeroDivisionError("bad row folder")

    with connect(target, spec, server) as engine, pytest.raises(ZeroDivisionError, match="bad row folder"):
        list(engine.capture(rows()))
