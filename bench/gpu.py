"""Capture at the engine's own speed: the real SGLang on this GPU, plain prefill against ours, in turns, to durable shards.

    python bench/gpu.py [--quick] [--shape 8b|1b] [--variant radix] [--ways plain capture] [--repeats 5] [--trace FOLDER]
                        [--disk FOLDER] [--json FILE]
    python bench/gpu.py --merge FILE... --json bench/results/gpu.json

Two servers share the device: SGLang as it is, and the same started as ``headrace serve`` starts it. Every round sends the same
prompts (log-normal lengths, mean 1,500, at most 8,192 tokens) in each of the ways; weights are random. "extract" is the
whole of ``headrace extract``: verified, compressed, synced to disk. SGLang's own JSON path gets a few prompts only, beside the
same prompts without it. A small model with real numbers is compared with transformers first, on a third server. ``--quick``
runs all of it on a CPU with a tiny model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Bench, interleaved, main
from engine_cpu import capture_all, extract_all, json_path, post_all, write_alone
from gpu_trace import trace
from headrace.data.rows import RowWriter
from headrace.engines import Engine, open_engine
from headrace.engines.config import ServeConfig
from headrace.extract import watch
from headrace.extract.config import ExtractConfig
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
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
    # Servers start side by side: a fraction of what is free would depend on which came first.
    "--max-total-tokens=131072", "--mem-fraction-static=0.8",
]  # fmt: skip
CPU_FLAGS = [
    "--max-total-tokens=8192", "--context-length=2048", "--mem-fraction-static=0.3", "--max-running-requests=16",
    "--chunked-prefill-size=64",
]  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "radix": (),  # the prefix cache stays on; every request has a salt, as ours always do
    "chunk-2k": ("--chunked-prefill-size=2048",),
    "graphs": ("--disable-decode-cuda-graph",),  # prefill graphs; nothing is decoded
    "tp2": ("--tp-size=2", "--disable-custom-all-reduce"),
    "dp2": ("--dp-size=2",),
}
JSON_TOKENS = 2048
"""Of the prompts that are also sent SGLang's own way, which takes a minute and more for a whole chunk."""
PLAIN = "plain SGLang"
WAYS = {
    "plain": PLAIN,
    "idle": "plug-in, nobody asks",
    "capture": "capture to verified states",
    "extract": "extract to durable shards",
    "json": "SGLang's own JSON, a few prompts",
}
TARGETS = {WAYS["idle"]: 0.995, WAYS["capture"]: 0.985, WAYS["extract"]: 0.97}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=("8b", "1b"), default="8b", help="shape of the random model")
    parser.add_argument(
        "--variant", choices=VARIANTS, default="base", help="how both servers differ from the usual"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no turn that would end later than this"
    )
    parser.add_argument(
        "--trace", type=Path, help="also write where ten steps of each server go, into this folder"
    )
    parser.add_argument(
        "--ways", choices=WAYS, nargs="+", default=list(WAYS), help="what is measured beside plain SGLang"
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs="*",
        default=[],
        metavar="N",
        help="also extract with so many worker processes",
    )
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


def flags_of(variant: str, cuda: bool) -> list[str]:
    """SGLang's flags, the same for both servers."""
    flags = (
        [f for f in GPU_FLAGS if variant != "graphs" or f != "--disable-cuda-graph"] if cuda else CPU_FLAGS
    )
    return [*flags, *(VARIANTS[variant] if cuda else ())]


def chunk_of(flags: Sequence[str]) -> int:
    """Tokens of a prefill chunk."""
    return int([f for f in flags if f.startswith("--chunked-prefill-size=")][-1].split("=")[1])


def capture_server(
    model: Path, folder: Path, flags: Sequence[str], python: str, radix: bool
) -> ServerProcess:
    """SGLang as ``headrace serve`` starts it."""
    config = ServeConfig(
        model=str(model), port=free_port(), staging=str(folder / f"staging-{model.name}"), python=python,
        prefix_cache=radix, sglang_args=list(flags),
    )  # fmt: skip
    return sglang_capture_server(config, folder / f"capture-{model.name}.log")


def plain_server(model: Path, folder: Path, flags: Sequence[str], python: str, radix: bool) -> ServerProcess:
    """SGLang as it is."""
    port = free_port()
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-tokenizer-init"]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *([] if radix else ["--disable-radix-cache"]),
        *flags,
    ]
    return ServerProcess(command, port, folder / "plain.log")


