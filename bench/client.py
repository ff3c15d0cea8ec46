"""How fast the client is when no engine holds it up: staged captures to verified states, and on to durable shards.

    python bench/client.py [--quick] [--hidden 576 4096 7168] [--gigabytes 6] [--repeats 5] [--disk FOLDER] [--json FILE]

A server without an engine (``client_server.py``) answers every request at once with a file that lies in memory already;
the client is the product's. Beside it the disk alone takes as many bytes as the shards have, by one thread. Taken in turns.
Processor time is that of the client with all its threads, in seconds for 1e9 bytes of states.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from client_server import READY
from common import Bench, Timing, interleaved, main
from engine_cpu import capture_all, extract_all, write_alone
from gpu import prompts
from headrace.data.rows import RowWriter
from headrace.engines import open_engine
from headrace.extract.config import ExtractConfig
from headrace.sglang_plugin.protocol import taps_to_text
from headrace.store import Store
from headrace.store.codecs import codec_class
from headrace.target import Target
from headrace.testing.models import make_config_only
from headrace.testing.servers import free_port
from headrace.types import Row

OPTIONS = {"reference": "none"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[576, 4096, 7168], help="widths of the states"
    )
    parser.add_argument("--gigabytes", type=float, default=6.0, help="states of a turn, in 1e9 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--codec", default="", help="of the stores (default: what the product chooses)")
    parser.add_argument("--disk", type=Path, help="where the stores go (default: a temporary folder)")


class Ways:
    """The ways to take one round of captures."""

    def __init__(self, hidden: int, gigabytes: float, codec: str, folder: Path, disk: Path) -> None:
        self.codec = codec
        self.target = Target.open(str(make_config_only(disk / "model", hidden=hidden)))
        self.spec = self.target.spec("eagle3", dtype="bfloat16")
        self.rows = _rows(int(gigabytes * 1e9 / self.spec.bytes_per_token), self.target.vocab_size)
        self.tokens = sum(map(len, self.rows))
        self.staging, self.disk = folder / "staging", disk
        with RowWriter(disk / "rows") as writer:
            for row in self.rows:
                writer.add(row)
        self.url = ""
        self.bytes_stored = 0
        self.processor: dict[str, list[float]] = defaultdict(list)

    def start(self) -> subprocess.Popen[str]:
        """The server, once every capture is staged."""
        port = free_port()
        command = [sys.executable, str(Path(__file__).with_name("client_server.py")), f"--port={port}"]
        command += [
            f"--folder={self.staging}",
            f"--rows={self.disk / 'rows'}",
            f"--hidden={self.spec.hidden_size}",
        ]
        command += [f"--layers={self.spec.num_layers}", f"--taps={taps_to_text(self.spec.taps)}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if process.stdout.readline().strip() != READY:
            process.kill()
            raise SystemExit("the server did not start")
        self.url = f"http://127.0.0.1:{port}"
        return process

    def all(self) -> dict[str, Callable[[], object]]:
        ways = {"capture to verified states": self.capture, "extract to durable shards": self.extract}
        return {name: lambda name=name, way=way: self._timed(name, way) for name, way in ways.items()} | {  # type: ignore[misc]
            "the disk alone": self.write
        }

    def _timed(self, name: str, way: Callable[[], object]) -> object:
        began = time.process_time()
        seconds = way()
        self.processor[name].append(time.process_time() - began)
        return seconds

    def capture(self) -> None:
        with open_engine("sglang", self.target, self.spec, {"url": [self.url], **OPTIONS}) as engine:
            capture_all(engine, self.rows)

    def extract(self) -> float:
        config = ExtractConfig(
            rows=self.disk / "rows", model=str(self.target.path), out=self.disk / "store", engine="sglang", url=[self.url],
            dtype="bfloat16", skip_preflight=True, engine_options=OPTIONS, codec=self.codec,
        )  # fmt: skip
        seconds, result = extract_all(config)
        assert result["captures"] == len(self.rows)
        self.bytes_stored = result["bytes_stored"]
        return seconds

    def write(self) -> float:
        return write_alone(self.disk, self.bytes_stored)


def _rows(tokens: int, vocab: int) -> list[Row]:
    """Prompts of log-normal lengths, mean 1,500, of about ``tokens`` tokens."""
    rows: list[Row] = []
    for row in prompts(tokens // 200 + 8, 1500, 8192, vocab):
        if rows and tokens <= 0:
            break
        rows.append(row)
        tokens -= len(row)
    return rows


def check(ways: Ways) -> None:
    """The last store holds what the server staged, bit for bit where its codec does: the extraction's own proof, and one capture by hand."""
    store = Store.open(ways.disk / "store")
    assert set(store.keys()) == {row.key for row in ways.rows}
    if not codec_class(store.codec).lossless:
        return
    states = store.get(ways.rows[0].key).states.contiguous()
    assert states.view(torch.uint8).numpy().tobytes() in (ways.staging / "0.made").read_bytes()


def run(bench: Bench) -> None:
    """One width after another."""
    args = bench.args
    widths, gigabytes, repeats = (
        ([64], 0.002, 2) if bench.quick else (args.hidden, args.gigabytes, args.repeats)
    )
    for hidden in widths:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.disk)))
            ways = Ways(hidden, gigabytes, args.codec, folder, disk)
            server = ways.start()
            stack.callback(server.wait)
            stack.callback(server.kill)
            timings = interleaved(ways.all(), repeats=repeats)
            check(ways)
            _report(bench, ways, timings)


def _report(bench: Bench, ways: Ways, timings: dict[str, Timing]) -> None:
    states = ways.tokens * ways.spec.bytes_per_token / 1e9
    for name, timing in timings.items():
        took = sorted(ways.processor.get(name, [0.0]))
        size = ways.bytes_stored / 1e9 if name == "the disk alone" else states
        bench.row(
            hidden=ways.spec.hidden_size, path=name, tokens_per_s=ways.tokens / timing.median, gb_per_s=size / timing.median,
            processor_s_per_gb=took[len(took) // 2] / states, spread=timing.spread,
        )  # fmt: skip
    share = timings["the disk alone"].median / timings["extract to durable shards"].median
    bench.row(
        hidden=ways.spec.hidden_size, path="extract, share of the disk's own speed", tokens_per_s=0.0, gb_per_s=share,
        processor_s_per_gb=0.0, spread=0.0,
    )  # fmt: skip


if __name__ == "__main__":
    main("client", run, arguments)
