"""A real model in the real SGLang 0.5.23 under everything at once: chunks of 64, mixed with decodes, forced retractions, the
overlapped scheduler, chat traffic beside the captures, aborts. Every row of every tap against transformers in float32.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from headrace.cli import main
from headrace.engines import Engine, open_engine
from headrace.engines.sglang.server import generate_request, read_reply
from headrace.engines.sglang.staged import StagingView
from headrace.sglang_plugin.protocol import Reply, Wish
from headrace.target import Target
from headrace.testing.engine import Reference, row_error, transformers_reference
from headrace.testing.servers import ServerMaker, ServerProcess
from headrace.types import FINAL, Capture, CaptureSpec, Row

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TAPS = (2, 15, 27, FINAL)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def server(make_server: ServerMaker, smollm2: Path) -> Iterator[ServerProcess]:
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
    with make_server(smollm2, taps="2,15,27,final", flags=("--enable-mixed-chunk",), env=env) as running:
        yield running


@pytest.fixture(scope="module")
def spec(smollm2: Path) -> CaptureSpec:
    return Target.open(str(smollm2)).spec(list(TAPS), dtype="float32")


@pytest.fixture(scope="module")
def engine(server: ServerProcess, smollm2: Path, spec: CaptureSpec) -> Iterator[Engine]:
    # About sixteen rows of the mix below.
    options = {"url": [server.url], "tokens_in_flight": 800}
    with open_engine("sglang", Target.open(str(smollm2)), spec, options) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    return transformers_reference(smollm2, TAPS)


def prompts(count: int, seed: int) -> list[Row]:
    """Lengths 1 to 700, a third of them equal, half of them with a shared beginning, in random order."""
    rng = np.random.default_rng(seed)
    lengths = [1, 2, 63, 64, 65, 128, 129, 300, 700, *[30] * (count // 3)]
    lengths += [int(n) for n in np.clip(rng.lognormal(3.2, 0.7, count - len(lengths)), 3, 150)]
    shared = rng.integers(3, 49_000, 700)
    rows = []
    for place, length in enumerate(lengths):
        ids = rng.integers(3, 49_000, length)
        if place % 2:
            ids[: length // 2] = shared[: length // 2]
        rows.append(Row.make(ids, np.ones(length, bool)))
    return [rows[i] for i in rng.permutation(len(rows))]


class ChatTraffic:
    """Two chats that never stop, with everything a capture server's other users do: long answers, streaming."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(2)]

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=120) as client:
            while not self._stop.is_set():
                body = {
                    "model": "default",
                    "messages": [{"role": "user", "content": f"Count from {number} on."}],
                    "max_tokens": 24,
                    "temperature": 0,
                }
                response = client.post(f"{self.url}/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                self.answers.append(response.json()["choices"][0]["message"]["content"])

    def __enter__(self) -> ChatTraffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_sixty_four_prompts_beside_chat_traffic(
    server: ServerProcess, engine: Engine, reference: Reference
) -> None:
    rows = prompts(64, seed=1)
    with ChatTraffic(server.url) as chats:
        results = list(engine.capture(iter(rows)))
    assert sorted(result.key for result in results) == sorted(row.key for row in rows)
    worst: dict[str, float] = {}
    by_key = {row.key: row for row in rows}
    for result in results:
        assert isinstance(result, Capture), result
        row = by_key[result.key]
        np.testing.assert_array_equal(result.ids, row.ids)
        for place, tap in enumerate(TAPS):
            error = row_error(result.states[place], reference(row)[place])
            worst[str(tap)] = max(worst.get(str(tap), 0.0), error)
    assert max(worst.values()) <= TOLERANCE, worst
    assert len(chats.answers) >= 2, "there was no other traffic"
    assert not any("headrace" in answer for answer in chats.answers)


async def ask(
    client: httpx.AsyncClient, url: str, row: Row, owner: str, new_tokens: int
) -> tuple[Row, Reply, dict[str, Any]]:
    body = generate_request(
        row.ids.tolist(), uuid.uuid4().hex, Wish(owner=owner, taps=TAPS), max_new_tokens=new_tokens
    )
    reply, meta = read_reply(url, await client.post(f"{url}/generate", json=body))
    return row, reply, meta


async def ask_all(
    url: str, rows: list[Row], owner: str, new_tokens: int
) -> list[tuple[Row, Reply, dict[str, Any]]]:
    async with httpx.AsyncClient(timeout=300) as client:
        return await asyncio.gather(*(ask(client, url, row, owner, new_tokens) for row in rows))


def test_retracted_requests_are_captured_once_and_right(
    server: ServerProcess, spec: CaptureSpec, reference: Reference
) -> None:
    """Requests that also generate are thrown out of the batch and prefilled again, prompt and output together."""
    staging, retractions = StagingView(""), 0
    # Whether memory runs short is a matter of what is in the batch at one time: longer answers make it surer.
    rows = prompts(20, seed=2)[:12]
    for new_tokens in (10, 20, 40, 80):
        answers = asyncio.run(ask_all(server.url, rows, staging.owner, new_tokens))
        for row, reply, meta in answers:
            retractions += meta["num_retractions"]
            assert reply.staged is not None, reply.refusal
            capture = staging.take(reply.facts, reply.staged, row, spec)
            assert row_error(capture.states, reference(row)) <= TOLERANCE
        if retractions:
            break
    staging.leave()
    assert retractions > 0, "nothing was retracted: the test tests nothing"


def test_reply_comes_after_the_file(server: ServerProcess, spec: CaptureSpec) -> None:
    """EX-23: at the moment the answer arrives the named file is whole; nothing has to be waited for."""
    staging = StagingView("")
    for row, reply, _ in asyncio.run(
        ask_all(server.url, prompts(20, seed=3)[:6], staging.owner, new_tokens=0)
    ):
        assert reply.staged is not None
        path = Path(reply.facts.staging) / reply.staged.name
        assert path.stat().st_size == reply.staged.size
        staging.take(reply.facts, reply.staged, row, spec)
    staging.leave()


def test_aborted_requests_leave_nothing_behind(
    server: ServerProcess, engine: Engine, reference: Reference
) -> None:
    """Half of the rows are aborted while they are prefilled; the others are right and the folder ends empty."""
    rng = np.random.default_rng(4)
    victims = [Row.make(rng.integers(3, 49_000, 500), np.ones(500, bool)) for _ in range(4)]
    staging = StagingView("")

    async def abort_some() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            rids = [uuid.uuid4().hex for _ in victims]
            wish = Wish(owner=staging.owner, taps=TAPS)
            asked = [
                asyncio.create_task(
                    client.post(f"{server.url}/generate", json=generate_request(row.ids.tolist(), rid, wish))
                )
                for row, rid in zip(victims, rids, strict=True)
            ]
            await asyncio.sleep(0.7)
            for rid in rids:
                await client.post(f"{server.url}/abort_request", json={"rid": rid})
            await asyncio.gather(*asked, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(abort_some()))
    thread.start()
    rows = prompts(20, seed=5)[:8]
    for result in engine.capture(iter(rows)):
        assert isinstance(result, Capture), result
        row = next(row for row in rows if row.key == result.key)
        assert row_error(result.states, reference(row)) <= TOLERANCE
    thread.join()
    folders = [path for path in server_staging(server).iterdir() if path.name != "clients"]
    left = [
        file
        for folder in folders
        for file in folder.iterdir()
        if file.name != "alive" and staging.owner in file.name
    ]
    finished = [file for file in left if file.suffix == ".safetensors"]
    assert len(left) == len(finished), f"half-written files stay: {left}"
    assert len(finished) < len(victims), "nothing was aborted: the test tests nothing"


def server_staging(server: ServerProcess) -> Path:
    reply = httpx.post(
        f"{server.url}/generate", json=generate_request([1], uuid.uuid4().hex, Wish(owner="test")), timeout=60
    )
    return Path(Reply.from_meta(reply.json()["meta_info"]).facts.staging)


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_passes_a_good_server(
    server: ServerProcess, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(smollm2), "--taps", "2,15,27,final", "--dtype", "float32"]
    code, result = run_doctor(capsys, server.url, *arguments)
    assert code == 0, result
    assert result["ok"] and all(check["ok"] for check in result["checks"])
    values = {check["name"]: check["value"] for check in result["checks"]}
    assert set(values) == {
        "plug-in active", "staging", "long prompt", "rows told apart", "cache policy", "taps", "boundaries", "finite", "preemption",
    }  # fmt: skip
    assert "0 swapped" in values["rows told apart"]
    assert values["boundaries"].startswith("against transformers") and "(it is" not in values["boundaries"]
    code, result = run_doctor(capsys, server.url, *arguments, "--reference", "greedy")
    assert code == 0, result
    assert "24 of 24" in {check["name"]: check["value"] for check in result["checks"]}["boundaries"]


def test_doctor_names_a_wrong_server(
    server: ServerProcess, smollm2: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run_doctor(
        capsys, server.url, "--model", str(smollm2), "--taps", "2,16,final", "--dtype", "float32"
    )
    assert code == 3 and "asked are [2, 16, 'final']" in result["error"]["message"]
    code, result = run_doctor(capsys, server.url, "--model", str(smollm2), "--taps", "2,15,final")
    assert code == 3 and "start it with --dtype bfloat16" in result["error"]["message"]
    code, result = run_doctor(capsys, server.url, "--model", str(tiny_llama), "--taps", "2,3,final")
    assert code == 3 and "30 layers of 576" in result["error"]["message"]
    code, result = run_doctor(capsys, "http://127.0.0.1:9", "--model", str(smollm2))
    assert code == 1 and "cannot be reached" in result["error"]["message"]


def test_doctor_catches_other_weights(
    server: ServerProcess, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A target of the same shape whose weights differ in one layer: boundaries before it agree, those after do not."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    other.mkdir()
    for file in smollm2.iterdir():
        if file.suffix != ".safetensors":
            (other / file.name).symlink_to(file)
            continue
        weights = load_file(file)
        name = "model.layers.20.mlp.down_proj.weight"
        weights[name] = (
            weights[name]
            + torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0)) * 0.05
        )
        save_file(
            {key: value.to(torch.bfloat16) for key, value in weights.items()},
            other / file.name,
            {"format": "pt"},
        )
    code, result = run_doctor(
        capsys, server.url, "--model", str(other), "--taps", "2,15,27,final", "--dtype", "float32"
    )
    failing = [check for check in result["checks"] if not check["ok"]]
    assert code == 3 and [check["name"] for check in failing] == ["boundaries"]
    assert "27: " in failing[0]["value"]
