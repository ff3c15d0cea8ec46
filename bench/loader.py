"""What the reader delivers from disk to the device, and what the trainer eats of it: tokens/s by codec and threads, cold and warm.

    python bench/loader.py [--hidden 576] [--gigabytes 4] [--threads 4] [--processes 2 4] [--disk FOLDER] [--json FILE]

States are random normal numbers, which the codecs shrink about as far as real ones. "cold" reads files whose pages were
dropped from memory first; on a virtual machine the host below may still hold them. "training" is the product's own
trainer reading the store (warm), beside the same documents held on the device (of_memory is the ratio), with the share of time
between the first and the last kernel of an update (gpu_busy): a host that is slow to queue them hides in it, not in the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import common
import train
from headrace.draft.data import Document, MemoryPacks, Packs, Placing, StorePacks
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.workers import Workers
from headrace.store import Store, StoreWriter
from headrace.types import CaptureSpec, Row

CODECS = ("raw", "bf16-planes", "fp8")
REPORTS = 9
"""Log lines of a training run."""


def arguments(parser: argparse.ArgumentParser) -> None:
    train.arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="raw bytes of a store, in 1e9")
    parser.add_argument(
        "--threads", type=int, nargs="*", default=[4], help="numbers of threads that read and decode"
    )
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[2, 4], help="numbers of processes that do so"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of reading alone, at most")
    parser.add_argument("--codecs", choices=CODECS, nargs="+", default=list(CODECS))
    parser.add_argument("--disk", type=Path, help="where the stores go (default: a temporary folder)")


def spec_of(args: argparse.Namespace) -> CaptureSpec:
    return CaptureSpec(
        target="x", config_hash="0" * 16, num_layers=30, hidden_size=args.hidden, dtype="bfloat16",
        taps=(2, 15, 27, "final"), norm_kind="rms", norm_eps=1e-5,
    )  # fmt: skip


def make_rows(args: argparse.Namespace) -> list[tuple[Row, int]]:
    """Documents of random tokens, and where each takes its states from."""
    rng, tokens, rows = np.random.default_rng(3), 0, []
    while tokens * spec_of(args).bytes_per_token < args.gigabytes * 1e9:
        length = int(np.clip(rng.gamma(4.0, args.document / 4.0), 8, args.pack))
        mask = np.arange(length) >= round(length * (1 - args.supervised))
        rows.append((Row.make(rng.integers(0, args.vocab, length), mask), int(rng.integers(0, args.pack))))
        tokens += length
    return rows


def write_store(
    args: argparse.Namespace, folder: Path, codec: str, rows: list[tuple[Row, int]], piece: torch.Tensor
) -> Store:
    """The captures with ``codec``; sealed, synced, opened. ``piece`` [taps, tokens, hidden] is laid out again and again: making new
    states would take longer than writing them."""
    began = time.perf_counter()
    with StoreWriter(folder / codec, spec_of(args), codec=codec) as writer:
        for row, at in rows:
            writer.add(row, piece[:, at : at + len(row)])
    seconds = time.perf_counter() - began
    print(f"{codec}: written in {seconds:.1f} s, {args.gigabytes / seconds:.2f} GB/s of states", flush=True)
    return Store.open(folder / codec)


def forget(folder: Path) -> None:
    """Drop a store's pages from memory."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def alone(folder: Path) -> float:
    """GB/s at which the disk gives a store's bytes, one after the other; a GB at most."""
    forget(folder)
    began, size = time.perf_counter(), 0
    for file in sorted(folder.rglob("*.safetensors")):
        with file.open("rb", buffering=0) as handle:
            while size < 1 << 30 and (piece := handle.read(8 << 20)):
                size += len(piece)
    return size / (time.perf_counter() - began) / 1e9


