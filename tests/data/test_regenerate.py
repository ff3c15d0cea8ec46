"""``regenerate`` against an endpoint that misbehaves on purpose (section 1d of the cases)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import build
from headrace.data.api import read_answer, read_body
from headrace.data.config import PrepareConfig, RegenerateConfig
from headrace.data.prepare import prepare
from headrace.data.records import RecordReader
from headrace.data.regenerate import regenerate
from headrace.data.rows import RowFolder
from headrace.errors import (
    ConfigError,
    EngineUnavailableError,
    HeadraceError,
    IncompleteError,
    InputError,
    PreflightError,
    SpecMismatchError,
)
from headrace.testing.api import Script, ScriptedApi, reply
from headrace.testing.conversations import Bench, assistant, call, tool, user
from headrace.testing.toy import ToyTokenizer


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def questions(count: int) -> list[dict[str, Any]]:
    return [{"id": f"c{n}", "messages": [user(f"q{n}"), assistant("foreign")]} for n in range(count)]


def echo(body: dict[str, Any], number: int) -> Any:
    return reply("a" + body["messages"][-1]["content"][1:])


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "answers.jsonl"
        self.said: list[str] = []

    def run(self, api: ScriptedApi, records: list[Any] | None = None, **options: Any) -> dict[str, Any]:
        file = write(self.folder / "in.jsonl", questions(10) if records is None else records)
        values = {
            "files": [str(file)],
            "out": self.out,
            "url": api.url,
            "model": "m",
            "max_wait": 0.02,
            "in_flight": 4,
            **options,
        }
        return regenerate(build(RegenerateConfig, values, "test"), self.said.append)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def failed(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "answers.jsonl.failed.jsonl").read_text().splitlines()
        ]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# --- what an answer is --------------------------------------------------------------------------------------------


def test_every_conversation_gets_the_targets_answer(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        result = desk.run(api, temperature=0.7, top_p=0.9, max_tokens=99, seed=3, extra_body={"min_p": 0.1})
    assert (result["answered"], result["conversations"], result["requests"]) == (10, 10, 10)
    answers = {line["id"]: line["messages"][-1]["content"] for line in desk.lines()}
    assert answers == {f"c{n}": f"a{n}" for n in range(10)}
    body = api.requests[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["min_p"]) == (0.7, 0.9, 99, 0.1)
    assert "foreign" not in json.dumps(api.requests)
    assert len({b["seed"] for b in api.requests}) == 10
    assert api.most_at_once <= 4
    assert not (desk.folder / "answers.jsonl.failed.jsonl").exists()


def test_results_are_rows_for_prepare(desk: Desk, config_only: Path) -> None:
    with ScriptedApi(lambda body, n: reply("yes", "length" if n == 0 else "stop")) as api:
        desk.run(api, in_flight=1)
    values = {
        "files": [str(desk.out)],
        "model": str(config_only),
        "out": desk.folder / "rows",
        "validation": 0,
    }
    result = prepare(build(PrepareConfig, values, "test"), tokenizer=ToyTokenizer())
    assert (result["rows"], result["supervised"]) == (10, 9 * 4 + 3)
    assert result["rows_with_sampled_ids"] == 0


BUSY: dict[str, Any] = {
    "error with a code": {"error": {"code": 429, "message": "slow down"}},
    "error with a text code": {"error": {"code": "503"}},
    "error without a code": {"error": "overloaded"},
    "error in the choice": {"choices": [{"error": {"code": 502}, "message": {"content": None}}]},
    "no choices": {"choices": []},
    "choices missing": {"id": "x"},
    "null content": reply(None),
    "empty content": reply("  "),
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "finish error": reply("half an ans", "error"),
    "finish abort": reply("half", "abort"),
    "event with an error": 'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"error": {"code": 500}, "choices": []}\n\n',
    "events cut short": 'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
    "not JSON": "<html>gateway</html>",
    "a list": "[1]",
    "status 429": (429, {"error": {"message": "slow"}}),
    "status 500": (500, "oops"),
    "status 503": (503, {}),
    "no reply": (200, None),
}


@pytest.mark.parametrize("fault", list(BUSY), ids=list(BUSY))
def test_dp_48_faults_are_tried_again_and_never_become_rows(desk: Desk, fault: str) -> None:
    with ScriptedApi(lambda body, n: BUSY[fault] if n < 2 else reply("fine")) as api:
        result = desk.run(api, questions(1))
    assert (result["answered"], result["requests"], result["retries"]) == (1, 3, 2)
    assert desk.lines()[0]["messages"][-1]["content"] == "fine"


@pytest.mark.parametrize("fault", list(BUSY), ids=list(BUSY))
def test_dp_48_faults_that_stay_are_counted_with_their_reason(desk: Desk, fault: str) -> None:
    with (
        ScriptedApi(lambda body, n: BUSY[fault]) as api,
        pytest.raises(IncompleteError, match="1 conversations failed") as caught,
    ):
        desk.run(api, questions(1), tries=2)
    assert caught.value.exit_code == 1
    assert len(api.requests) == 2
    assert desk.lines() == []
    (failed,) = desk.failed()
    assert (failed["id"], failed["line"]) == ("c0", 1)
    assert failed["reason"]


FINAL: dict[str, tuple[Any, str]] = {
    "status 400": ((400, {"error": {"message": "context too long"}}), "status_400"),
    "status 404": ((404, {}), "status_404"),
    "400 in a 200": ({"error": {"code": 400, "message": "bad"}}, "status_400"),
    "a filter": (reply("x", "content_filter"), "content_filter"),
    "budget": (reply("", "length", message={"reasoning": "hm " * 200}), "budget_consumed_by_reasoning"),
    "budget, null": (
        reply(None, "length", message={"reasoning_content": "hm"}),
        "budget_consumed_by_reasoning",
    ),
}


@pytest.mark.parametrize("name", list(FINAL))
def test_dp_48_dp_49_what_trying_again_cannot_help_is_final(desk: Desk, name: str) -> None:
    body, reason = FINAL[name]
    with ScriptedApi(lambda b, n: body) as api, pytest.raises(IncompleteError):
        desk.run(api, questions(1))
    assert len(api.requests) == 1
    assert [f["reason"] for f in desk.failed()] == [reason]


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_wrong_key_stops_the_run(desk: Desk, status: int) -> None:
    with (
        ScriptedApi(lambda b, n: (status, {"error": {"message": "no"}})) as api,
        pytest.raises(IncompleteError, match=f"status {status}"),
    ):
        desk.run(api, in_flight=1)
    assert len(api.requests) == 1


def test_events_are_put_together() -> None:
    text = 'event: x\n: comment\ndata: {"choices": [{"delta": {"reasoning": "h"}}], "provider": "P"}\n\ndata: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}\n\ndata: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    answer = read_answer(read_body(text))
    assert answer.message == {"role": "assistant", "content": "ab", "reasoning": "h"}
    assert (answer.finish, answer.provider, answer.usage) == ("stop", "P", {"completion_tokens": 2.0})


def test_a_request_has_a_time_out(desk: Desk) -> None:
    def slow(body: dict[str, Any], number: int) -> Any:
        if number == 0:
            time.sleep(1.5)
        return reply("fine")

    with ScriptedApi(slow) as api:
        assert desk.run(api, questions(1), timeout=0.3)["retries"] == 1


@pytest.mark.slow
def test_the_servers_pause_is_kept(desk: Desk) -> None:
    with ScriptedApi(lambda b, n: (429, {}, {"retry-after": "0.4"}) if n == 0 else reply("a")) as api:
        started = time.monotonic()
        desk.run(api, questions(1), max_wait=5.0)
    assert time.monotonic() - started >= 0.4


def test_reasoning_and_finish_reasons_are_kept(desk: Desk) -> None:
    with ScriptedApi(lambda b, n: reply("c", "length", message={"reasoning": "ab"})) as api:
        desk.run(api, questions(1))
    (line,) = desk.lines()
    assert line["messages"][-1] == {"role": "assistant", "content": "c", "reasoning": "ab"}
    assert line["finish_reasons"] == ["length"]
    with ScriptedApi(lambda b, n: reply("c", "length")) as api, pytest.raises(IncompleteError, match="cut 1"):
        Desk(desk.folder / "other").folder.mkdir()
        other = Desk(desk.folder / "other")
        other.run(api, questions(1), keep_cut=False)


# --- turns --------------------------------------------------------------------------------------------------------

TALK = [user("q1"), assistant("foreign 1"), user("q2"), assistant("foreign 2"), user("q3")]


def test_dp_53_later_turns_are_asked_on_the_regenerated_history(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        desk.run(api, [{"id": "t", "messages": TALK}])
    sent = [[m["content"] for m in body["messages"]] for body in api.requests]
    assert sent == [["q1"], ["q1", "a1", "q2"], ["q1", "a1", "q2", "a2", "q3"]]
    assert [m["content"] for m in desk.lines()[0]["messages"]] == ["q1", "a1", "q2", "a2", "q3", "a3"]
    assert desk.lines()[0]["finish_reasons"] == ["stop"] * 3


def test_foreign_turns_are_context_only(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        desk.run(api, [{"id": "t", "messages": TALK[:4]}], turns="last")
    assert [m["content"] for m in api.requests[0]["messages"]] == ["q1", "foreign 1", "q2"]
    assert "weight" not in json.dumps(api.requests)
    bench = Bench()
    assert bench.supervised(bench.row(desk.lines()[0])) == ["a2<|e|>"]


def test_only_the_first_turn(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        desk.run(api, [{"id": "t", "messages": [assistant("Sure"), *TALK]}], turns="first")
    assert [m["content"] for m in desk.lines()[0]["messages"]] == ["q1", "a1"]
    assert len(api.requests) == 1


def test_tool_results_stay_only_behind_the_calls_they_answer(desk: Desk) -> None:
    talk = [
        user("q"),
        assistant("", tool_calls=[call("add", {"a": 1}, 7)]),
        tool("2", tool_call_id="call00007"),
        assistant("it is 2"),
    ]

    def calls(arguments: str) -> Script:
        made = [{"id": "new", "type": "function", "function": {"name": "add", "arguments": arguments}}]
        return lambda body, n: (
            reply("two")
            if body["messages"][-1]["role"] == "tool"
            else reply(None, "tool_calls", message={"tool_calls": made})
        )

    with ScriptedApi(calls('{"a":1}')) as api:
        desk.run(api, [{"id": "same", "messages": talk, "tools": [{"name": "add"}]}])
    line = desk.lines()[0]
    assert [m["role"] for m in line["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert api.requests[1]["messages"][2]["tool_call_id"] == "new"
    assert api.requests[0]["tools"][0]["function"]["name"] == "add"
    desk.out = desk.folder / "other.jsonl"
    with ScriptedApi(calls('{"a":2}')) as api:
        result = desk.run(api, [{"id": "other", "messages": talk}])
    assert [m["role"] for m in desk.lines()[0]["messages"]] == ["user", "assistant"]
    assert result["skipped"] == {"tool_path_left": 1}


# --- going on -----------------------------------------------------------------------------------------------------


def test_dp_51_going_on_by_key_answers_each_input_once(desk: Desk) -> None:
    file = write(desk.folder / "in.jsonl", questions(10))
    keys = {}
    reader = RecordReader(answers=False)
    from headrace.types import hash_json

    for record in questions(10):
        item: Any = reader.read(record)
        keys[record["id"]] = hash_json([item.messages, item.tools])
    with ScriptedApi(echo) as api:
        desk.run(api)
        whole = {line["id"]: line for line in desk.lines()}
        kept = [whole[f"c{n}"] for n in (3, 0, 6, 1)]
        desk.out.write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"id": "c2", "ke')
        api.requests.clear()
        result = desk.run(api)
    assert file.exists()
    assert sorted(m["messages"][0]["content"] for m in api.requests) == [f"q{n}" for n in (2, 4, 5, 7, 8, 9)]
    assert sorted(line["id"] for line in desk.lines()) == sorted(f"c{n}" for n in range(10))
    assert {line["id"]: line["key"] for line in desk.lines()} == keys
    assert (result["answered"], result["conversations"]) == (6, 10)


def test_failures_are_tried_again_by_the_next_run(desk: Desk) -> None:
    with ScriptedApi(
        lambda b, n: (400, {}) if b["messages"][-1]["content"] in ("q3", "q5") else echo(b, n)
    ) as api:
        with pytest.raises(IncompleteError, match=r"2 conversations failed \(status_400 2\)"):
            desk.run(api)
        assert sorted(f["id"] for f in desk.failed()) == ["c3", "c5"]
        api.script = echo
        api.requests.clear()
        assert desk.run(api)["conversations"] == 10
    assert sorted(b["messages"][-1]["content"] for b in api.requests) == ["q3", "q5"]


def test_equal_conversations_are_asked_once(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        result = desk.run(api, questions(3) + questions(3))
    assert (result["answered"], result["skipped"]) == (3, {"duplicate": 3})


def test_other_settings_are_refused_and_the_file_left_alone(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        desk.run(api)
        before = desk.out.read_bytes()
        with pytest.raises(ConfigError, match=r"temperature 0\.6 != 1\.0"):
            desk.run(api, temperature=1.0)
        assert desk.run(api, in_flight=2, tries=3)["answered"] == 0
    assert desk.out.read_bytes() == before


KILLED = """
import sys
from pathlib import Path
from headrace.data.config import RegenerateConfig
from headrace.data.regenerate import regenerate
url, file, out = sys.argv[1:]
regenerate(RegenerateConfig(files=[file], out=Path(out), url=url, model="m", in_flight=4))
"""


@pytest.mark.slow
def test_kill_9_and_run_again(desk: Desk) -> None:
    rng = random.Random(0)

    def uneven(body: dict[str, Any], number: int) -> Any:
        time.sleep(rng.random() * 0.1)
        return echo(body, number)

    file = write(desk.folder / "in.jsonl", questions(60))
    with ScriptedApi(uneven) as api:
        command = [sys.executable, "-c", KILLED, api.url, str(file), str(desk.out)]
        process = subprocess.Popen(command)
        while len(api.requests) < 20 and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert 0 < len(desk.lines()) < 60
        subprocess.run(command, check=True)
    assert sorted(line["id"] for line in desk.lines()) == sorted(f"c{n}" for n in range(60))


# --- limits, providers, keys --------------------------------------------------------------------------------------


def test_the_cost_limit_holds_with_requests_in_flight(desk: Desk) -> None:
    def priced(body: dict[str, Any], number: int) -> Any:
        time.sleep(0.02)
        return {**echo(body, number), "usage": {"cost": 0.01}}

    with ScriptedApi(priced) as api:
        with pytest.raises(IncompleteError, match=r"cost limit of \$0\.1 is reached"):
            desk.run(api, questions(100), max_cost=0.1)
        spent = sum(line["generation"]["usage"]["cost"] for line in desk.lines())
        assert 0.05 <= spent <= 0.1 + 1e-9
        with pytest.raises(IncompleteError, match="cost limit"):
            desk.run(api, questions(100), max_cost=0.1)
        assert len(desk.lines()) * 0.01 <= 0.1 + 1e-9


def test_prices_give_the_cost_where_the_server_does_not(desk: Desk) -> None:
    with ScriptedApi(
        lambda b, n: {**echo(b, n), "usage": {"prompt_tokens": 1000, "completion_tokens": 500}}
    ) as api:
        assert desk.run(api, questions(2), price_in=1.0, price_out=4.0)["cost"] == pytest.approx(2 * 0.003)


def test_the_token_limit(desk: Desk) -> None:
    with (
        ScriptedApi(lambda b, n: {**echo(b, n), "usage": {"completion_tokens": 100}}) as api,
        pytest.raises(IncompleteError, match="limit of 300 answer tokens"),
    ):
        desk.run(api, questions(50), max_total_tokens=300, in_flight=1)
    assert len(desk.lines()) == 3


def test_a_dead_endpoint_ends_the_run_after_some_failures(desk: Desk) -> None:
    with (
        ScriptedApi(lambda b, n: (500, {})) as api,
        pytest.raises(IncompleteError, match="5 conversations in a row failed"),
    ):
        desk.run(api, questions(50), tries=1, give_up_after=5, in_flight=1)
    assert len(api.requests) == 5


def test_dp_54_provider_and_quantization_are_pinned_and_recorded(desk: Desk) -> None:
    with ScriptedApi(lambda b, n: {**echo(b, n), "provider": "A-bf16" if n % 2 == 0 else "B-fp4"}) as api:
        with pytest.raises(IncompleteError, match="other_provider 2"):
            desk.run(api, questions(4), provider="A-bf16", quantization="bf16", in_flight=1)
        pinned = api.requests[0]["provider"]
        assert pinned == {
            "allow_fallbacks": False,
            "order": ["A-bf16"],
            "only": ["A-bf16"],
            "quantizations": ["bf16"],
        }
        assert {p for line in desk.lines() for p in line["generation"]["providers"]} == {"A-bf16"}
        desk.out = desk.folder / "mixed.jsonl"
        result = desk.run(api, questions(4), in_flight=1)
    assert result["providers"] == {"A-bf16": 2, "B-fp4": 2}
    assert any("several providers" in text for text in desk.said)


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-42")
    with ScriptedApi(lambda b, n: (500, {}) if n == 0 else echo(b, n)) as api:
        desk.run(api, api_key_env="MY_KEY")
    assert {h["authorization"] for h in api.headers} == {"Bearer sk-secret-42"}
    said = capfd.readouterr()
    everything = said.out + said.err + "".join(desk.said)
    everything += "".join(p.read_text() for p in desk.folder.iterdir() if p.is_file())
    assert "sk-secret-42" not in everything
    for url in ("http://me:sk-secret-42@127.0.0.1/v1", "ftp://x", "nonsense"):
        with pytest.raises(ConfigError) as caught:
            build(RegenerateConfig, {"files": ["x"], "out": "o", "url": url, "model": "m"}, "test")
            desk.run(type("Api", (), {"url": url})())
        assert "sk-secret-42" not in str(caught.value)


# --- before the first request -------------------------------------------------------------------------------------


def test_dp_57_the_output_is_made_before_anything_is_asked(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        desk.out = desk.folder / "new" / "deep" / "answers.jsonl"
        assert desk.run(api, questions(1))["answered"] == 1
        api.requests.clear()
        (desk.folder / "blocked").write_text("a file")
        for out, message in (
            (desk.folder / "blocked" / "a.jsonl", "cannot be written"),
            (desk.folder, "is a folder"),
            (desk.folder / "in.jsonl", "not made by headrace regenerate"),
        ):
            desk.out = out
            with pytest.raises(ConfigError, match=message):
                desk.run(api, questions(1))
    assert api.requests == []


def test_nobody_at_the_address(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        pass
    with pytest.raises(EngineUnavailableError, match="cannot be reached"):
        desk.run(api)


def test_bad_records_and_empty_input(desk: Desk) -> None:
    bad = [
        *questions(1),
        {"messages": [{"role": "boss", "content": "x"}]},
        {"text": "t"},
        {"messages": [{"role": "system", "content": "s"}]},
    ]
    with ScriptedApi(echo) as api:
        with pytest.raises(InputError, match=r"in\.jsonl line 2"):
            desk.run(api, bad)
        result = desk.run(api, bad, on_bad_row="skip")
        assert result["skipped"] == {"unknown_role": 1, "no_conversation": 1, "no_prompt": 1}
        desk.out = desk.folder / "none.jsonl"
        with pytest.raises(HeadraceError, match="no conversation was answered"):
            desk.run(api, [])
    assert len(desk.lines()) == 0


# --- token ids ----------------------------------------------------------------------------------------------------

TOY = ToyTokenizer()


def sampling(body: dict[str, Any], number: int) -> Any:
    """Answers "yes" in drifted ids, as SGLang would give them (even) or vLLM (odd)."""
    assert body["return_token_ids"] is True
    prompt = TOY.apply_chat_template(body["messages"], add_generation_prompt=True)
    ids = [16 + ord("y"), 200000, 2, 99]
    if number % 2 == 0:
        return reply("yes", choice={"prompt_token_ids": prompt, "response_token_ids": ids})
    return {**reply("yes", choice={"token_ids": ids}), "prompt_token_ids": prompt}


@pytest.mark.parametrize("path", ["/get_model_info", "/version"])
def test_dp_20_sampled_ids_reach_the_rows(desk: Desk, config_only: Path, path: str) -> None:
    with ScriptedApi(sampling, {path: {"version": "1"}}) as api:
        result = desk.run(api, token_ids="require")
    assert result["with_token_ids"] == 10
    values = {"files": [str(desk.out)], "model": str(config_only), "out": desk.folder / "rows"}
    made = prepare(build(PrepareConfig, values, "test"), tokenizer=ToyTokenizer())
    assert made["rows_with_sampled_ids"] == made["rows"] == 10
    assert made["counts"]["notes"]["tokens_after_end_removed"] == 10
    for row in RowFolder.open(desk.folder / "rows").rows():
        assert row.ids[-3:].tolist() == [16 + ord("y"), 200000, 2]
        assert row.supervised == 3


def test_ids_that_are_required_and_missing(desk: Desk) -> None:
    with ScriptedApi(echo) as api:
        with pytest.raises(PreflightError, match="neither SGLang nor vLLM"):
            desk.run(api, token_ids="require")
        assert api.requests == []
        api.paths["/version"] = {"version": "old"}
        with pytest.raises(IncompleteError, match="sends no token ids"):
            desk.run(api, token_ids="require", in_flight=1)
        assert "return_token_ids" not in (desk.run(api, token_ids="off"), api.requests[-1])[1]


@pytest.mark.slow
def test_dp_16_a_server_with_another_tokenizer_is_refused(desk: Desk, smollm2: Path) -> None:
    from headrace.target import Target

    tokenizer = Target.open(str(smollm2)).tokenizer
    shift = 0

    def tokenize(body: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer.encode(body["prompt"], add_special_tokens=False)
        return {"tokens": [i + shift if i in (1, 2) else i for i in ids]}

    with ScriptedApi(echo, {"/version": {"version": "1"}, "/tokenize": tokenize}) as api:
        assert desk.run(api, tokenizer=str(smollm2))["answered"] == 10
        shift = 1
        with pytest.raises(SpecMismatchError, match=r"encodes '<\|im_start\|>' as \[2\]"):
            desk.run(api, tokenizer=str(smollm2))


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(desk.folder / "in.jsonl", questions(5))
    with ScriptedApi(echo) as api:
        args = ["regenerate", str(file), "--out", str(desk.out), "--url", api.url, "--model", "m"]
        assert main([*args, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["answered"] == 5
        assert main(args) == 0
        assert "answered in all" in capsys.readouterr().out
        api.script = lambda b, n: (400, {})
        assert main([*args[:3], str(desk.folder / "b.jsonl"), *args[4:]]) == 1
    assert main(args) == 1


def test_interrupting_keeps_what_is_done(desk: Desk) -> None:
    def interrupting(body: dict[str, Any], number: int) -> Any:
        if number == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.5)
        return echo(body, number)

    with ScriptedApi(interrupting) as api:
        with pytest.raises(KeyboardInterrupt):
            desk.run(api, in_flight=1)
        done = len(desk.lines())
        assert 4 <= done <= 6
        api.script = echo
        assert desk.run(api)["conversations"] == 10
