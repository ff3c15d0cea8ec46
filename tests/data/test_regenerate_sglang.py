"""``regenerate`` against the real SGLang: sampled ids go from the server into rows, to the token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.data.config import PrepareConfig, RegenerateConfig
from headrace.data.prepare import prepare
from headrace.data.regenerate import regenerate
from headrace.data.rows import RowFolder
from headrace.target import Target
from headrace.testing.conversations import assistant, user
from headrace.testing.envs import engine_env
from headrace.testing.servers import QUIET, SGLANG_ON_CPU, ServerProcess, free_port

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    port = free_port()
    command = [str(engine_env("sglang-0.5.23")), "-m", "sglang.launch_server", "--model-path", str(smollm2)]
    command += [
        "--served-model-name",
        "smollm2",
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *SGLANG_ON_CPU,
    ]
    with ServerProcess(command, port, tmp_path_factory.mktemp("sglang") / "server.log", env=QUIET) as running:
        yield running


def test_rows_are_on_policy_to_the_token(server: ServerProcess, smollm2: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"id": f"c{n}", "messages": [user(f"Name {n} animals."), assistant("x")]} for n in range(1, 5)
    ]
    records.append(
        {"id": "two", "messages": [user("What is 2+2?"), assistant("x"), user("Why?"), assistant("x")]}
    )
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    options: dict[str, Any] = {
        "files": [str(tmp_path / "in.jsonl")],
        "out": tmp_path / "answers.jsonl",
        "url": server.url + "/v1",
        "model": "smollm2",
    }
    config = RegenerateConfig(
        **options, tokenizer=str(smollm2), token_ids="require", max_tokens=24, in_flight=4, seed=1
    )
    said: list[str] = []
    result = regenerate(config, said.append)
    assert (result["answered"], result["with_token_ids"], result["failed"]) == (5, 5, {})
    assert result["tokens"] > 0
    assert not any("not compared" in line for line in said)  # its /tokenize was asked

    tokenizer = Target.open(str(smollm2)).tokenizer
    lines = {
        line["id"]: line for line in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    }
    for line in lines.values():
        assert len(line["sampled"]) == len(line["finish_reasons"]) == len(line["messages"]) // 2
        for entry, finish in zip(line["sampled"], line["finish_reasons"], strict=True):
            asked = line["messages"][: 2 * entry["turn"] + 1]
            assert entry["prompt_token_ids"] == list(
                tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
            )
            said_text = tokenizer.decode(entry["token_ids"], skip_special_tokens=True)
            assert said_text == line["messages"][2 * entry["turn"] + 1]["content"]
            assert (entry["token_ids"][-1] == tokenizer.eos_token_id) == (finish == "stop")
            assert (len(entry["token_ids"]) == 24) == (finish == "length") or finish == "stop"

    made = prepare(
        PrepareConfig(
            files=[str(tmp_path / "answers.jsonl")], model=str(smollm2), out=tmp_path / "rows", validation=0
        )
    )
    assert made["rows_with_sampled_ids"] == made["rows"] >= 5
    sampled = {
        tuple(e["prompt_token_ids"] + e["token_ids"]) for line in lines.values() for e in line["sampled"]
    }
    for row in RowFolder.open(tmp_path / "rows").rows():
        assert tuple(row.ids.tolist()) in sampled
