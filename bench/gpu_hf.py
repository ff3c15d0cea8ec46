"""Capture at the speed of the model's own forward: the hf engine (transformers) against the same forwards alone, in turns.

    python bench/gpu_hf.py [--quick] [--shape 8b|1b] [--count 256] [--repeats 5] [--seconds S] [--disk FOLDER] [--json FILE]

The model is random and made on the device. Every round takes the same rows (log-normal lengths, mean 1,500, at most 8,192
tokens) in the same batches through each way: "plain forward" computes and keeps nothing, "capture to host" ends with the
last state in host memory, "extract to durable shards" is ``headrace extract`` from the moment its rows flow: verified,
compressed, synced to disk. Captured states are first compared with transformers' own, one row at a time. ``--quick``, or
no GPU, runs all of it on a CPU with a tiny model.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Bench, interleaved, main
from engine_cpu import extract_all, write_alone
from gpu import SHAPES, prompts, write_config
from headrace.config import build
from headrace.data.rows import RowFolder, RowWriter
from headrace.engines import packing
from headrace.engines.hf import HfEngine, HfOptions, _batches, _pad, _windows
from headrace.extract.admission import in_windows, window_size
from headrace.extract.config import ExtractConfig
from headrace.target import Target
from headrace.testing.engine import row_error
from headrace.types import FINAL, Capture, Row, Tap

PLAIN, CAPTURE, EXTRACT = "plain forward", "capture to host", "extract to durable shards"
DISK = "the disk alone, as many bytes as the shards"
# The second is for information: a disk slower than the forward (its own row tells) misses it whatever the engine does.
TARGETS = {CAPTURE: 0.97, EXTRACT: 0.9}
CHECKED_ROWS = 6


def arguments(parser: argparse.ArgumentParser) -> None:
    shapes = [shape for shape in SHAPES if shape != "tiny"]
    parser.add_argument("--shape", choices=shapes, default="8b", help="shape of the random model")
    parser.add_argument("--count", type=int, default=256, help="rows of a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no turn that would end later than this"
    )
    parser.add_argument("--disk", type=Path, help="where the stores go (default: a temporary folder)")


def random_model(folder: Path, dtype: str, device: torch.device) -> torch.nn.Module:
    """A model of the config in ``folder``, filled on ``device`` as transformers fills a new one: no file of weights is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(23)
    kind = getattr(torch, dtype)
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones would hide a norm that is missing or applied twice
                parameter.uniform_(0.5, 1.5)
    return model  # type: ignore[no-any-return]


class Turns:
    """The ways to take one round of rows through the model. Each returns the seconds that it took."""

    def __init__(self, model: torch.nn.Module, folder: Path, disk: Path, dtype: str) -> None:
        target = Target.open(str(folder))
        self.config = ExtractConfig(
            rows=str(disk / "rows"), model=str(folder), out=disk / "store", dtype=dtype
        )
        self.spec = target.spec(self.config.taps, dtype=dtype)
        options = build(HfOptions, {"dtype": dtype}, "options of engine hf")
        self.engine = HfEngine(target, self.spec, options, model)
        self.model: Any = model
        stored = RowFolder.open(self.config.rows)
        # In the order in which an extraction sends them, so that the batches of all ways are the same.
        self.rows = list(in_windows(stored.rows(), window_size(len(stored)), self.config.seed))
        self.tokens = sum(map(len, self.rows))
        states = self.tokens * self.spec.bytes_per_token
        self.bytes = {PLAIN: 0, CAPTURE: states, EXTRACT: states, DISK: 0}
        """What each way delivers."""

    def ways(self) -> dict[str, Callable[[], float]]:
        return {PLAIN: self.plain, CAPTURE: self.capture, EXTRACT: self.extract, DISK: self.disk}

    def plain(self) -> float:
        """The engine's forwards and nothing else; no hook is on the model."""
        engine, began = self.engine, time.perf_counter()
        with torch.inference_mode():
            for window in _windows(self.rows, engine.window_tokens):
                for batch in _batches(window, engine.batch_tokens, packed=engine.packed):
                    lay = packing.pack if engine.packed else _pad
                    inputs = lay([torch.from_numpy(row.ids) for row in batch], engine.device)
                    self.model(**inputs, use_cache=False, logits_to_keep=1)
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        return time.perf_counter() - began

    def capture(self) -> float:
        """To the last capture; each is dropped when the next one comes."""
        began = time.perf_counter()
        there = sum(isinstance(capture, Capture) for capture in self.engine.capture(iter(self.rows)))
        seconds = time.perf_counter() - began
        assert there == len(self.rows), "captures are missing"
        return seconds

    def extract(self) -> float:
        """Into a new store, up to its last durable shard."""
        seconds, result = extract_all(self.config, self.engine)
        assert result["captures"] == len(self.rows), "the store is not complete"
        self.bytes[DISK] = result["bytes_stored"]
        return seconds

    def disk(self) -> float:
        """What the disk takes for the shards that :meth:`extract` has just written."""
        return write_alone(self.config.out.parent, self.bytes[DISK])


