"""The store beside what people use today: size, speed a core, latency of one capture, and opening a large store.

Real states: four taps of SmolLM2-135M-Instruct over conversations of ``--data`` (JSONL with ``messages``; the repository's examples
when it is not given). Wide states: 7168 a token, with the same distribution of values. Speeds are raw bytes over processor
seconds of this process, so they are speeds a core even where a library starts threads; files lie in memory (/dev/shm)
when there is room, so that no disk is measured. All methods take turns, after a warm-up; medians of the repeats.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
import xxhash

from common import ROOT, Bench, main
from headrace.bits import Bits, bits_of, first_bad_row
from headrace.demo import cached_demo_model
from headrace.store import Store, StoreWriter
from headrace.store.codecs import Codec, chunk_rows, open_codec
from headrace.store.index import Index, ShardRow
from headrace.types import CaptureSpec, Row, Tap

TAPS: tuple[Tap, ...] = (2, 15, 27, "final")
WIDE = 7168
Captures = list[tuple[Row, torch.Tensor]]
Reader = Callable[[int, torch.Tensor], object]
"""Reads the states of capture i into memory that the caller owns, as a trainer's batch is."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, help="conversations whose states are taken (.jsonl or .jsonl.gz)"
    )
    parser.add_argument(
        "--tokens", type=int, default=0, help="tokens of real states (default 24,000; quick: 2,000)"
    )
    parser.add_argument(
        "--states", type=Path, help="keep the real states in this file, and take them from it next time"
    )


# --- states -------------------------------------------------------------------------------------------------------------


def conversations(data: Path | None) -> Iterator[list[dict[str, str]]]:
    """Messages of one conversation after another; over again when there are few."""
    files = [data] if data else sorted((ROOT / "examples").rglob("*.jsonl"))
    while True:
        for file in files:
            with gzip.open(file, "rt") if file.suffix == ".gz" else open(file) as lines:
                for line in lines:
                    value = json.loads(line)
                    if "messages" in value:
                        yield value["messages"]


def real_captures(bench: Bench) -> Captures:
    """States of the real model."""
    kept: Path | None = bench.args.states
    if kept and kept.exists():
        data = torch.load(kept, weights_only=True)
        return [
            (Row.make(ids, np.arange(len(ids)) % 2), states)
            for ids, states in zip(data["ids"], data["states"], strict=True)
        ]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = cached_demo_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # In float32, rounded below: some processors have no 16-bit arithmetic.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted, out, tokens = bench.args.tokens or (2_000 if bench.quick else 24_000), [], 0
    for messages in conversations(bench.args.data):
        ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"][:1024]
        with torch.inference_mode():
            hidden = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        states = torch.stack([hidden[i][0] for i in (2, 15, 27, 30)]).bfloat16()
        out.append((Row.make(ids, np.arange(len(ids)) % 2), states))
        tokens += len(ids)
        if tokens >= wanted:
            break
    if kept:
        torch.save(
            {"ids": [torch.from_numpy(row.ids) for row, _ in out], "states": [states for _, states in out]},
            kept,
        )
    return out


