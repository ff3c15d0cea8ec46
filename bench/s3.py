"""Our store in a bucket beside obstore alone: the same bytes, the same server (moto on loopback), in turns.

Write: a shard laid out and uploaded by the store against ``obstore.put`` of the finished bytes; and a writer at work (states
checked at the door, encoded, checksummed, uploaded as several shards). Read: one tap of one capture with its checksums proven, and the
same through a warm disk cache, against ``obstore.get_range`` of the same range. Rates are raw bytes over wall seconds; the
server is a Python process on the same cores, so ratios mean something and rates do not.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch

from common import Bench, interleaved, main
from headrace.bits import bits_of
from headrace.remote import open_bucket
from headrace.store import Store, StoreWriter
from headrace.store.bucket import RemoteFolder
from headrace.store.build import ShardBuilder
from headrace.store.cache import Cache
from headrace.store.codecs import chunk_rows, open_codec
from headrace.store.encode import encode_capture
from headrace.store.publish import write_shard
from headrace.testing.s3 import S3Server
from headrace.types import CaptureSpec, Row

SPEC = CaptureSpec(
    target="benchmark",
    config_hash="0" * 16,
    num_layers=32,
    hidden_size=2048,
    dtype="bfloat16",
    taps=(2, 16, 29, "final"),
    norm_kind="rms",
    norm_eps=1e-5,
)
TOKENS = 512
PARTS = 4
Captures = list[tuple[Row, torch.Tensor]]


def make_captures(count: int) -> Captures:
    """Random states: with codec raw their values do not matter."""
    random = np.random.default_rng(0)
    out = []
    for _ in range(count):
        row = Row.make(random.integers(0, 30_000, TOKENS), np.arange(TOKENS) % 2)
        out.append((row, torch.randn(len(SPEC.taps), TOKENS, SPEC.hidden_size, dtype=torch.bfloat16)))
    return out


def shard_of(captures: Captures) -> tuple[Callable[[], ShardBuilder], bytes]:
    """What makes the shard's builder anew, and the shard's bytes."""
    codec, rows = open_codec("raw", SPEC.dtype), chunk_rows(SPEC.hidden_size)
    encoded = [
        encode_capture(row, bits_of(states), SPEC, codec, chunk_rows=rows, policy="all")
        for row, states in captures
    ]

    def builder() -> ShardBuilder:
        made = ShardBuilder(SPEC, codec, rows, "all", {})
        for capture in encoded:
            made.append(capture)
        return made

    prefix, buffers = builder().layout()
    return builder, b"".join([prefix, *buffers])


def write_rates(bench: Bench, server: S3Server, captures: Captures) -> None:
    builder, data = shard_of(captures)
    folder, bucket = RemoteFolder(server.url("ours")), open_bucket(server.url("theirs"))
    number = itertools.count()
    random = np.random.default_rng(1)

    def ours() -> None:
        name = f"{next(number):06d}.safetensors"
        write_shard(folder, name, builder())
        folder.remove_file(f"shards/{name}")

    def writer() -> None:
        """Rows that the store does not hold yet, several shards of them, so that encoding and uploading overlap as they do."""
        for _, states in captures:
            ids = random.integers(0, 30_000, TOKENS)
            steady.add(Row.make(ids, np.arange(TOKENS) % 2), states)
        steady.seal()
        for name in steady_folder.shard_names():
            steady_folder.remove_file(f"shards/{name}")

    def alone() -> None:
        obstore.put(bucket, "object", data)
        obstore.delete(bucket, "object")

    def alone_in_parts() -> None:
        """The same bytes in as many objects: requests cost too, and a real shard has 1 GiB to pay for its few."""
        step = -(-len(data) // PARTS)
        for begin in range(0, len(data), step):
            obstore.put(bucket, f"parts/{begin}", data[begin : begin + step])
        for page in obstore.list(bucket, prefix="parts/"):
            for entry in page:
                obstore.delete(bucket, entry["path"])

    report(bench, "write", {"obstore.put": alone, "our shard": ours}, len(data))
    steady_folder = RemoteFolder(server.url("writer"))
    with StoreWriter(steady_folder, SPEC, codec="raw", shard_bytes=len(data) // PARTS) as steady:
        contestants = {"obstore.put": alone_in_parts, "our writer": writer}
        report(bench, f"write {PARTS} shards", contestants, len(data))


def read_rates(bench: Bench, server: S3Server, captures: Captures, folder: Path) -> None:
    url = server.url("read")
    with StoreWriter(url, SPEC, codec="raw") as writer:
        for row, states in captures:
            writer.add(row, states)
    store, cached = Store.open(url), Store.open(url, cache=Cache(folder / "cache", 8 << 30))
    bucket = open_bucket(url)
    out = torch.empty(1, TOKENS, SPEC.hidden_size, dtype=torch.bfloat16)
    ranges = []
    for row, _ in captures:
        shard, slot = store.place(row.key, 16)
        chunks, base = shard.chunks(slot, 16), shard.prefix.starts[16]
        ranges.append(
            (f"shards/{shard.name.rsplit('/', 1)[-1]}", base + chunks[0].start, base + chunks[-1].stop)
        )

    def ours(through: Store) -> None:
        for row, states in captures:
            through.read_into(row.key, out, [16])
            assert out[0, -1, -1] == states[1, -1, -1]

    def alone() -> None:
        for path, start, stop in ranges:
            obstore.get_range(bucket, path, start=start, end=stop)

    nbytes = sum(stop - start for _, start, stop in ranges)
    contestants: dict[str, Callable[[], Any]] = {
        "obstore.get_range": alone,
        "our read, proven": lambda: ours(store),
        "our read, warm cache": lambda: ours(cached),
    }
    report(bench, "read one tap", contestants, nbytes)


def report(bench: Bench, what: str, contestants: dict[str, Callable[[], Any]], nbytes: int) -> None:
    """Rows of all, targets of all but the first, which is obstore alone. Ratios are taken turn by turn, and their median told:
    what slows the machine for a while slows both sides of most of them."""
    cpu = dict.fromkeys(contestants, 0.0)

    def counted(name: str) -> None:
        began = time.process_time()
        contestants[name]()
        cpu[name] += time.process_time() - began

    repeats = 7 if bench.quick else 15
    timings = interleaved({name: partial(counted, name) for name in contestants}, repeats)
    alone, *ours = contestants
    for name, timing in timings.items():
        turns = zip(timings[alone].seconds, timing.seconds, strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in turns)
        rate = nbytes / 1e6 / timing.median
        bench.row(
            what=what,
            how=name,
            MB=nbytes / 1e6,
            **{"MB/s": rate, "spread": timing.spread, "against obstore": ratio},
            **{"client ms CPU/MB": 1e3 * cpu[name] / (repeats + 1) / (nbytes / 1e6)},
        )
        if name in ours:
            bench.target(f"{what}: {name} / obstore alone", ratio, 0.9, ratio >= 0.9)


def run(bench: Bench) -> None:
    torch.set_num_threads(1)
    captures = make_captures(4 if bench.quick else 24)
    with S3Server() as server, tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        os.environ.update(server.environment())
        # straight to the server: the gate that tests count with is a Python thread, and would be what is measured
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.port}"
        write_rates(bench, server, captures)
        read_rates(bench, server, captures, Path(folder))


if __name__ == "__main__":
    main("s3", run)
