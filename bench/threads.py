"""What threads of one process encode and decode a second, codec by codec: they share an interpreter's lock, and some work is not shared well.

    python bench/threads.py [--hidden 576 4096 7168] [--threads 1 8] [--json FILE]

Captures of four taps, random normal states, in memory: encoded as the writer's threads do it (with digests, norms and the error of a codec
that rounds), decoded as the reader's do (without digests). Nothing is written to a disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import common
from headrace.bits import Bits, bits_of
from headrace.cores import available_cores
from headrace.store.codecs import CODECS, Chunks, Codec, chunk_rows, open_codec
from headrace.store.encode import encode_capture, encoder_threads
from headrace.types import CaptureSpec, Row

TAPS = 4
PREFILL = 1.2
"""GB/s of states that an H200 makes while it prefills a model of 8B shape, three taps and the final state."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, nargs="+", default=[576, 4096, 7168])
    parser.add_argument("--threads", type=int, nargs="+", help="(default: 1, and as many as a writer has)")
    parser.add_argument("--tokens", type=int, default=1024, help="of a capture")
    parser.add_argument("--gigabytes", type=float, default=0.6, help="states a turn, in 1e9 bytes")
    parser.add_argument("--repeats", type=int, default=5)


class Work:
    """One codec at one width."""

    def __init__(self, args: argparse.Namespace, codec: str, hidden: int) -> None:
        self.codec: Codec = open_codec(codec, "bfloat16")
        self.spec = CaptureSpec(
            target="x", config_hash="0" * 16, num_layers=30, hidden_size=hidden, dtype="bfloat16",
            taps=(2, 15, 27, "final"), norm_kind="rms", norm_eps=1e-5,
        )  # fmt: skip
        ids = np.arange(args.tokens)
        self.row = Row.make(ids, np.ones(len(ids), bool))
        self.states: Bits = bits_of(torch.randn(TAPS, len(ids), hidden).bfloat16())
        self.chunk_rows = chunk_rows(hidden)
        self.encoded: list[Chunks] = [self.codec.encode_chunks(tap, self.chunk_rows) for tap in self.states]
        self.count = max(1, round(args.gigabytes * 1e9 / self.states.nbytes))

    def encode(self, out: Bits) -> None:
        encode_capture(self.row, self.states, self.spec, self.codec, chunk_rows=self.chunk_rows, policy="all")

    def decode(self, out: Bits) -> None:
        for chunks, states in zip(self.encoded, out, strict=True):
            payload, at, row = memoryview(chunks.payload), 0, 0
            if chunks.scales:  # rows of many chunks at once, as the reader does it
                self.codec.decode(payload, np.concatenate(chunks.scales), states)
                continue
            for size in chunks.sizes:
                part = states[row : row + self.chunk_rows]
                self.codec.decode(payload[at : at + size], None, part)
                at, row = at + size, row + len(part)

    def turn(self, work: Callable[[Bits], None], threads: int) -> Callable[[], object]:
        """``count`` captures by so many threads, each with memory of its own."""
        places = [np.empty_like(self.states) for _ in range(threads)]
        each = -(-self.count // threads)

        def share(out: Bits) -> None:
            for _ in range(each):
                work(out)

        def run() -> object:
            with ThreadPoolExecutor(threads) as pool:
                return list(pool.map(share, places))

        return run

    def gigabytes(self, threads: int) -> float:
        """Of one turn."""
        return float(-(-self.count // threads) * threads * self.states.nbytes) / 1e9


def run(bench: common.Bench) -> None:
    args = bench.args
    if bench.quick:
        args.hidden, args.tokens, args.gigabytes, args.repeats = [576], 256, 0.01, 1
    for hidden in args.hidden:
        works = {codec: Work(args, codec, hidden) for codec in sorted(CODECS)}
        counts = {codec: args.threads or [1, encoder_threads(work.codec)] for codec, work in works.items()}
        turns = {
            (codec, count, way): work.turn(getattr(work, way), count)
            for codec, work in works.items()
            for count in counts[codec]
            for way in ("encode", "decode")
        }
        found = common.interleaved({str(key): turn for key, turn in turns.items()}, args.repeats)
        for codec, work in works.items():
            for count in counts[codec]:
                values = {}
                for way in ("encode", "decode"):
                    timing = found[str((codec, count, way))]
                    values[f"{way}_gb_per_s"] = work.gigabytes(count) / timing.median
                    values[f"{way}_spread"] = timing.spread
                bench.row(cores=available_cores(), codec=codec, hidden=hidden, threads=count, **values)
    widest = max(args.hidden)
    for codec in sorted(CODECS):
        rows = [row for row in bench.rows if (row["codec"], row["hidden"]) == (codec, widest)]
        most = max(row["threads"] for row in rows)
        rate = next(row["encode_gb_per_s"] for row in rows if row["threads"] == most)
        name = f"GB/s encoded by {most} threads ({codec}, {widest} wide), against what an H200 prefills"
        bench.target(name, rate, PREFILL, rate >= PREFILL)


if __name__ == "__main__":
    common.main("threads", run, arguments)
