"""Reading a server's counters: what its answers must be before a number is made of them.

A loopback HTTP server plays back answers in the shape recorded from SGLang 0.5.23 and vLLM 0.32.0; the real engines are in
test_sglang.py and test_vllm.py.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.draft.checkpoint import save_draft
from headrace.errors import CaptureError, ConfigError, EngineError
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.run import evaluate
from headrace.target import Target
from headrace.testing.drafts import new_draft
from headrace.testing.models import make_tiny_model

Answers = dict[str, Any]


@pytest.fixture
def playback() -> Iterator[Callable[[Answers], str]]:
    """Serves fixed answers by path: a value as JSON, a str as text, an int as an HTTP status, a list one after the other."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                value = answers.get(self.path, 404)
                if isinstance(value, list):
                    value = value.pop(0) if len(value) > 1 else value[0]
                status = value if isinstance(value, int) else 200
                text = value if isinstance(value, str) else json.dumps(value)
                self.send_response(status)
                self.send_header(
                    "content-type", "text/plain" if isinstance(value, str) else "application/json"
                )
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client has seen enough
                    self.wfile.write(text.encode())

            do_GET = do_POST = _answer

            def log_message(self, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny target, a drafter for it, and two prompts."""
    import torch

    folder = tmp_path_factory.mktemp("served")
    target = Target.open(str(make_tiny_model(folder / "target", vocab=32, layers=4, hidden=32)))
    save_draft(folder / "draft", new_draft(target, (1, 2, 3), torch.arange(32)), target.spec([1, 2, 3]), {})
    (folder / "two.jsonl").write_text('{"input_ids": [3, 4]}\n{"input_ids": [5]}')
    return {
        "drafts": [folder / "draft"],
        "model": str(folder / "target"),
        "prompts": [folder / "two.jsonl"],
        "steps": 2,
    }


def served(case: dict[str, Any], url: str, **more: Any) -> dict[str, Any]:
    report = evaluate(EvaluateConfig(**{**case, "server": url, "offline": False, **more}), lambda text: None)
    result: dict[str, Any] = report["served"]
    return result


INFO = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": "/nowhere",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
    "version": "0.5.23",
}


def sglang_reply(**changes: Any) -> dict[str, Any]:
    meta = {"spec_verify_ct": 4, "spec_num_correct_drafts": 3, "spec_correct_drafts_histogram": [2, 1, 1]}
    return {"text": "", "output_ids": [7] * 8, "meta_info": {**meta, **changes}}


def test_sglang_counts_are_pooled_over_requests(
    case: dict[str, Any], playback: Callable[[Answers], str]
) -> None:
    url = playback(
        {
            "/server_info": INFO,
            "/generate": [sglang_reply(), sglang_reply(spec_correct_drafts_histogram=[2, 1, 1])],
        }
    )
    result = served(case, url)
    assert (result["verifications"], result["accepted"], result["reached"]) == (8, 6, [4, 2])
    assert result["acceptance_length"] == 1.75
    assert result["drafter"] == {"path": "/nowhere", "weights_hash": None, "is_ours": None}
    # Older releases answer at the older address.
    old = playback({"/get_server_info": INFO, "/generate": sglang_reply()})
    assert served(case, old)["verifications"] == 8


def test_sglang_answers_that_end_at_once_have_no_counts(
    case: dict[str, Any], playback: Callable[[Answers], str]
) -> None:
    at_once = {"text": "", "output_ids": [2], "meta_info": {"completion_tokens": 1}}
    assert (
        served(case, playback({"/server_info": INFO, "/generate": [at_once, sglang_reply()]}))[
            "verifications"
        ]
        == 4
    )


@pytest.mark.parametrize(
    "answers, error, message",
    [
        (
            {"/server_info": {**INFO, "speculative_draft_model_path": None}},
            ConfigError,
            "runs without a drafter",
        ),
        ({"/server_info": {**INFO, "speculative_algorithm": None}}, ConfigError, "runs without a drafter"),
        ({"/server_info": {**INFO, "speculative_num_steps": 5}}, ConfigError, "--steps 5"),
        ({"/server_info": {**INFO, "speculative_eagle_topk": 4}}, ConfigError, "--topk 4"),
        ({"/server_info": INFO, "/generate": 503}, EngineError, "HTTP 503"),
        ({"/server_info": INFO, "/generate": {"error": {"message": "too long"}}}, CaptureError, "too long"),
        ({"/server_info": INFO, "/generate": {"text": "a"}}, CaptureError, "does not return output_ids"),
        (
            {"/server_info": INFO, "/generate": sglang_reply(spec_num_correct_drafts=9)},
            CaptureError,
            "contradict each other",
        ),
        (
            {"/server_info": INFO, "/generate": sglang_reply(spec_verify_ct=5)},
            CaptureError,
            "contradict each other",
        ),
        ({"/server_info": "<html>"}, ConfigError, "neither SGLang nor vLLM"),
        ({"/metrics": "# nothing"}, ConfigError, "neither SGLang nor vLLM"),
        ({"/metrics": "vllm:num_requests_running 0.0\n"}, ConfigError, "runs without a drafter"),
    ],
)
def test_answers_no_number_is_made_of(
    answers: Answers,
    error: type[Exception],
    message: str,
    case: dict[str, Any],
    playback: Callable[[Answers], str],
) -> None:
    with pytest.raises(error, match=message):
        served(case, playback(answers))


def metrics(drafts: int, reached: tuple[int, int], tokens: int) -> str:
    """As vLLM prints them, for two engines of one server: half of everything each."""
    lines = []
    for engine in "01":
        labels = f'engine="{engine}",model_name="m"'
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts / 2}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.76e+09",
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {n / 2}'
                for i, n in enumerate(reached)
            ),
            f"vllm:generation_tokens_total{{{labels}}} {tokens / 2}",
        ]
    return "\n".join(lines) + "\n"


def vllm_answers(*pages: str) -> Answers:
    return {
        "/metrics": list(pages),
        "/v1/models": {"data": [{"id": "m"}]},
        "/version": {"version": "0.32.0"},
        "/v1/completions": {"choices": [{"text": "", "token_ids": [7] * 8}]},
    }


def test_vllm_totals_are_read_before_and_after(
    case: dict[str, Any], playback: Callable[[Answers], str]
) -> None:
    before, after = metrics(100, (60, 20), 400), metrics(110, (68, 24), 416)
    result = served(case, playback(vllm_answers(before, before, after)))
    assert (result["verifications"], result["reached"], result["acceptance_length"]) == (10, [8, 4], 2.2)
    assert result["version"] == "0.32.0"


def test_another_client_of_the_same_vllm_is_noticed(
    case: dict[str, Any], playback: Callable[[Answers], str]
) -> None:
    before, after = metrics(100, (60, 20), 400), metrics(130, (80, 30), 480)
    with pytest.raises(CaptureError, match="generated 80 tokens while ours were 16"):
        served(case, playback(vllm_answers(before, before, after)))


def test_vllm_drafts_as_many_tokens_as_it_counts_positions(
    case: dict[str, Any], playback: Callable[[Answers], str]
) -> None:
    with pytest.raises(ConfigError, match="--steps 2"):
        served({**case, "steps": 3}, playback(vllm_answers(metrics(2, (1, 1), 4))))
    with pytest.raises(ConfigError, match="vLLM drafts chains"):
        served({**case, "topk": 2}, playback(vllm_answers(metrics(2, (1, 1), 4))))


def test_a_gap_above_ten_percent_is_flagged(case: dict[str, Any], playback: Callable[[Answers], str]) -> None:
    said: list[str] = []
    config = EvaluateConfig(
        **{
            **case,
            "max_new_tokens": 8,
            "server": playback({"/server_info": INFO, "/generate": sglang_reply()}),
        }
    )
    report = evaluate(config, said.append)
    part = report["served"]["parts"][0]
    offline = report["acceptance_length"]
    assert part["offline"] == offline
    assert part["gap"] == pytest.approx(1.75 / offline - 1, abs=1e-3)
    assert part["mismatch"] is report["served"]["mismatch"] is (abs(part["gap"]) > 0.10)
    assert part["mismatch"] and any("differ by +" in line and "headrace diagnose" in line for line in said)


def test_the_exported_drafter_is_recognized(
    case: dict[str, Any], playback: Callable[[Answers], str], tmp_path: Path
) -> None:
    from headrace.draft.export import export
    from headrace.draft.serving import ExportConfig

    export(ExportConfig(draft=case["drafts"][0], engine="sglang", out=tmp_path / "out"), lambda text: None)
    info = {**INFO, "speculative_draft_model_path": str(tmp_path / "out")}
    assert (
        served(case, playback({"/server_info": info, "/generate": sglang_reply()}))["drafter"]["is_ours"]
        is True
    )
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["draft"]["weights_hash"] = "another"
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert (
        served(case, playback({"/server_info": info, "/generate": sglang_reply()}))["drafter"]["is_ours"]
        is False
    )