def check_values(bench: Bench, turns: Turns, dtype: str) -> None:
    """A few rows as they are captured among all, against transformers' own ``output_hidden_states`` of each alone in float32; the
    error is judged by that of transformers itself in ``dtype``, which a deep random model makes large."""
    few = turns.rows[:: max(1, len(turns.rows) // CHECKED_ROWS)]
    keys = {row.key for row in few}
    captures = (c for c in turns.engine.capture(iter(turns.rows)) if isinstance(c, Capture))
    got = {c.key: c.states.float() for c in captures if c.key in keys}
    assert set(got) == keys, "captures are missing"
    same = {row.key: alone(turns.model, row, turns.spec.taps) for row in few}
    exact = copy.deepcopy(turns.model).float()
    truth = {row.key: alone(exact, row, turns.spec.taps) for row in few}
    del exact
    error = float(np.median([row_error(got[key], truth[key]) for key in keys]))
    noise = float(np.median([row_error(same[key], truth[key]) for key in keys]))
    name = f"error against float32, times that of transformers in {dtype}"
    bench.target(name, error / max(noise, 1e-6), 2.0, error <= 2 * max(noise, 1e-6))


@torch.inference_mode()
def alone(model: Any, row: Row, taps: tuple[Tap, ...]) -> torch.Tensor:
    """float32 [taps, tokens, hidden]: the states of ``row`` by itself, with transformers' plain attention."""
    ours, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
    ids = torch.from_numpy(row.ids).long().to(model.device)[None]
    out = model(ids, output_hidden_states=True, use_cache=False, logits_to_keep=1)
    model.config._attn_implementation = ours
    # transformers counts boundaries as we do, but its last is the final state: after the norm.
    return torch.stack([out.hidden_states[-1 if tap == FINAL else int(tap)][0] for tap in taps]).float().cpu()


def compare(bench: Bench, turns: Turns, repeats: int, shape: str, until: float) -> None:
    """Interleaved rounds; rates as ratios to the plain forward."""
    timings = interleaved(turns.ways(), repeats, until=until)
    base = timings[PLAIN]
    for name, timing in timings.items():
        rate = turns.tokens / timing.median
        # Of each repeat to the plain one beside it: what drifts over the run hits both.
        ratios = [p / s for p, s in zip(base.seconds, timing.seconds, strict=True)]
        bench.row(
            shape=shape, path=name, repeats=len(ratios), tokens_per_s=rate, of_plain=base.median / timing.median,
            least=min(ratios), most=max(ratios), gb_per_s=turns.bytes[name] / timing.median / 1e9,
        )  # fmt: skip
        print(json.dumps(bench.rows[-1]), flush=True)
    if shape == "tiny":
        return  # on a CPU the writer takes its cores from the forward
    for name, least in TARGETS.items():
        share = base.median / timings[name].median
        bench.target(f"{name}, share of plain forward ({shape})", share, least, share >= least)


def run(bench: Bench) -> None:
    """Make model and rows, check values, take turns, compare."""
    began, args = time.perf_counter(), bench.args
    cuda = torch.cuda.is_available() and not bench.quick
    shape, dtype = (args.shape, "bfloat16") if cuda else ("tiny", "float32")
    with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
        disk = Path(temporary)
        folder = write_config(disk / "model", shape)
        with RowWriter(disk / "rows") as writer:
            for row in prompts(args.count, 1500, 8192, 128000) if cuda else prompts(12, 60, 400, 1000):
                writer.add(row)
        model = random_model(folder, dtype, torch.device("cuda" if cuda else "cpu"))
        turns = Turns(model, folder, disk, dtype)
        check_values(bench, turns, dtype)
        attention = turns.engine.info.settings["attention"]
        print(
            f"{turns.tokens:,} tokens, {attention}; ready in {time.perf_counter() - began:.0f} s", flush=True
        )
        compare(bench, turns, args.repeats if cuda else 2, shape, began + args.seconds)


if __name__ == "__main__":
    main("gpu_hf", run, arguments)
