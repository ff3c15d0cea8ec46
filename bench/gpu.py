"""Capture at the engine's own speed: the real SGLang on this GPU, plain prefill against ours, in turns, to durable shards.

    python bench/gpu.py [--quick] [--shape 8b|1b] [--repeats 5] [--disk FOLDER] [--json FILE]

Two servers share the device: SGLang as it is, and the same started as ``headrace serve`` starts it. Every round sends the same
prompts (log-normal lengths, mean 1,500, at most 8,192 tokens) in each of the ways; weights are random. "extract" is the
whole of ``headrace extract``: verified, compressed, synced to disk. A small model with real numbers is compared with
transformers first. ``--quick`` runs all of it on a CPU with a tiny model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Bench, interleaved, main
from engine_cpu import capture_all, post_all
from headrace.data.rows import RowWriter
from headrace.engines import open_engine
from headrace.engines.config import ServeConfig
from headrace.extract.config import ExtractConfig
from headrace.extract.run import extract
from headrace.target import Target
from headrace.testing.engine import row_error
from headrace.testing.models import make_tiny_model
from headrace.testing.servers import ServerProcess, free_port, sglang_capture_server
from headrace.types import Capture, Row

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4},
}
GPU_FLAGS = [
    "--attention-backend=triton", "--sampling-backend=pytorch", "--disable-cuda-graph",
    "--chunked-prefill-size=8192", "--context-length=16384", "--max-running-requests=512",
]  # fmt: skip
CPU_FLAGS = [
    "--max-total-tokens=8192", "--context-length=2048", "--mem-fraction-static=0.3", "--max-running-requests=16",
    "--chunked-prefill-size=64",
]  # fmt: skip
TARGETS = {
    "plug-in, nobody asks": 0.995,
    "capture to verified states": 0.985,
    "extract to durable shards": 0.97,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=("8b", "1b"), default="8b", help="shape of the random model")
    parser.add_argument("--count", type=int, default=256, help="prompts of a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disk", type=Path, help="where the stores go (default: a temporary folder)")


def write_config(folder: Path, shape: str) -> Path:
    """A Llama of ``shape`` that is a config and nothing else: SGLang fills in random weights."""
    sizes = SHAPES[shape]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "num_key_value_heads": max(1, sizes["num_attention_heads"] // 4), "vocab_size": 128256 if shape != "tiny" else 1000,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"], "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "attention_bias": False, "mlp_bias": False, **sizes,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompts(count: int, mean: float, longest: int, vocab: int) -> list[Row]:
    """Random prompts, log-normal lengths."""
    rng = np.random.default_rng(23)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, count), 8, longest).astype(int)
    return [Row.make(rng.integers(3, vocab, n), np.ones(n, bool)) for n in lengths]


def capture_server(model: Path, folder: Path, flags: Sequence[str], python: str) -> ServerProcess:
    """SGLang as ``headrace serve`` starts it."""
    config = ServeConfig(
        model=str(model),
        port=free_port(),
        staging=str(folder / "staging"),
        python=python,
        sglang_args=list(flags),
    )
    return sglang_capture_server(config, folder / "capture.log")


def plain_server(model: Path, folder: Path, flags: Sequence[str], python: str) -> ServerProcess:
    """SGLang as it is."""
    port = free_port()
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-tokenizer-init"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-radix-cache", *flags]
    return ServerProcess(command, port, folder / "plain.log")


def check_values(bench: Bench, folder: Path, flags: Sequence[str], python: str, dtype: str) -> None:
    """A small random model with weights of its own: every row of every tap against transformers in float32."""
    model = make_tiny_model(
        folder / "small",
        "llama",
        layers=8,
        hidden=256,
        vocab=1000,
        dtype=dtype,
        max_position_embeddings=32768,
    )
    target = Target.open(str(model))
    rows = prompts(24, 80, 500, 1000)
    share = ["--mem-fraction-static=0.4"] if dtype == "bfloat16" else []
    with capture_server(model, folder, [*flags, *share, "--dtype", dtype], python).start() as server:
        server.wait_healthy()
        spec = target.spec("eagle3", dtype=dtype)
        reference = open_engine("hf", target, spec, {"dtype": "float32"})
        truth = {c.key: c.states for c in reference.capture(iter(rows)) if isinstance(c, Capture)}
        same = {
            c.key: c.states
            for c in open_engine("hf", target, spec).capture(iter(rows))
            if isinstance(c, Capture)
        }
        with open_engine("sglang", target, spec, {"url": [server.url], "reference": "none"}) as engine:
            got = {c.key: c.states for c in engine.capture(iter(rows)) if isinstance(c, Capture)}
    assert set(got) == set(truth), "captures are missing"
    error = float(np.median([row_error(got[key], truth[key]) for key in truth]))
    noise = float(np.median([row_error(same[key], truth[key]) for key in truth]))
    bench.target(
        f"error against float32, times that of transformers in {dtype}",
        error / max(noise, 1e-7),
        2.0,
        error <= 2 * max(noise, 1e-6),
    )


def run(bench: Bench) -> None:
    """Check values, start both servers, take turns, compare."""
    cuda = torch.cuda.is_available() and not bench.quick
    shape = bench.args.shape if cuda else "tiny"
    flags = GPU_FLAGS if cuda else CPU_FLAGS
    python = sys.executable
    if not cuda:
        from headrace.testing.envs import engine_env

        python = str(engine_env("sglang-0.5.23"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=bench.args.disk)))
        check_values(bench, folder, flags, python, "bfloat16" if cuda else "float32")
        model = write_config(folder / "model", shape)
        target = Target.open(str(model))
        rows = prompts(bench.args.count, 1500, 8192, 128000) if cuda else prompts(12, 60, 400, 1000)
        with RowWriter(disk / "rows") as writer:
            for row in rows:
                writer.add(row)
        dummy = [*flags, "--load-format=dummy", "--dtype=bfloat16"]
        # SGLang takes its share of what is free when it starts: the second server's is of what the first one left.
        first, second = (["--mem-fraction-static=0.4"], ["--mem-fraction-static=0.75"]) if cuda else ([], [])
        capturing = stack.enter_context(capture_server(model, folder, [*dummy, *first], python).start())
        capturing.wait_healthy()
        plain = stack.enter_context(plain_server(model, folder, [*dummy, *second], python).start())
        plain.wait_healthy()
        compare(
            bench,
            Turns(target, rows, disk, capturing.url, plain.url),
            bench.args.repeats if cuda else 2,
            shape,
        )


class Turns:
    """The ways to send one round of prompts."""

    def __init__(self, target: Target, rows: list[Row], disk: Path, capturing: str, plain: str) -> None:
        self.target, self.rows, self.disk, self.capturing, self.plain = target, rows, disk, capturing, plain
        self.spec = target.spec("eagle3", dtype="bfloat16")
        self.tokens = sum(map(len, rows))

    def ways(self) -> dict[str, Callable[[], object]]:
        return {
            "plain SGLang": lambda: post_all(self.plain, self.rows),
            "plug-in, nobody asks": lambda: post_all(self.capturing, self.rows),
            "capture to verified states": self.capture,
            "extract to durable shards": self.extract,
        }

    def capture(self) -> None:
        options = {"url": [self.capturing], "reference": "none", "tokens_in_flight": self.tokens}
        with open_engine("sglang", self.target, self.spec, options) as engine:
            capture_all(engine, self.rows)

    def extract(self) -> None:
        out = self.disk / "store"
        shutil.rmtree(out, ignore_errors=True)
        config = ExtractConfig(
            rows=self.disk / "rows", model=str(self.target.path), out=out, engine="sglang", url=[self.capturing],
            dtype="bfloat16", skip_preflight=True, engine_options={"reference": "none", "tokens_in_flight": self.tokens},
        )  # fmt: skip
        result = extract(config, lambda _: None)
        assert result["captures"] == len(self.rows)


def compare(bench: Bench, turns: Turns, repeats: int, shape: str) -> None:
    """Interleaved rounds; rates as ratios to plain prefill."""
    timings = interleaved(turns.ways(), repeats=repeats)
    base = timings["plain SGLang"].median
    bytes_per_token = turns.spec.bytes_per_token
    for name, timing in timings.items():
        rate = turns.tokens / timing.median
        moved = rate * bytes_per_token / 1e9 if name in TARGETS and "nobody" not in name else 0.0
        bench.row(
            shape=shape,
            path=name,
            tokens_per_s=rate,
            of_plain=base / timing.median,
            spread=timing.spread,
            gb_per_s=moved,
        )
    for name, least in TARGETS.items():
        share = base / timings[name].median
        bench.target(f"{name}, share of plain prefill ({shape})", share, least, share >= least)


if __name__ == "__main__":
    main("gpu", run, arguments)