def wide_captures(real: Captures, tokens: int) -> Captures:
    """States of width 7168 whose values are drawn from the real ones, channel by channel: the same exponents, no repetition."""
    random = np.random.default_rng(0)
    source = torch.cat([states for _, states in real], dim=1)
    out = []
    for seed in range(max(1, tokens // 256)):
        channels = torch.from_numpy(random.integers(0, source.shape[2], WIDE))
        places = torch.from_numpy(random.integers(0, source.shape[1], (256, WIDE)))
        ids = random.integers(0, 40_000, 256)
        ids[0] = seed
        states = torch.stack([tap[places, channels.expand(256, -1)] for tap in source])
        out.append((Row.make(ids, np.arange(256) % 2), states))
    return out


def spec_of(captures: Captures) -> CaptureSpec:
    return CaptureSpec(
        target="benchmark",
        config_hash="0" * 16,
        num_layers=30,
        hidden_size=captures[0][1].shape[2],
        dtype="bfloat16",
        taps=TAPS,
        norm_kind="rms",
        norm_eps=1e-5,
    )


# --- methods ------------------------------------------------------------------------------------------------------------


class Method(ABC):
    """One way to keep captures in a folder."""

    name: str
    lossless = True

    @abstractmethod
    def write(self, folder: Path, captures: Captures) -> None:
        """Write all of them."""

    @abstractmethod
    def open(self, folder: Path, captures: Captures) -> Reader:
        """Ready the folder for reading."""


class Ours(Method):
    def __init__(self, codec: str) -> None:
        self.name, self.codec, self.lossless = f"headrace {codec}", codec, codec != "fp8"

    def write(self, folder: Path, captures: Captures) -> None:
        with StoreWriter(folder, spec_of(captures), codec=self.codec) as writer:
            for row, states in captures:
                writer.add(row, states)

    def open(self, folder: Path, captures: Captures) -> Reader:
        store, keys = Store.open(folder), [row.key for row, _ in captures]
        return lambda i, out: store.read_into(keys[i], out)


class TorchSave(Method):
    """A pickle a sample, as most tools do."""

    name = "torch.save a sample"

    def write(self, folder: Path, captures: Captures) -> None:
        folder.mkdir()
        for number, (row, states) in enumerate(captures):
            torch.save({"input_ids": torch.from_numpy(row.ids), "states": states}, folder / f"{number}.pt")

    def open(self, folder: Path, captures: Captures) -> Reader:
        return lambda i, out: out.copy_(torch.load(folder / f"{i}.pt", weights_only=True)["states"])


class GzipTorchSave(Method):
    name = "torch.save + gzip -1"

    def write(self, folder: Path, captures: Captures) -> None:
        folder.mkdir()
        for number, (row, states) in enumerate(captures):
            with gzip.open(folder / f"{number}.pt.gz", "wb", compresslevel=1) as file:
                torch.save(
                    {"input_ids": torch.from_numpy(row.ids), "states": states}, cast("IO[bytes]", file)
                )

    def open(self, folder: Path, captures: Captures) -> Reader:
        def read(i: int, out: torch.Tensor) -> None:
            with gzip.open(folder / f"{i}.pt.gz", "rb") as file:
                out.copy_(torch.load(io.BytesIO(file.read()), weights_only=True)["states"])

        return read


class SafetensorsFiles(Method):
    name = "safetensors a sample"

    def write(self, folder: Path, captures: Captures) -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        for number, (row, states) in enumerate(captures):
            save_file(
                {"token_ids": torch.from_numpy(row.ids), "hidden_states": states},
                folder / f"{number}.safetensors",
            )

    def open(self, folder: Path, captures: Captures) -> Reader:
        from safetensors.torch import load_file

        return lambda i, out: out.copy_(load_file(folder / f"{i}.safetensors")["hidden_states"])


class Zarr(Method):
    """Zarr v3, one array of all tokens, chunks of one tap, Blosc with byte shuffle and zstd."""

    name = "zarr v3 blosc shuffle-zstd"

    def write(self, folder: Path, captures: Captures) -> None:
        import zarr
        from zarr.codecs import BloscCodec

        total, hidden = sum(len(row) for row, _ in captures), captures[0][1].shape[2]
        array = zarr.create_array(
            store=str(folder),
            shape=(len(TAPS), total, hidden),
            chunks=(1, max(1, (1 << 19) // hidden), hidden),
            dtype="uint16",
            compressors=[BloscCodec(cname="zstd", clevel=1, shuffle="shuffle")],
        )
        array[:] = np.concatenate([bits_of(states) for _, states in captures], axis=1)

    def open(self, folder: Path, captures: Captures) -> Reader:
        import zarr

        array = zarr.open_array(str(folder), mode="r")
        starts = np.concatenate([[0], np.cumsum([len(row) for row, _ in captures])])
        return lambda i, out: np.copyto(bits_of(out), np.asarray(array[:, starts[i] : starts[i + 1]]))


class ZipNN(Method):
    """The compressor of the paper "ZipNN", a file a sample."""

    name = "zipnn a sample"

    def write(self, folder: Path, captures: Captures) -> None:
        from zipnn import ZipNN as Compressor

        folder.mkdir()
        zipnn = Compressor(bytearray_dtype="bfloat16", threads=1)
        for number, (_, states) in enumerate(captures):
            (folder / f"{number}.znn").write_bytes(zipnn.compress(bytearray(bits_of(states).tobytes())))

    def open(self, folder: Path, captures: Captures) -> Reader:
        from zipnn import ZipNN as Compressor

        zipnn = Compressor(bytearray_dtype="bfloat16", threads=1)

        def read(i: int, out: torch.Tensor) -> None:
            data = bytearray(zipnn.decompress((folder / f"{i}.znn").read_bytes()))
            out.copy_(torch.frombuffer(data, dtype=torch.bfloat16).view(out.shape))

        return read


def methods() -> list[Method]:
    """All that can be imported here."""
    out: list[Method] = [
        Ours("raw"),
        Ours("bf16-planes"),
        Ours("fp8"),
        TorchSave(),
        GzipTorchSave(),
        SafetensorsFiles(),
    ]
    for method, module in ((Zarr(), "zarr"), (ZipNN(), "zipnn")):
        try:
            __import__(module)
        except ImportError:
            print(f"{method.name}: {module} is not installed, left out")
        else:
            out.append(method)
    return out


# --- measuring ----------------------------------------------------------------------------------------------------------


def compare(bench: Bench, states: str, captures: Captures, base: Path) -> dict[str, dict[str, Any]]:
    """All methods in turns; returns their rows by name."""
    repeats = 3 if bench.quick else 5
    raw = sum(tensor.nbytes for _, tensor in captures)
    order = np.random.default_rng(1).permutation(len(captures)).tolist()
    seconds: dict[str, dict[str, list[float]]] = {}
    sizes: dict[str, int] = {}
    contestants = methods()
    buffers = [torch.zeros_like(tensor) for _, tensor in captures]
    for turn in range(repeats + 1):
        for method in contestants:
            folder = base / "store"
            write = cpu_seconds(partial(method.write, folder, captures))
            reader = method.open(folder, captures)
            check(method, reader, captures, buffers)
            read = cpu_seconds(partial(read_all, reader, buffers))
            began = time.perf_counter()
            for i in order[:20]:
                reader(i, buffers[i])
            latency = (time.perf_counter() - began) / min(20, len(order))
            sizes[method.name] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder)
            if turn:  # the first is the warm-up
                taken = seconds.setdefault(method.name, {"write": [], "read": [], "latency": []})
                for key, value in (("write", write), ("read", read), ("latency", latency)):
                    taken[key].append(value)
    rows = {}
    for method in contestants:
        median = {key: statistics.median(values) for key, values in seconds[method.name].items()}
        spread = max(seconds[method.name]["read"]) / min(seconds[method.name]["read"]) - 1
        rows[method.name] = {
            "states": states,
            "method": method.name,
            "ratio": round(sizes[method.name] / raw, 4),
            "write GB/s": round(raw / median["write"] / 1e9, 3),
            "read GB/s": round(raw / median["read"] / 1e9, 3),
            "one capture ms": round(median["latency"] * 1e3, 3),
            "read spread": round(spread, 2),
        }
        bench.row(**rows[method.name])
    return rows


def check(method: Method, reader: Reader, captures: Captures, buffers: list[torch.Tensor]) -> None:
    """A method that gives back something else is not compared."""
    for i in (0, len(captures) - 1):
        reader(i, buffers[i].zero_())
        if method.lossless and not torch.equal(
            buffers[i].view(torch.int16), captures[i][1].view(torch.int16)
        ):
            raise AssertionError(f"{method.name} does not give back what was written")


def cpu_seconds(work: Callable[[], object]) -> float:
    """Processor seconds of all threads of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def codec_speeds(bench: Bench, states: str, captures: Captures) -> None:
    """The codecs alone, checksums included: what one core encodes and decodes, in memory."""
    bits = np.concatenate([bits_of(tensor).reshape(-1, tensor.shape[2]) for _, tensor in captures])
    step = chunk_rows(bits.shape[1])
    chunks = [bits[i : i + step] for i in range(0, len(bits), step)]
    repeats = 3 if bench.quick else 9
    for name in ("raw", "bf16-planes", "fp8"):
        codec = open_codec(name, "bfloat16")
        encoded = [encode(codec, chunk) for chunk in chunks]
        out = np.empty_like(chunks[0])
        encode_s, decode_s = [], []
        for _ in range(repeats + 1):
            encode_s.append(cpu_seconds(partial(encode_all, codec, chunks)))
            decode_s.append(cpu_seconds(partial(decode_all, codec, encoded, chunks, out)))
        encode_speed = bits.nbytes / statistics.median(encode_s[1:]) / 1e9
        decode_speed = bits.nbytes / statistics.median(decode_s[1:]) / 1e9
        ratio = (
            sum(len(payload) + (0 if scales is None else scales.nbytes) for payload, scales in encoded)
            / bits.nbytes
        )
        bench.row(
            **{
                "states": states,
                "method": f"codec {name} alone",
                "ratio": round(ratio, 4),
                "write GB/s": round(encode_speed, 3),
                "read GB/s": round(decode_speed, 3),
                "one capture ms": "",
                "read spread": round(max(decode_s[1:]) / min(decode_s[1:]) - 1, 2),
            }
        )
        if name == "bf16-planes":
            bench.target(f"{states}: bf16-planes ratio", round(ratio, 4), 0.70, ratio <= 0.70)
            bench.target(
                f"{states}: bf16-planes encode GB/s", round(encode_speed, 3), 1.3, encode_speed >= 1.3
            )
            bench.target(
                f"{states}: bf16-planes decode GB/s", round(decode_speed, 3), 2.5, decode_speed >= 2.5
            )
        elif name == "fp8":
            bench.target(f"{states}: fp8 ratio", round(ratio, 4), 0.51, ratio <= 0.51)


Encoded = tuple[memoryview, "np.ndarray[Any, Any] | None"]


def encode(codec: Codec, chunk: Bits) -> Encoded:
    """One chunk's payload, its checksum taken."""
    buffers, scales = codec.encode(chunk)
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return memoryview(b"".join(memoryview(buffer).cast("B") for buffer in buffers)), scales


def encode_all(codec: Codec, chunks: list[Bits]) -> None:
    for chunk in chunks:
        buffers, _ = codec.encode(chunk)
        digest = xxhash.xxh3_64()
        for buffer in buffers:
            digest.update(buffer)


def decode_all(codec: Codec, encoded: list[Encoded], chunks: list[Bits], out: Bits) -> None:
    for (payload, scales), chunk in zip(encoded, chunks, strict=True):
        xxhash.xxh3_64_intdigest(payload)
        codec.decode(payload, scales, out[: len(chunk)])


def read_all(reader: Reader, buffers: list[torch.Tensor]) -> None:
    for i, out in enumerate(buffers):
        reader(i, out)


def door_speed(bench: Bench, states: str, captures: Captures) -> None:
    """What looking at every value at the writer's door costs."""
    every = [bits_of(tensor).reshape(-1, tensor.shape[2]) for _, tensor in captures]
    raw = sum(bits.nbytes for bits in every)
    taken = [
        cpu_seconds(lambda: [first_bad_row(b, "bfloat16", np.ones(len(b), bool)) for b in every])
        for _ in range(5)
    ]
    bench.row(
        **{
            "states": states,
            "method": "door: NaN, infinity, zeros",
            "ratio": "",
            "write GB/s": round(raw / min(taken) / 1e9, 3),
        },
        **{"read GB/s": "", "one capture ms": "", "read spread": ""},
    )


def opening(bench: Bench, base: Path) -> None:
    """Opening a store of many captures: ours by its index, a folder of files by listing it."""
    count, most = (10_000, 50_000) if bench.quick else (100_000, 1_000_000)
    for captures, limit in ((count, None), (most, 2.0)):
        seconds = [open_ours(base / "many", captures) for _ in range(3)]
        shutil.rmtree(base / "many")
        bench.row(**opening_row(f"headrace, {captures:,} captures", statistics.median(seconds)))
        if limit:
            bench.target(
                f"open {captures:,} captures, s",
                round(statistics.median(seconds), 3),
                limit,
                statistics.median(seconds) < limit,
            )
    folder = base / "files"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.pt").touch()
    began = time.perf_counter()
    listed = [(entry.name, entry.stat().st_size) for entry in folder.iterdir()]
    seconds_listed = time.perf_counter() - began
    assert len(listed) == count
    shutil.rmtree(folder)
    bench.row(**opening_row(f"a file a sample, listed with sizes, {count:,}", seconds_listed))


def opening_row(method: str, seconds: float) -> dict[str, Any]:
    return {
        "states": "opening",
        "method": method,
        "ratio": "",
        "write GB/s": "",
        "read GB/s": "",
        "one capture ms": round(seconds * 1e3, 1),
        "read spread": "",
    }


def open_ours(path: Path, count: int) -> float:
    """Seconds to open a store of ``count`` captures in shards of 200; the shards themselves are never opened."""
    shards = count // 200
    names = [f"20260101000000{i:06d}-h_0-1-000001-aa.safetensors" for i in range(shards)]
    if not path.exists():
        spec = CaptureSpec(
            target="x",
            config_hash="0" * 16,
            num_layers=30,
            hidden_size=64,
            dtype="bfloat16",
            taps=TAPS,
            norm_kind="rms",
            norm_eps=1e-5,
        )
        StoreWriter(path, spec).close()
        random = np.random.default_rng(0)
        hi, lo = (
            np.sort(random.integers(0, 2**63, count, dtype="u8")),
            random.integers(0, 2**63, count, dtype="u8"),
        )
        shard, slot = random.integers(0, shards, count).astype("i4"), np.arange(count, dtype="i4")
        tokens = np.full(count, 100, "i4")
        rows = tuple(ShardRow(name, 1 << 30, TAPS, "0" * 16) for name in names)
        (path / "index.parquet").write_bytes(Index(rows, hi, lo, shard, slot, tokens, tokens).to_parquet())
        for name in names:
            (path / "shards" / name).touch()
    began = time.perf_counter()
    store = Store.open(path)
    assert len(store) == count
    return time.perf_counter() - began


def run(bench: Bench) -> None:
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    home = memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30 else None
    real = real_captures(bench)
    wide = wide_captures(real, 512 if bench.quick else 2560)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=home) as folder:
        for states, captures in (("SmolLM2, 576 wide", real), ("7168 wide", wide)):
            codec_speeds(bench, states, captures)
            door_speed(bench, states, captures)
            rows = compare(bench, states, captures, Path(folder))
            judge(bench, states, rows)
        opening(bench, Path(folder))


def judge(bench: Bench, states: str, rows: dict[str, dict[str, Any]]) -> None:
    """No lossless method may be smaller than bf16-planes and as fast both ways."""
    ours = rows["headrace bf16-planes"]
    better = [
        name
        for name, row in rows.items()
        if not name.startswith("headrace")
        and row["ratio"] < ours["ratio"]
        and row["write GB/s"] >= ours["write GB/s"]
        and row["read GB/s"] >= ours["read GB/s"]
    ]
    bench.target(f"{states}: methods smaller at equal or better speed", len(better), 0, not better)


if __name__ == "__main__":
    main("store", run, arguments)
