"""Three engines, one truth: states from transformers, SGLang and vLLM on real CPU builds, tap by tap, in every setting that could matter.

The reference is transformers on one row at a time in the same dtype. Every setting sees the same rows twice (the second time the
caches are warm), several at once, with shared beginnings and lengths around the chunk size. ``--write FILE`` makes docs/parity.md.
Results are kept in ``--json FILE`` as they come: run again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Bench, machine, main
from headrace.demo import cached_demo_model
from headrace.engines.base import Engine, open_engine
from headrace.engines.config import ServeConfig
from headrace.engines.vllm import server_command
from headrace.target import Target
from headrace.testing.envs import engine_env
from headrace.testing.models import make_tiny_model
from headrace.testing.servers import SGLANG_ON_CPU, ServerProcess, free_port, sglang_capture_server
from headrace.types import Capture, CaptureSpec, Failure, Row
from headrace.verify.measure import TokenErrors, token_errors

ENVIRONMENTS = {"sglang": "sglang-0.5.23", "vllm": "vllm-0.32.0"}
CHUNK = 64
LONGEST = 300
MODELS = {
    # name: (family, taps); SmolLM2 is real, the others are random
    "SmolLM2-135M-Instruct": ("", "2,15,27,final"),
    "tiny Qwen3": ("qwen3", "2,3,5,final"),
    "tiny Qwen3-MoE": ("qwen3_moe", "2,3,5,final"),
    "tiny DeepSeek-V3": ("deepseek_v3", "2,3,5,final"),
}
# What right engines stay below (median over tokens of the worst tap).
LIMITS = {"float32": 1e-5, "bfloat16": 3e-2}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    model: str
    dtype: str
    engine: str
    chunked: bool
    cache: bool

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"{self.model}|{self.dtype}|{self.engine}|{self.chunked}|{self.cache}"


def cases(args: argparse.Namespace, quick: bool) -> list[Case]:
    """All of them, or the few of a quick run."""
    if quick:
        return [
            Case("tiny Qwen3", "float32", "hf", False, False),
            Case("tiny Qwen3", "bfloat16", "hf", False, False),
        ]
    found: list[Case] = []
    for model in MODELS:
        for dtype in ("float32", "bfloat16"):
            found.append(Case(model, dtype, "hf", False, False))
            for engine in ("sglang", "vllm"):
                settings = [(True, True), (True, False), (False, True), (False, False)]
                if engine == "vllm" and "DeepSeek" in model:
                    settings = [(False, False)]  # on a CPU vLLM itself switches both off for latent attention
                found += [Case(model, dtype, engine, chunked, cache) for chunked, cache in settings]
    return [case for case in found if case.engine in args.engines.split(",") and args.model in case.model]


def make_rows(vocab: int, seed: int = 0) -> list[Row]:
    """Rows of 1 to LONGEST tokens: around the chunk size, many equal, half of them with a shared beginning."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab - 1, LONGEST)
    lengths = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, LONGEST, LONGEST, 40, 40, 40, 40]
    lengths += rng.integers(8, 160, 11).tolist()
    rows = []
    for index, length in enumerate(lengths):
        ids = rng.integers(3, vocab - 1, length)
        if index % 2:
            ids[: 2 * length // 3] = shared[: 2 * length // 3]
        rows.append(Row.make(ids, np.ones(length, dtype=bool)))
    return rows


def model_folder(name: str, dtype: str, folder: Path) -> Path:
    """The model in the cache, or a random one made here."""
    family, _ = MODELS[name]
    if not family:
        return cached_demo_model()
    out = folder / f"{family}-{dtype}"
    if not out.exists():
        hidden = 128 if family == "deepseek_v3" else 64
        make_tiny_model(out, family, hidden=hidden, dtype=dtype, tokenizer=cached_demo_model())
    return out


@contextmanager
def opened(case: Case, target: Target, spec: CaptureSpec, folder: Path) -> Iterator[Engine]:
    """The case's engine, with a server of its own where it needs one."""
    if case.engine == "hf":
        with open_engine("hf", target, spec, {"device": "cpu", "batch_tokens": 512}) as engine:
            yield engine
        return
    work = Path(tempfile.mkdtemp(dir=folder))
    server = (_sglang if case.engine == "sglang" else _vllm)(case, target, spec, work)
    with server, open_engine(case.engine, target, spec, _options(case, server)) as engine:
        yield engine


def _options(case: Case, server: ServerProcess) -> dict[str, Any]:
    options: dict[str, Any] = {"url": [server.url], "tokens_in_flight": 2000}
    return {**options, "reference": "none"} if case.engine == "sglang" else options


def _sglang(case: Case, target: Target, spec: CaptureSpec, work: Path) -> ServerProcess:
    flags = [flag for flag in SGLANG_ON_CPU if "chunked" not in flag]
    flags.append(f"--chunked-prefill-size={CHUNK if case.chunked else 2048}")
    config = ServeConfig(
        model=str(target.path),
        taps=",".join(map(str, spec.taps)),
        dtype=spec.dtype,
        port=free_port(),
        prefix_cache=case.cache,
        staging=str(work / "staging"),
        staging_bytes=256 << 20,  # type: ignore[arg-type]
        host_bytes=32 << 20,  # type: ignore[arg-type]
        python=str(engine_env(ENVIRONMENTS["sglang"])),
        sglang_args=flags,
    )
    return sglang_capture_server(config, work / "server.log", QUIET)


def _vllm(case: Case, target: Target, spec: CaptureSpec, work: Path) -> ServerProcess:
    port = free_port()
    python = str(engine_env(ENVIRONMENTS["vllm"]))
    flags = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--max-model-len",
        "1024",
    ]
    flags += ["--max-num-batched-tokens", str(CHUNK if case.chunked else 2048), "--max-num-seqs", "8"]
    flags += ["--enable-prefix-caching" if case.cache else "--no-enable-prefix-caching"]
    return ServerProcess(
        server_command(python, target, spec, work / "staging", *flags), port, work / "server.log", env=QUIET
    )


