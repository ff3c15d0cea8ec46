"""What the reader delivers from disk to the device, and what the trainer eats of it: tokens/s by codec, cold and warm.

    python bench/loader.py [--hidden 576] [--gigabytes 4] [--disk FOLDER] [--json FILE]

States are random normal numbers, which the codecs shrink about as far as real ones. "cold" reads files whose pages were
dropped from memory first; on a virtual machine the host below may still hold them. "training" is the product's own
trainer reading the store, with the share of time that the device had work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
import train
from headrace.draft.data import Placing, StorePacks
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.workers import Workers
from headrace.store import Store, StoreWriter
from headrace.types import CaptureSpec, Row

CODECS = ("raw", "bf16-planes", "fp8")


def arguments(parser: argparse.ArgumentParser) -> None:
    train.arguments(parser)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="raw bytes of a store, in 1e9")
    parser.add_argument("--threads", type=int, default=4, help="threads that read and decode")
    parser.add_argument("--disk", type=Path, help="where the stores go (default: a temporary folder)")


def spec_of(args: argparse.Namespace) -> CaptureSpec:
    return CaptureSpec(
        target="x", config_hash="0" * 16, num_layers=30, hidden_size=args.hidden, dtype="bfloat16",
        taps=(2, 15, 27, "final"), norm_kind="rms", norm_eps=1e-5,
    )  # fmt: skip


def write_stores(args: argparse.Namespace, folder: Path, codecs: tuple[str, ...]) -> dict[str, Store]:
    """The same captures with each codec; sealed, synced, opened."""
    spec, rng = spec_of(args), np.random.default_rng(3)
    tokens = int(args.gigabytes * 1e9 / spec.bytes_per_token)
    lengths = []
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(rng.gamma(4.0, args.document / 4.0), 8, args.pack)))
    # A few pieces of states laid out again and again: making new ones would take longer than writing them.
    piece = torch.randn(4, 2 * args.pack, args.hidden, dtype=torch.float32).to(torch.bfloat16)
    rows = []
    for length in lengths:
        mask = np.arange(length) >= round(length * (1 - args.supervised))
        row = Row.make(rng.integers(0, args.vocab, length), mask)
        rows.append((row, int(rng.integers(0, args.pack))))
    for codec in codecs:
        began = time.perf_counter()
        with StoreWriter(folder / codec, spec, codec=codec) as writer:
            for row, at in rows:
                writer.add(row, piece[:, at : at + len(row)])
        seconds = time.perf_counter() - began
        print(
            f"{codec}: {sum(lengths):,} tokens written in {seconds:.1f} s, {args.gigabytes / seconds:.2f} GB/s raw",
            flush=True,
        )
    return {codec: Store.open(folder / codec) for codec in codecs}


def forget(folder: Path) -> None:
    """Drop a store's pages from memory."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def packs_of(args: argparse.Namespace, store: Store, machine: Machine, epochs: int | None) -> StorePacks:
    placing = Placing(machine.device, machine.dtype, padded=machine.compiled)
    loader = {"token_budget": args.pack, "epochs": epochs, "threads": args.threads}
    return StorePacks(store, store.keys(), (2, 15, 27), placing, loader)


def deliver(args: argparse.Namespace, store: Store, machine: Machine) -> float:
    """Tokens a second of one pass of all packs onto the device, nothing done with them."""
    began, tokens = time.perf_counter(), 0
    for pack in packs_of(args, store, machine, epochs=1):
        tokens += pack.tokens
    if machine.device.type == "cuda":
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - began)


def eat(args: argparse.Namespace, store: Store, machine: Machine) -> tuple[float, float]:
    """Tokens a second and busy share of training from ``store``; the first third, which compiles, is left out."""
    packs = packs_of(args, store, machine, epochs=None)
    model, teacher, options = train.parts(args, machine)
    options = options.model_copy(update={"max_steps": args.updates * 12, "log_every": args.updates})
    watch = train.Watch()
    Trainer(model, teacher, packs, options, machine, Workers()).run(watch)
    part = slice(len(watch.reports) // 3, None)
    rates, busy = watch.all("tokens_per_second"), watch.all("gpu_busy")
    return statistics.median(rates[part]), statistics.median(busy[part])


def run(bench: common.Bench) -> None:
    args = bench.args
    if bench.quick:
        train.settle(args)
        args.gigabytes = 0.004
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    )
    cuda = device.type == "cuda"
    machine = Machine(device, cuda, "flex" if cuda else "eager", cuda, cuda)
    with tempfile.TemporaryDirectory(dir=args.disk) as temporary:
        stores = write_stores(args, Path(temporary), CODECS)
        for codec, store in stores.items():
            forget(Path(temporary) / codec)
            cold = deliver(args, store, machine)
            warm = statistics.median(deliver(args, store, machine) for _ in range(3))
            eaten, busy = eat(args, store, machine)
            values: dict[str, Any] = {"codec": codec, "hidden": args.hidden, "cold": cold, "warm": warm}
            bench.row(
                **values, cold_gb_per_s=cold * store.spec.bytes_per_token / 1e9, training=eaten, gpu_busy=busy
            )
            if cuda:
                bench.target(
                    f"GPU busy while training from {codec} ({args.hidden} wide)", busy, 0.9, busy >= 0.9
                )
            store.close()
            shutil.rmtree(Path(temporary) / codec)


if __name__ == "__main__":
    common.main("loader", run, arguments)
