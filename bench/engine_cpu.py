"""What capture costs: the real SGLang on this CPU, plain prefill against capture against SGLang's own JSON path.

Same prompts, same flags, in turns. "capture" runs to the last verified capture in the client's hands, not to the last
answer. Environments of the real engine are built on first use (a minute or two).

    python bench/engine_cpu.py [--quick] [--model FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from common import Bench, interleaved, main
from headrace.engines import Engine, open_engine
from headrace.engines.config import ServeConfig
from headrace.extract.config import ExtractConfig
from headrace.extract.run import run_extraction
from headrace.files import atomic_write, write_through
from headrace.target import Target
from headrace.testing.envs import engine_env
from headrace.testing.servers import QUIET, ServerProcess, free_port, sglang_capture_server
from headrace.types import Capture, Row

RELEASE = "0.5.23"
TAPS = "2,15,27,final"
FLAGS = (
    "--max-total-tokens=16384", "--context-length=2048", "--mem-fraction-static=0.3", "--max-running-requests=32",
    "--chunked-prefill-size=8192", "--sleep-on-idle",  # an idle scheduler would spin on a core that the other needs
)  # fmt: skip
LEAST_SHARE = 0.95


def arguments(parser: argparse.ArgumentParser) -> None:
    """The model, when it is not the demo model."""
    parser.add_argument("--model", type=Path, help="folder of the target (default: the demo model)")


def prompts(count: int, mean: float, vocab: int) -> list[Row]:
    """Random prompts of log-normal lengths, all of them in one chunk: the JSON path loses all chunks but the last."""
    rng = np.random.default_rng(17)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.18, 0.6, count), 4, 900).astype(int)
    return [Row.make(rng.integers(3, vocab, n), np.ones(n, bool)) for n in lengths]


def plain_server(model: Path, folder: Path) -> ServerProcess:
    """SGLang as it is: no plug-in configured, no capture flags."""
    port = free_port()
    command = [str(engine_env(f"sglang-{RELEASE}")), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-radix-cache", *FLAGS]
    return ServerProcess(command, port, folder / "plain.log", env=THREADS)


def capture_server(model: Path, folder: Path) -> ServerProcess:
    """The same, started as ``headrace serve`` starts it."""
    config = ServeConfig(
        model=str(model),
        taps=TAPS,
        port=free_port(),
        staging=str(folder / "staging"),
        python=str(engine_env(f"sglang-{RELEASE}")),
        sglang_args=list(FLAGS),
    )
    return sglang_capture_server(config, folder / "capture.log", THREADS)


THREADS = {**QUIET, "OMP_NUM_THREADS": "2"}


def post_all(url: str, rows: list[Row], **fields: Any) -> list[dict[str, Any]]:
    """All prompts at once, prefill only unless ``fields`` say otherwise."""

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=None)) as client:
            sampling = {"max_new_tokens": fields.get("new_tokens", 0), "temperature": 0.0, "ignore_eos": True}
            extra = {key: value for key, value in fields.items() if key != "new_tokens"}
            bodies = [
                {"input_ids": row.ids.tolist(), "rid": uuid.uuid4().hex, "sampling_params": sampling, **extra}
                for row in rows
            ]
            answers = await asyncio.gather(*(client.post(f"{url}/generate", json=body) for body in bodies))
            return [answer.raise_for_status().json() for answer in answers]

    return asyncio.run(run())


def capture_all(engine: Engine, rows: list[Row]) -> None:
    """Every row captured and verified."""
    results = list(engine.capture(iter(rows)))
    assert len(results) == len(rows) and all(isinstance(result, Capture) for result in results)


def extract_all(config: ExtractConfig, engine: Engine | None = None) -> tuple[float, dict[str, Any]]:
    """The whole of ``headrace extract`` into a new store: seconds from the first row sent to the last shard durable (what comes
    before it, checks and a few trial rows, a run of hours does not notice), and the run's figures."""
    shutil.rmtree(config.out, ignore_errors=True)
    began = 0.0

    def say(line: str) -> None:
        nonlocal began
        if line.startswith("extracting "):
            began = time.perf_counter()

    result = run_extraction(config, say, engine).done()
    return time.perf_counter() - began, result


def write_alone(folder: Path, size: int) -> float:
    """Seconds in which the disk takes ``size`` bytes the way shards are written: one thread, synced."""
    piece = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    began = time.perf_counter()
    with atomic_write(folder / "alone") as file:
        write_through(file, (piece.data for _ in range(max(1, size // len(piece)))))
    seconds = time.perf_counter() - began
    (folder / "alone").unlink()
    return seconds


def json_path(url: str, rows: list[Row]) -> None:
    """SGLang's own way: nested lists of floats in the answer; needs one generated token."""
    for row, answer in zip(rows, post_all(url, rows, return_hidden_states=True, new_tokens=1), strict=True):
        states = answer["meta_info"]["hidden_states"][0]
        assert len(states) == len(row), f"{len(states)} rows for {len(row)} tokens"


def run(bench: Bench) -> None:
    """Start the servers, take turns, compare."""
    model = bench.args.model
    if model is None:
        from headrace.demo import cached_demo_model

        model = cached_demo_model()
    target = Target.open(str(model))
    rows = prompts(8, 24, target.vocab_size) if bench.quick else prompts(24, 120, target.vocab_size)
    tokens = sum(len(row) for row in rows)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        capturing = capture_server(model, folder).start()
        stack.callback(capturing.stop)
        # In quick mode one server has to do: nobody asking stands for plain.
        plain = capturing if bench.quick else plain_server(model, folder).start()
        stack.callback(plain.stop)
        for server in (capturing, plain):
            server.wait_healthy()
        spec = target.spec(TAPS)
        engine = stack.enter_context(
            open_engine("sglang", target, spec, {"url": [capturing.url], "tokens_in_flight": tokens})
        )
        contestants: dict[str, Callable[[], object]] = {
            "plain SGLang": lambda: post_all(plain.url, rows),
            "plug-in, nobody asks": lambda: post_all(capturing.url, rows),
            "capture to verified states": lambda: capture_all(engine, rows),
            "SGLang's own JSON": lambda: json_path(capturing.url, rows),
        }
        timings = interleaved(contestants, repeats=3 if bench.quick else 9)
        base = timings["plain SGLang"].median
        for name, timing in timings.items():
            bench.row(
                path=name,
                tokens_per_s=tokens / timing.median,
                of_plain=base / timing.median,
                spread=timing.spread,
            )
        share = base / timings["capture to verified states"].median
        bench.target("capture, share of plain prefill", share, LEAST_SHARE, share >= LEAST_SHARE)


if __name__ == "__main__":
    main("engine_cpu", run, arguments)