def reference(target: Target, spec: CaptureSpec, rows: list[Row]) -> dict[str, torch.Tensor]:
    """transformers, one row at a time."""
    states = {}
    with open_engine("hf", target, spec, {"device": "cpu"}) as engine:
        for row in rows:
            (capture,) = engine.capture([row])
            assert isinstance(capture, Capture)
            states[row.key] = capture.states
    return states


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Errors of one case."""
    target = Target.open(str(model_folder(case.model, case.dtype, folder)))
    spec = target.spec(MODELS[case.model][1], dtype=case.dtype)
    rows = make_rows(target.vocab_size)
    truth = reference(target, spec, rows)
    errors: list[TokenErrors] = []
    with opened(case, target, spec, folder) as engine:
        for _ in range(2):
            for capture in engine.capture(iter(rows)):
                if isinstance(capture, Failure):
                    raise SystemExit(f"{case.name}: {capture.message}")
                errors.append(token_errors(capture.states, truth[capture.key]))
        version = engine.info.version
    relative = np.concatenate([e.relative for e in errors], axis=1)
    cosine = np.concatenate([e.cosine for e in errors], axis=1)
    return {
        "model": case.model,
        "dtype": case.dtype,
        "engine": f"{case.engine} {version}",
        "chunks": str(CHUNK) if case.chunked else "no",
        "prefix cache": "on" if case.cache else "off",
        "medians": {str(tap): float(np.median(relative[k])) for k, tap in enumerate(spec.taps)},
        "p99": float(np.quantile(relative, 0.99)),
        "max": float(relative.max()),
        "min cosine": float(cosine.min()),
        "captures": len(errors),
        "tokens": relative.shape[1],
    }


def run(bench: Bench) -> None:
    """Every case that is not in the JSON file yet."""
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    results = _earlier(bench)
    with tempfile.TemporaryDirectory(prefix="headrace-parity-") as name:
        for case in cases(bench.args, bench.quick):
            if case.name not in results:
                print(case.name, flush=True)
                results[case.name] = {"case": case.name, **measure(case, Path(name))}
                _keep(bench, results)
    bench.rows = [_row(result) for result in results.values()]
    for dtype, limit in LIMITS.items():
        worst = max(
            (max(r["medians"].values()) for r in results.values() if r["dtype"] == dtype), default=0.0
        )
        bench.target(f"median error of the worst tap, {dtype}", worst, limit, worst <= limit)
    if bench.args.write:
        bench.args.write.write_text(page(list(results.values())), encoding="utf-8")


def _earlier(bench: Bench) -> dict[str, dict[str, Any]]:
    file = _results_file(bench)
    return (
        {r["case"]: r for r in json.loads(file.read_text(encoding="utf-8"))} if file and file.exists() else {}
    )


def _keep(bench: Bench, results: dict[str, dict[str, Any]]) -> None:
    file = _results_file(bench)
    if file:
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(list(results.values()), indent=1), encoding="utf-8")
        os.replace(temporary, file)


def _results_file(bench: Bench) -> Path | None:
    return None if bench.args.json is None else bench.args.json.with_suffix(".partial")


def _row(result: dict[str, Any]) -> dict[str, Any]:
    medians = result["medians"]
    kept = ("model", "dtype", "engine", "chunks", "prefix cache")
    return {
        **{key: result[key] for key in kept},
        **{f"tap {place}": value for place, value in enumerate(list(medians.values())[:-1], 1)},
        "final": medians["final"],
        "99 %": result["p99"],
        "max": result["max"],
        "min cosine": round(result["min cosine"], 6),
    }


def page(results: list[dict[str, Any]]) -> str:
    """docs/parity.md."""
    lines = [
        "# Parity of the engines",
        "",
        "Made by `python bench/parity.py --json bench/results/parity.json --write docs/parity.md`; do not edit.",
        "",
        f"Machine: {machine()}.",
        "",
        "Relative error |engine - reference| / |reference| of each token's state. The reference is transformers on one row at a",
        "time in the same dtype; the line `hf` shows its own noise, several rows in a forward against one. Each setting captures",
        f"the same 24 rows twice, several at once, 1 to {LONGEST} tokens, half of them with a shared beginning; the second pass meets",
        "warm caches. `chunks` is the prefill chunk in tokens.",
        "",
    ]
    for model in MODELS:
        found = [result for result in results if result["model"] == model]
        if found:
            lines += [*_section(model, found), ""]
    return "\n".join(lines)


def _section(model: str, found: list[dict[str, Any]]) -> list[str]:
    taps = list(found[0]["medians"])
    heads = [
        "dtype",
        "engine",
        "chunks",
        "prefix cache",
        *(f"median, {_tap(tap)}" for tap in taps),
        "99 %",
        "max",
        "min cosine",
    ]
    lines = [f"## {model}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for r in found:
        numbers = [*r["medians"].values(), r["p99"], r["max"]]
        cells = [
            r["dtype"],
            r["engine"],
            r["chunks"],
            r["prefix cache"],
            *(_number(n) for n in numbers),
            f"{r['min cosine']:.6f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _tap(tap: str) -> str:
    return f"boundary {tap}" if tap.isdigit() else "final state"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """What only this benchmark takes."""
    parser.add_argument("--engines", default="hf,sglang,vllm", help="which of them, comma-separated")
    parser.add_argument("--model", default="", help="part of the name of the only models to measure")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the documentation page there")


if __name__ == "__main__":
    main("parity", run, arguments)