class Reading:
    """A store on its way to the device."""

    def __init__(self, args: argparse.Namespace, machine: Machine) -> None:
        self.args, self.machine = args, machine
        self.placing = Placing(machine.device, machine.dtype, padded=machine.compiled)
        self._trainer: Trainer | None = None

    def packs(self, store: Store, how: tuple[str, int], epochs: int | None) -> StorePacks:
        loader = {"token_budget": self.args.pack, "epochs": epochs, how[0]: how[1]}
        return StorePacks(store, store.keys(), (2, 15, 27), self.placing, loader)

    def deliver(self, store: Store, how: tuple[str, int], seconds: float) -> float:
        """Tokens a second of packs onto the device, nothing done with them, for so many ``seconds`` at most; from the first pack on,
        since processes take their time to start."""
        began, tokens, now = 0.0, 0, 0.0
        for pack in self.packs(store, how, epochs=1):
            tokens += pack.tokens if began else 0
            now = time.perf_counter()
            began = began or now
            if now - began > seconds:
                break
        return tokens / (now - began)

    def eat(self, packs: Packs) -> tuple[float, float]:
        """Tokens a second and busy share of training on ``packs``; the first third, which warms up, is left out. One trainer takes
        them all, since compiling is none of what is measured."""
        every = self.args.updates
        if self._trainer is None:
            model, teacher, options = train.parts(self.args, self.machine)
            options = options.model_copy(update={"log_every": every, "validate_every": 1 << 40})
            self._trainer = Trainer(model, teacher, packs, options, self.machine, Workers())
            self._trainer.total_steps = 2
            self._trainer.run(train.Watch())
        watch, trainer = train.Watch(), self._trainer
        trainer.packs = packs
        trainer.total_steps = trainer.step + every * REPORTS
        trainer.run(watch)
        part = slice(len(watch.reports) // 3, None)
        rates, busy = watch.all("tokens_per_second"), watch.all("gpu_busy")
        return statistics.median(rates[part]), statistics.median(busy[part])


def held(
    args: argparse.Namespace, rows: list[tuple[Row, int]], piece: torch.Tensor, device: torch.device
) -> list[Document]:
    """Some of the same documents, on the device."""
    return [
        Document(row.ids, row.mask, piece[:, at : at + len(row)].to(device))
        for row, at in rows[: 64 * args.pack // args.document]
    ]


def run(bench: common.Bench) -> None:
    args = bench.args
    if bench.quick:
        train.settle(args)
        args.gigabytes, args.threads, args.processes = 0.004, [2], [2]
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    )
    cuda = device.type == "cuda"
    reading = Reading(args, Machine(device, cuda, "flex" if cuda else "eager", cuda, cuda))
    rows = make_rows(args)
    piece = torch.randn(4, 2 * args.pack, args.hidden, dtype=torch.float32).to(torch.bfloat16)
    memory = MemoryPacks(held(args, rows, piece, device), reading.placing, token_budget=args.pack)
    most = 0.0
    with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
        for codec in args.codecs:
            store = write_store(args, Path(temporary), codec, rows, piece)
            size = store.spec.bytes_per_token
            print(f"{codec}: files alone, cold, {alone(Path(temporary) / codec):.2f} GB/s", flush=True)
            if not most:
                # Padded to the same sizes, so that nothing is compiled twice.
                memory.placing = reading.packs(store, ("threads", 1), epochs=1).placing
                most, busy = reading.eat(memory)
                print(f"from memory on the device: {most:,.0f} tokens/s, busy {busy:.3f}", flush=True)
            for how in [("threads", n) for n in args.threads] + [("processes", n) for n in args.processes]:
                warm = max(reading.deliver(store, how, args.seconds) for _ in range(2))
                print(f"{codec}, {how[1]} {how[0]}: {warm:,.0f} tokens/s", flush=True)
                eaten, busy = reading.eat(reading.packs(store, how, epochs=None))
                forget(Path(temporary) / codec)
                cold = reading.deliver(store, how, args.seconds)
                bench.row(
                    codec=codec, hidden=args.hidden, readers=f"{how[1]} {how[0]}", warm=warm, warm_gb_per_s=warm * size / 1e9,
                    cold=cold, training=eaten, of_memory=eaten / most, gpu_busy=busy,
                )  # fmt: skip
                print(json.dumps(bench.rows[-1]), flush=True)
                bench.save()
            if cuda:
                mine = [row for row in bench.rows if row["codec"] == codec]
                best = max(mine, key=lambda row: float(row["of_memory"]))
                for key, what in (("gpu_busy", "GPU busy"), ("of_memory", "speed of that from memory")):
                    name = f"{what} while {best['readers']} read {codec} ({args.hidden} wide)"
                    bench.target(name, best[key], 0.9, best[key] >= 0.9)
            store.close()
            shutil.rmtree(Path(temporary) / codec)


if __name__ == "__main__":
    common.main("loader", run, arguments)
