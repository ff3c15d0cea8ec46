"""Drafters for the real demo model, our own acceptance of them, and the real engines that serve their exports."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.demo import cache_root
from headrace.draft import model as draft_model
from headrace.draft import shape as draft_shape
from headrace.draft.checkpoint import save_draft
from headrace.draft.export import export
from headrace.draft.serving import EngineName, ExportConfig
from headrace.engines.hf import load_model
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.offline import Part
from headrace.evaluate.prompts import Conversation, read_prompts
from headrace.evaluate.run import evaluate
from headrace.target import Target
from headrace.testing import drafts
from headrace.testing.envs import engine_env
from headrace.testing.servers import ServerProcess, free_port

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parents[1] / "support"
PROMPTS = ROOT / "examples" / "data" / "eval_prompts.jsonl"
COUNT, STEPS, NEW = 5, 5, 32

# Every norm and vocabulary flag that an engine must read right, in two drafters that SGLang and vLLM both serve, and one
# that vLLM alone can.
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 2048},
    "eagle31": {"draft_vocab": 3000, "fc_norm": "each", "normed_feedback": True, "taps": (1, 9, 16, 27)},
    "speculators": {"draft_vocab": 2048, "fc_norm": "joint", "norm_before_residual": True},
}


@pytest.fixture(scope="session")
def target(smollm2: Path) -> Target:
    return Target.open(str(smollm2))


@pytest.fixture(scope="session")
def prompt_ids(target: Target) -> list[list[int]]:
    return [Conversation(prompt, target.tokenizer).ids() for prompt in read_prompts(PROMPTS, COUNT).prompts]


@pytest.fixture(scope="session")
def fitted(target: Target, prompt_ids: list[list[int]]) -> Callable[[str], Path]:
    """Makes a drafter of a variant, fitted to the demo model's own answers; kept in the cache folder between sessions."""

    @functools.cache
    def make(variant: str) -> Path:
        variants = {"taps": (2, 15, 27), "intermediate_size": 512, **VARIANTS[variant]}
        how = drafts.Fitting(new_tokens=NEW, rounds=32, steps=STEPS)
        code = [inspect.getsource(module) for module in (drafts, draft_model, draft_shape)]
        identity = json.dumps([variants, str(how), prompt_ids, target.weights_hash, code])
        name = f"{variant}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        folder = cache_root() / "test-drafts" / name
        if not (folder / "config.json").is_file():
            model = load_model(target, "float32", "cpu")
            # The last prompt is not trained on: acceptance must not be perfect.
            draft = drafts.fit_draft(target, model, prompt_ids[:-1], how=how, **variants)
            save_draft(folder, draft, target.spec([*variants["taps"]]), {"made for": "tests of serving"})
        return folder

    return make


@pytest.fixture(scope="session")
def settings(
    target: Target, fitted: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., EvaluateConfig]:
    """The one measurement of these tests, of any variant; in one session its offline part is measured once."""
    out = tmp_path_factory.mktemp("evaluation")

    def make(variant: str, **more: Any) -> EvaluateConfig:
        fixed = {"drafts": [fitted(variant)], "model": str(target.path), "prompts": [PROMPTS], "limit": COUNT}
        return EvaluateConfig(
            **{**fixed, "steps": STEPS, "max_new_tokens": NEW, "out": out / variant, **more}
        )

    return make


@pytest.fixture(scope="session")
def offline(settings: Callable[..., EvaluateConfig]) -> Callable[[str], Part]:
    """Our own speculative decoding of a variant, checked against plain decoding; answers in the order of the prompts."""

    @functools.cache
    def measure(variant: str) -> Part:
        config = settings(variant)
        evaluate(config, lambda text: None)
        assert config.out is not None
        part = Part(**json.loads(next((config.out / "parts").glob("*.json")).read_text()))
        assert part.matches("equal") == len(part.records) == COUNT
        assert min(part.acceptance(STEPS).reached[:3]) > 0, "acceptance must be non-trivial"
        part.records.sort(key=lambda record: record["line"])
        return part

    return measure


@pytest.fixture(scope="session")
def exported(fitted: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An export of a variant for an engine."""

    @functools.cache
    def make(variant: str, engine: EngineName) -> Path:
        out = tmp_path_factory.mktemp("exports") / f"{variant}-{engine}"
        export(ExportConfig(draft=fitted(variant), engine=engine, out=out, steps=STEPS), lambda text: None)
        return out

    return make


@pytest.fixture(scope="session")
def vllm_offline(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Runs tests/support/vllm_generate.py in vLLM's environment."""

    def run(draft: Path, prompts: list[list[int]], *, one_by_one: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("vllm-offline")
        job = {
            "model": str(target.path),
            "draft": str(draft),
            "steps": STEPS,
            "max_new_tokens": NEW,
            "prompts": prompts,
            "one_by_one": one_by_one,
        }
        (folder / "in.json").write_text(json.dumps(job))
        command = [
            str(engine_env("vllm-0.32.0")),
            str(SUPPORT / "vllm_generate.py"),
            str(folder / "in.json"),
            str(folder / "out.json"),
        ]
        done = subprocess.run(command, env=vllm_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        result: dict[str, Any] = json.loads((folder / "out.json").read_text())
        result["log"] = done.stdout + done.stderr
        return result

    return run


@pytest.fixture(scope="session")
def vllm_server(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Path], ServerProcess]]:
    """Starts vLLM's OpenAI server with a drafter."""
    started: list[ServerProcess] = []

    def start(draft: Path) -> ServerProcess:
        port = free_port()
        speculative = {"model": str(draft), "method": "eagle3", "num_speculative_tokens": STEPS}
        command = [
            *(
                str(engine_env("vllm-0.32.0")),
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(target.path),
            ),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
            *("--host", "127.0.0.1", "--port", str(port), "--speculative-config", json.dumps(speculative)),
        ]
        log = tmp_path_factory.mktemp("vllm-server") / "server.log"
        server = ServerProcess(command, port, log, env=vllm_environment())
        started.append(server)
        return server.start().wait_healthy()

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def sglang_server(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Path], ServerProcess]]:
    """Starts SGLang's server with a drafter and the plug-in that lets it draft on a CPU."""
    started: list[ServerProcess] = []
    plugin = install_plugin(tmp_path_factory.mktemp("sglang-plugin"))

    def start(draft: Path) -> ServerProcess:
        port = free_port()
        command = [
            *(
                str(engine_env("sglang-0.5.23")),
                "-m",
                "sglang.launch_server",
                "--model-path",
                str(target.path),
            ),
            *(
                "--dtype",
                "float32",
                "--max-total-tokens",
                "8192",
                "--context-length",
                "1024",
                "--mem-fraction-static",
                "0.3",
            ),
            *(
                "--max-running-requests",
                "8",
                "--attention-backend",
                "torch_native",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ),
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
            *("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(STEPS + 1)),
            "--sleep-on-idle",  # a scheduler that spins on one of two cores slows what we compute tenfold
        ]
        env = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": str(plugin),
        }
        log = tmp_path_factory.mktemp("sglang-server") / "server.log"
        server = ServerProcess(command, port, log, env=env)
        started.append(server)
        return server.start().wait_healthy()

    yield start
    for server in started:
        server.stop()


def vllm_environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


def install_plugin(folder: Path) -> Path:
    """What puts a module and its entry point in front of a Python's own packages: a folder for PYTHONPATH."""
    shutil.copy(SUPPORT / "sglang_chains.py", folder)
    info = folder / "headrace_test_chains-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-test-chains\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nheadrace_test_chains = sglang_chains:register\n"
    )
    return folder
