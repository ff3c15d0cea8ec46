"""The real vLLM on a CPU, served and offline: the conformance suite, small chunks and a warm prefix cache against transformers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.engines.base import Engine, open_engine
from headrace.engines.vllm import VllmEngine, server_command
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.target import Target
from headrace.testing.engine import EngineTests, Reference, mixed_rows, row_error
from headrace.testing.envs import engine_env
from headrace.testing.models import make_tiny_model
from headrace.testing.servers import ServerProcess, free_port
from headrace.types import Capture, Failure, Row

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENVIRONMENT = "vllm-0.32.0"
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
TAPS: list[int | str] = [0, 2, 3, 6, "final"]
CHUNK = 64


@pytest.fixture(scope="module")
def python() -> Path:
    return engine_env(ENVIRONMENT)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    return Target.open(str(make_tiny_model(folder, "llama", layers=6, hidden=64, vocab=2048)))


@pytest.fixture(scope="module")
def server(python: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with chunks of 64 tokens, so that the longer rows take several, and the prefix cache on."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    flags = ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enforce-eager"]
    flags += ["--max-model-len", "1024", "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8"]
    command = server_command(str(python), target, target.spec(TAPS), folder / "staging", *flags)
    with ServerProcess(command, port, folder / "server.log", env=SETTINGS) as running:
        yield running


class TestServed(EngineTests):
    longest = 200
    rows_in_flight = 32
    vocab = 2000

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, server: ServerProcess, target: Target) -> Iterator[Engine]:
        with open_engine("vllm", target, target.spec(TAPS), {"url": [server.url]}) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, target: Target) -> Reference:
        engine = open_engine("hf", target, target.spec(TAPS), {"device": "cpu"})

        def states(row: Row) -> torch.Tensor:
            (capture,) = engine.capture(iter([row]))
            assert isinstance(capture, Capture)
            return capture.states

        return states

    def test_says_how_it_runs(self, engine: Engine) -> None:
        settings = engine.info.settings
        assert engine.info.version == "0.32.0"
        assert settings["chunked_prefill"] and settings["prefix_caching"]
        assert settings["max_num_batched_tokens"] == CHUNK and settings["mode"] == "server"

    def test_other_taps_of_the_same_server(
        self, server: ServerProcess, target: Target, reference: Reference
    ) -> None:
        """A server captures what it was started for; any part of that, in any order, can be asked."""
        spec = target.spec(["final", 3])
        row = self.rows(seed=11)[-1]
        with open_engine("vllm", target, spec, {"url": [server.url + "/v1"]}) as engine:
            (capture,) = engine.capture([row])
        assert isinstance(capture, Capture)
        assert row_error(capture.states, reference(row)[[4, 2]]) <= self.tolerance

    def test_taps_the_server_does_not_capture(self, server: ServerProcess, target: Target) -> None:
        with pytest.raises(PreflightError, match="captured layers"):
            open_engine("vllm", target, target.spec([1, "final"]), {"url": [server.url]})

    def test_rows_that_are_too_long_fail_alone(self, engine: Engine, reference: Reference) -> None:
        rng = np.random.default_rng(0)
        long = Row.make(rng.integers(3, 2000, 1024), np.ones(1024, dtype=bool))
        fits = Row.make(long.ids[:1023], long.mask[:1023])
        answers = {answer.key: answer for answer in engine.capture([long, fits])}
        assert isinstance(answers[long.key], Failure) and "max_model_len" in answers[long.key].message  # type: ignore[union-attr]
        capture = answers[fits.key]
        assert isinstance(capture, Capture) and row_error(capture.states, reference(fits)) <= self.tolerance

    def test_nothing_is_left_in_the_staging_folder(self, engine: Engine, server: ServerProcess) -> None:
        """Not of rows that were read, and not of those an iterator closed early left behind."""
        early = engine.capture(iter(self.rows(seed=12)))
        next(early)
        early.close()  # type: ignore[attr-defined]
        staging = server.log.parent / "staging"
        deadline = time.monotonic() + 20
        while (left := list(staging.rglob("*.safetensors"))) and time.monotonic() < deadline:
            self.captures(engine, self.rows(seed=14)[:4])
        assert not left

    def test_other_requests_are_left_alone(self, server: ServerProcess, engine: Engine) -> None:
        """The server still generates for those who ask for no states."""
        model = httpx.get(server.url + "/v1/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "prompt": [5, 6, 7],
            "max_tokens": 4,
            "temperature": 0,
            "detokenize": False,
            "return_token_ids": True,
        }
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        assert reply["kv_transfer_params"] is None
        assert reply["usage"]["completion_tokens"] == 4

    def test_malformed_wishes_are_refused_in_the_reply(self, server: ServerProcess) -> None:
        model = httpx.get(server.url + "/v1/models").json()["data"][0]["id"]
        wish = {"headrace": {"name": "../../escape", "key": "k"}}
        body = {
            "model": model,
            "prompt": [5, 6],
            "max_tokens": 1,
            "detokenize": False,
            "kv_transfer_params": wish,
        }
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        assert "malformed" in reply["kv_transfer_params"]["headrace"]["error"]

    def test_a_dead_server_is_an_error_of_the_engine(self, server: ServerProcess, target: Target) -> None:
        """Last: it stops the server. Rows without an answer are simply not done."""
        rows = mixed_rows(200, 200, 2000, seed=13)
        with open_engine(
            "vllm", target, target.spec(TAPS), {"url": [server.url], "tokens_in_flight": 2000}
        ) as engine:
            results = engine.capture(iter(rows))
            assert isinstance(next(results), Capture)
            server.kill()
            with pytest.raises(EngineUnavailableError, match="lost the vLLM server"):
                for _ in results:
                    pass
        with pytest.raises(EngineUnavailableError, match="is it running"):
            open_engine("vllm", target, target.spec(TAPS), {"url": [server.url]})


OFFLINE = """
import json, sys
from pathlib import Path


