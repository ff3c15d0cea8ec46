"""One training run on one and on several devices: the same gradients, and how much faster.

    python bench/train_many.py [--workers 2] [--hidden 4096 --heads 32 8 --mlp 14336] [--json FILE]

torchrun starts one process a device (gloo on a CPU, NCCL on GPUs), with the drafter whole on each (replicate) and split over
them (shard). Every run makes the same updates of two packs a worker of the largest run; gradient norms are compared update by
update, then whole updates are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import common
import train
from headrace.draft.data import MemoryPacks, Placing
from headrace.draft.options import MachineOptions
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.ttt import Pack
from headrace.draft.workers import Workers, join

COMPARED = 6  # updates whose gradients are compared
MARK = "RESULT "


def arguments(parser: argparse.ArgumentParser) -> None:
    train.arguments(parser)
    parser.add_argument("--workers", type=int, default=2, help="devices of the larger runs")
    parser.add_argument("--child", choices=["replicate", "shard"], help=argparse.SUPPRESS)


class Dealt:
    """This worker's packs of one line of packs: every ``count``-th."""

    def __init__(self, packs: MemoryPacks, workers: Workers) -> None:
        self.packs, self.workers = packs, workers

    def __iter__(self) -> Iterator[Pack]:
        for number, pack in enumerate(self.packs):
            if number % self.workers.count == self.workers.rank:
                yield pack

    def per_epoch(self) -> int:
        return self.packs.per_epoch()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def child(args: argparse.Namespace) -> None:
    """One worker: the same drafter and documents as every other, its share of the packs."""
    workers = join(MachineOptions())
    cuda = workers.device.type == "cuda"
    machine = Machine(workers.device, cuda, "flex" if cuda else "eager", cuda, cuda)
    torch.manual_seed(0)
    # On the device, where each worker makes the packs of all: in host memory that may take longer than training on them.
    documents = train.make_documents(args, machine.device, 64 if args.quick else 400)
    model, teacher, options = train.parts(args, machine)
    placing = Placing(machine.device, machine.dtype, padded=machine.compiled)
    packs = Dealt(MemoryPacks(documents, placing, token_budget=args.pack), workers)
    options = options.model_copy(
        update={
            "packs_per_step": 2 * args.workers,
            "log_every": 1,
            "max_steps": COMPARED,
            "machine": MachineOptions(parallel=args.child),
        }
    )
    watch = train.Watch()
    trainer = Trainer(model, teacher, packs, options, machine, workers)
    trainer.run(watch)
    # Timed apart from the comparison, and logged seldom: a log line waits for the device.
    trainer.options = options.model_copy(update={"log_every": args.updates})
    trainer.total_steps = COMPARED + args.updates * (args.repeats + 1)
    timed = train.Watch()
    trainer.run(timed)
    if workers.first:
        found = {
            "norms": watch.all("gradient_norm"),
            "rates": timed.all("tokens_per_second")[1:],
            "memory": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        }
        print(MARK + json.dumps(found), flush=True)


def start(args: argparse.Namespace, workers: int, parallel: str) -> dict[str, Any]:
    """Run ``workers`` processes to their end; what the first of them found. Raises CalledProcessError when one fails."""
    began = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
        __file__,
    ]
    command += ["--child", parallel, *sys.argv[1:]]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    print(f"{workers} x {parallel}: {time.perf_counter() - began:.0f} s", flush=True)
    return found


def run(bench: common.Bench) -> None:
    args = bench.args
    if bench.quick:
        train.settle(args)
    if args.child:
        child(args)
        sys.exit()
    alone = start(args, 1, "replicate")
    add(bench, "one", 1, alone, alone)
    for parallel in ("replicate", "shard"):
        add(bench, parallel, args.workers, start(args, args.workers, parallel), alone)


def add(bench: common.Bench, name: str, workers: int, found: dict[str, Any], alone: dict[str, Any]) -> None:
    """A row at once, so that a run that is cut short keeps what it has."""
    rate, base = (statistics.median(run["rates"]) for run in (found, alone))
    apart = max(abs(a / b - 1) for a, b in zip(found["norms"], alone["norms"], strict=True))
    bench.row(
        run=name, workers=workers, hidden=bench.args.hidden, tokens_per_s=rate, of_linear=rate / base / workers,
        gradient_apart=apart, memory_gib=found["memory"],
    )  # fmt: skip
    print(json.dumps(bench.rows[-1]), flush=True)
    if workers > 1:
        bench.target(
            f"{name}: gradient norms of {COMPARED} updates, apart from one worker's",
            apart,
            0.02,
            apart <= 0.02,
        )
    bench.save()


if __name__ == "__main__":
    common.main("train_many", run, arguments)