def check_values(bench: Bench, model: Path, server: ServerProcess, dtype: str) -> None:
    """A small random model with weights of its own: every row of every tap against transformers in float32."""
    target = Target.open(str(model))
    rows = prompts(24, 80, 500, 1000)
    spec = target.spec("eagle3", dtype=dtype)

    def states(engine: Engine) -> dict[str, Any]:
        return {c.key: c.states for c in engine.capture(iter(rows)) if isinstance(c, Capture)}

    with server:
        truth = states(open_engine("hf", target, spec, {"dtype": "float32"}))
        same = states(open_engine("hf", target, spec))
        with open_engine("sglang", target, spec, {"url": [server.url], "reference": "none"}) as engine:
            got = states(engine)
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
    """Start the servers side by side, check values, take turns, compare."""
    began, args = time.perf_counter(), bench.args
    if args.workers:
        watch.PROGRESS_SECONDS = 0.1  # enough looks to know what was done when the last worker joined
    cuda = torch.cuda.is_available() and not bench.quick
    shape, dtype = (args.shape, "bfloat16") if cuda else ("tiny", "float32")
    flags, radix = flags_of(args.variant, cuda), args.variant == "radix"
    python = sys.executable
    if not cuda:
        from headrace.testing.envs import engine_env

        python = str(engine_env("sglang-0.5.23"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.disk)))
        small = make_tiny_model(
            folder / "small",
            "llama",
            layers=8,
            hidden=256,
            vocab=1000,
            dtype=dtype,
            max_position_embeddings=32768,
        )
        model = write_config(folder / "model", shape)
        dummy = [*flags, "--load-format=dummy", "--dtype=bfloat16"]
        checked = capture_server(small, folder, [*flags, "--dtype", dtype], python, radix)
        capturing = capture_server(model, folder, dummy, python, radix)
        plain = plain_server(model, folder, dummy, python, radix)
        for server in (checked, capturing, plain):
            stack.callback(server.start().stop)
        target = Target.open(str(model))
        rows = prompts(args.count, 1500, 8192, 128000) if cuda else prompts(12, 60, 400, 1000)
        with RowWriter(disk / "rows") as writer:
            for row in rows:
                writer.add(row)
        check_values(bench, small, checked, dtype)
        for server in (capturing, plain):
            server.wait_healthy()
        print(f"values checked and servers ready after {time.perf_counter() - began:.0f} s", flush=True)
        turns = Turns(target, rows, disk, capturing.url, plain.url, radix, args.workers)
        stack.callback(turns.close)
        compare(bench, turns, args.repeats if cuda else 2, shape, began + args.seconds)
        bench.save()
        if "json" in args.ways:
            rate, share = turns.json_share(min(chunk_of(flags), JSON_TOKENS))
            bench.row(
                shape=shape, variant=args.variant, path=WAYS["json"], repeats=1, tokens_per_s=rate, of_plain=share,
                least=share, most=share, gb_per_s=rate * turns.spec.bytes_per_token / 1e9,
            )  # fmt: skip
            print(json.dumps(bench.rows[-1]), flush=True)
            bench.save()
        if args.trace:
            for name, url, way in (
                ("plain", plain.url, PLAIN),
                ("capturing", capturing.url, WAYS["capture"]),
            ):
                found = trace(url, args.trace / name, turns.ways()[way])
                print(f"ten steps, {name}: {json.dumps(found)}", flush=True)


