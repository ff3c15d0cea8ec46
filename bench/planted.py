"""Stores with one planted fault each: is every one rejected, by the right name, and is a good store ever rejected?

A tiny random target, default settings of ``headrace verify``. Good stores vary in rows, seed, family, batch size and codec.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from common import Bench, main
from headrace.data.rows import RowWriter
from headrace.engines.base import open_engine
from headrace.target import Target
from headrace.testing.models import make_tiny_model
from headrace.testing.planted import STATES, Ground, Plant
from headrace.testing.planted_files import FILES, FilePlant, write_planted, write_store
from headrace.types import Capture, Row
from headrace.verify.config import VerifyConfig
from headrace.verify.run import verify

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3", "deepseek_v3")
VOCAB = 2048


def make_rows(seed: int, count: int = 24) -> list[Row]:
    """Rows of five lengths, half of them with a common beginning."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, VOCAB, 64)
    rows = []
    for index in range(count):
        length = (24, 32, 40, 48, 33)[index % 5]
        ids = rng.integers(3, VOCAB, length)
        if index % 2:
            ids[:6] = common[:6]
        rows.append(Row.make(ids, rng.random(length) < 0.5))
    return rows


def write_rows(rows: list[Row], path: Path) -> Path:
    """A row folder."""
    with RowWriter(path) as writer:
        for row in rows:
            writer.add(row)
    return path


def perturbed(model: Path, out: Path, share: float = 0.1) -> Path:
    """The same model with every weight changed by about ``share`` of itself: another checkpoint of one run."""
    shutil.copytree(model, out)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = (weight.float() * (1 + share * noise)).to(weight.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def check(store: Path, rows: Path, model: Path, seed: int = 0) -> tuple[list[str], float]:
    """The names of the faults ``verify`` finds, and its seconds."""
    start = time.perf_counter()
    settings = {"store": store, "rows": rows, "model": str(model), "seed": seed}
    report = verify(VerifyConfig.model_validate(settings))
    return [fault["code"] for fault in report["faults"]], time.perf_counter() - start


def planted(bench: Bench, folder: Path) -> None:
    """One store a fault."""
    model = make_tiny_model(folder / "model", "llama", layers=8, hidden=64, vocab=VOCAB, dtype="bfloat16")
    target = Target.open(str(model))
    other = Target.open(str(perturbed(model, folder / "other")))
    rows = make_rows(0)
    ground = Ground.of(target, other, target.spec("2,4,6,final"), rows)
    row_folder = write_rows(rows, folder / "rows")
    plants: list[Plant | FilePlant] = [*STATES, *FILES]
    rejected = named = 0
    for number, plant in enumerate(plants):
        store = folder / f"store-{number}"
        write_planted(plant, ground, store, seed=number)
        codes, seconds = check(store, row_folder, model)
        right = bool(codes) and codes[0] in plant.codes
        rejected += bool(codes)
        named += right
        bench.row(
            fault=plant.name,
            meant=plant.codes[0],
            found=", ".join(codes),
            right=right,
            seconds=round(seconds, 2),
        )
    least = round(0.95 * len(plants))
    bench.target(f"of {len(plants)} planted faults rejected", rejected, len(plants), rejected == len(plants))
    bench.target(f"of {len(plants)} named right", named, least, named >= least)


def good(bench: Bench, folder: Path, seeds: int) -> None:
    """Good stores, each with another seed."""
    models = {
        family: make_tiny_model(folder / family, family, layers=8, hidden=64, vocab=VOCAB, dtype="bfloat16")
        for family in FAMILIES[: max(1, min(len(FAMILIES), seeds))]
    }
    accepted = 0
    for seed in range(seeds):
        family = list(models)[seed % len(models)]
        target = Target.open(str(models[family]))
        rows = make_rows(1000 + seed)
        spec = target.spec("2,4,6,final")
        options = {"batch_tokens": int(np.random.default_rng(seed).integers(50, 800))}
        with open_engine("hf", target, spec, options) as engine:
            states = {c.key: c.states for c in engine.capture(iter(rows)) if isinstance(c, Capture)}
        store = folder / f"good-{seed}"
        codec = ("bf16-planes", "raw", "fp8")[seed % 3]
        write_store(store, spec, [(row, states[row.key]) for row in rows], codec=codec)
        codes, seconds = check(store, write_rows(rows, folder / f"rows-{seed}"), models[family], seed)
        accepted += not codes
        if codes:
            bench.row(
                fault=f"none ({family}, {codec}, seed {seed})",
                meant="",
                found=", ".join(codes),
                right=False,
                seconds=round(seconds, 2),
            )
    bench.target(f"of {seeds} good stores accepted", accepted, seeds, accepted == seeds)


def run(bench: Bench) -> None:
    """Both halves, in a temporary folder."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    with tempfile.TemporaryDirectory(prefix="headrace-planted-") as name:
        planted(bench, Path(name))
        good(bench, Path(name), 5 if bench.quick else bench.args.seeds)


def arguments(parser: argparse.ArgumentParser) -> None:
    """What only this benchmark takes."""
    parser.add_argument("--seeds", type=int, default=50, help="good stores to make and verify")


if __name__ == "__main__":
    main("planted", run, arguments)