def main() -> None:
    import numpy as np
    from safetensors.torch import save_file

    from headrace.engines.base import open_engine
    from headrace.target import Target
    from headrace.types import Capture, Row

    model, out, taps = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    target = Target.open(model)
    lengths = json.loads(sys.argv[4])
    rng = np.random.default_rng(0)
    rows = [Row.make(rng.integers(3, 2000, n), np.ones(n, dtype=bool)) for n in lengths]
    options = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enforce_eager": True}
    with open_engine("vllm", target, target.spec(taps), options) as engine:
        checks = [(check.name, check.ok) for check in engine.preflight()]
        early = engine.capture(iter(rows))
        next(early)
        early.close()
        captures = list(engine.capture(iter(rows)))
        too_long = list(engine.capture([Row.make(np.ones(600), np.ones(600))]))
    states = {c.key: c.states for c in captures if isinstance(c, Capture)}
    save_file(states, out / "states.safetensors")
    info = {"checks": checks, "info": engine.info.settings, "failures": [f.message for f in too_long]}
    (out / "info.json").write_text(json.dumps(info))


if __name__ == "__main__":
    main()
"""


def test_offline(python: Path, target: Target, tmp_path: Path) -> None:
    """vLLM in the process of the engine, in vLLM's own Python, with an iterator closed early before the real one."""
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE)
    lengths = [1, 2, 3, 50, 50, 120, 300, 300, 8, 33] * 2
    command = [
        str(python),
        str(script),
        str(target.path),
        str(tmp_path),
        json.dumps(TAPS),
        json.dumps(lengths),
    ]
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "", "standard output belongs to the command's result"
    info = json.loads((tmp_path / "info.json").read_text())
    assert all(ok for _, ok in info["checks"]), info["checks"]
    assert info["info"]["mode"] == "offline" and info["info"]["chunked_prefill"]
    assert len(info["failures"]) == 1 and "max_model_len" in info["failures"][0]
    states = load_file(tmp_path / "states.safetensors")
    rng = np.random.default_rng(0)
    rows = [Row.make(rng.integers(3, 2000, n), np.ones(n, dtype=bool)) for n in lengths]
    assert states.keys() == {row.key for row in rows}
    with open_engine("hf", target, target.spec(TAPS), {"device": "cpu"}) as engine:
        for capture in engine.capture(iter(rows)):
            assert isinstance(capture, Capture)
            assert row_error(states[capture.key], capture.states) <= EngineTests.tolerance
    with contextlib.suppress(FileNotFoundError):
        assert not list(Path("/dev/shm").glob("headrace-vllm-*")), "the staging folder is removed"


def test_engine_is_found_by_name() -> None:
    from headrace.engines.base import engine_class

    assert engine_class("vllm") is VllmEngine