class Turns:
    """The ways to send one round of prompts."""

    def __init__(
        self,
        target: Target,
        rows: list[Row],
        disk: Path,
        capturing: str,
        plain: str,
        radix: bool,
        workers: Sequence[int],
    ) -> None:
        self.target, self.rows, self.disk, self.capturing, self.plain = target, rows, disk, capturing, plain
        self.radix, self.workers = radix, workers
        self.spec = target.spec("eagle3", dtype="bfloat16")
        self.tokens = sum(map(len, rows))
        self.bytes_stored = 0
        self._engine: Engine | None = None

    def ways(self) -> dict[str, Callable[[], object]]:
        return {
            PLAIN: lambda: self.post(self.plain),
            WAYS["idle"]: lambda: self.post(self.capturing),
            WAYS["capture"]: self.capture,
            WAYS["extract"]: self.extract,
            **{
                extract_by(number): lambda number=number: self.extract_by(number)  # type: ignore[misc]
                for number in self.workers
            },
        }

    def post(self, url: str) -> None:
        # With a prefix cache a second round would find the first one's prompts there: a salt for each round prevents it.
        post_all(url, self.rows, **({"extra_key": uuid.uuid4().hex} if self.radix else {}))

    def json_share(self, room: int) -> tuple[float, float]:
        """Tokens a second of SGLang's own JSON path, and its share of the speed of the same prompts without it: as many prompts as
        ``room`` tokens hold, a chunk at most, since that path loses all chunks of a prompt but the last."""
        few = []
        for row in self.rows:
            if len(row) <= room:
                few.append(row)
                room -= len(row)
        seconds = []
        for way in (
            lambda: post_all(self.capturing, few, new_tokens=1),
            lambda: json_path(self.capturing, few),
        ):
            way()
            began = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - began)
        return sum(map(len, few)) / seconds[1], seconds[0] / seconds[1]

    def capture(self) -> None:
        # Opened once, as a run of days opens it once; extract below opens its own, every time.
        if self._engine is None:
            options = {"url": [self.capturing], "reference": "none"}
            self._engine = open_engine("sglang", self.target, self.spec, options)
        capture_all(self._engine, self.rows)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def extract(self) -> float:
        return self._extract()[0]

    def extract_by(self, workers: int) -> float:
        """Seconds that all rows would have taken at the rate from when all workers had joined to the end: a process takes seconds
        to start, which a run of hours does not notice."""
        ended = self._extract(workers=workers)[1]
        events = list(read_events(RunFiles(self.disk / "store").events))
        joined = max(event["time"] for event in events if event["event"] == "worker_joined")
        looks = [event for event in events if event["event"] == "progress" and event["time"] >= joined]
        left = self.tokens - looks[0]["tokens_done"]
        if left < self.tokens / 4:
            raise SystemExit(f"only {left:,} tokens were left when all workers had joined; give more --count")
        return float((ended - looks[0]["time"]) * self.tokens / left)

    def _extract(self, **changes: Any) -> tuple[float, float]:
        """Seconds, and when it ended."""
        config = ExtractConfig(
            rows=self.disk / "rows", model=str(self.target.path), out=self.disk / "store", engine="sglang", url=[self.capturing],
            dtype="bfloat16", skip_preflight=True, engine_options={"reference": "none"}, **changes,
        )  # fmt: skip
        seconds, result = extract_all(config)
        ended = time.time()
        assert result["captures"] == len(self.rows)
        self.bytes_stored = result["bytes_stored"]
        return seconds, ended


def extract_by(workers: int) -> str:
    """The name of that way."""
    return f"extract by {workers} worker processes"


def compare(bench: Bench, turns: Turns, repeats: int, shape: str, until: float) -> None:
    """Interleaved rounds; rates as ratios to plain prefill."""
    args = bench.args
    wanted = {PLAIN, *(WAYS[way] for way in args.ways), *map(extract_by, args.workers)}
    keeping = {WAYS["capture"], WAYS["extract"], *map(extract_by, args.workers)}
    ways = {name: way for name, way in turns.ways().items() if name in wanted}
    timings = interleaved(ways, repeats=repeats, until=until)
    base = timings[PLAIN].median

    def row(path: str, seconds: float, ratios: list[float], size: float) -> None:
        bench.row(
            shape=shape, variant=args.variant, path=path, repeats=len(ratios), tokens_per_s=turns.tokens / seconds,
            of_plain=base / seconds, least=min(ratios), most=max(ratios), gb_per_s=size / seconds / 1e9,
        )  # fmt: skip
        print(json.dumps(bench.rows[-1]), flush=True)

    for name, timing in timings.items():
        # Of each repeat to the plain one beside it: what drifts over the run hits both.
        ratios = [p / s for p, s in zip(timings[PLAIN].seconds, timing.seconds, strict=True)]
        states = turns.tokens * turns.spec.bytes_per_token if name in keeping else 0
        row(name, timing.median, ratios, states)
    if turns.bytes_stored:
        alone = sorted(write_alone(turns.disk, turns.bytes_stored) for _ in range(3))
        row(
            "the disk alone, as many bytes as the shards",
            alone[1],
            [base / s for s in alone],
            turns.bytes_stored,
        )
    for name in TARGETS.keys() & timings.keys():
        share = base / timings[name].median
        bench.target(
            f"{name}, share of plain prefill ({shape}, {args.variant})",
            share,
            TARGETS[name],
            share >= TARGETS[name],
        )


if __name__ == "__main__":
    main("gpu", run, arguments)
