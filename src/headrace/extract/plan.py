"""What an extraction will take, from token counts and the target's shape alone: bytes, shards, memory, hours, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace import plugins
from headrace.errors import ConfigError, InputError
from headrace.extract.admission import default_budget
from headrace.extract.config import PlanConfig
from headrace.extract.disk import space
from headrace.extract.files import RunFiles
from headrace.files import read_json
from headrace.types import DTYPE_BYTES, parse_taps

if TYPE_CHECKING:
    from headrace.extract.scaling import ClusterPlan

CODEC_RATIOS = {"raw": 1.0, "bf16-planes": 0.70, "fp8": 0.51}
"""Stored bytes a raw byte, as measured on real states and rounded up (docs/format.md)."""
SERVER_ENGINES = ("sglang", "vllm")
PROCESS_BYTES = 1_500_000_000
"""Python, torch and the row index, resident."""
BYTES_A_ROW = 600
"""Memory for the keys of one row."""
PROCESS_RATE = 1.2e9
"""Bytes of states a second that one process checks, compresses and writes (one H200's host, docs/performance.md)."""


def stored_ratio(codec: str) -> float:
    """Expected stored bytes a raw byte; 1.0 for a codec without a figure."""
    return CODEC_RATIOS.get(codec, 1.0)


def usual_codec(dtype: str) -> str:
    """What a store uses when not told (:func:`headrace.store.codecs.default_codec`, which brings torch; a test compares the two)."""
    return "bf16-planes" if DTYPE_BYTES[dtype] == 2 else "raw"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of similar length."""

    longest: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Place:
    """A file system that the run will fill."""

    what: str
    path: str
    need: int
    free: int

    @property
    def fits(self) -> bool:
        """Whether what is needed is there."""
        return self.need <= self.free


@dataclass(frozen=True, slots=True)
class CodecSize:
    """The store under one codec."""

    codec: str
    ratio: float
    bytes: int
    shards: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The states of one token."""

    taps: tuple[Any, ...]
    hidden_size: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Raw bytes over all taps."""
        return len(self.taps) * self.hidden_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Plan:
    """The figures; :meth:`to_json` is the command's result."""

    rows: int
    tokens: int
    longest: int
    lengths: list[Bucket]
    shape: Shape
    bytes_raw: int
    codec: str
    codecs: list[CodecSize]
    memory: int
    memory_available: int
    rate: float
    """Tokens a second that the run reaches; 0 = not known."""
    engine_rate: float
    """Tokens a second that the engine gives: more, if there are not workers enough to take them."""
    workers: int
    """Processes that check, compress and write."""
    places: list[Place]

    @property
    def hours(self) -> float | None:
        """At :attr:`rate`; None when no rate is known."""
        return self.tokens / self.rate / 3600 if self.rate else None

    @property
    def fits(self) -> bool:
        """Whether every file system and the memory have room."""
        return all(place.fits for place in self.places) and self.memory <= self.memory_available

    def shortages(self) -> list[str]:
        """One sentence for each thing that does not fit."""
        from headrace.extract.disk import gigabytes

        lines = [
            f"{p.what} needs {gigabytes(p.need)} and {p.path} has {gigabytes(p.free)} free"
            for p in self.places
            if not p.fits
        ]
        if self.memory > self.memory_available:
            lines.append(
                f"the client needs {gigabytes(self.memory)} of memory and {gigabytes(self.memory_available)} are available"
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        out = asdict(self)
        out["shape"]["bytes_per_token"] = self.shape.bytes_per_token
        for place, entry in zip(self.places, out["places"], strict=True):
            entry["fits"] = place.fits
        return {**out, "hours": None if self.hours is None else round(self.hours, 2), "fits": self.fits}


def plan(config: PlanConfig, available_memory: Callable[[], int] | None = None) -> Plan:
    """Work out the plan. Raises InputError or ConfigError when data or target are not described well enough."""
    rows, tokens, lengths = _data(config)
    longest = int(lengths.max()) if lengths is not None and len(lengths) else config.max_tokens
    shape = _shape(config)
    codec = config.codec or usual_codec(shape.dtype)
    rate, ratio = _measured(config, codec)
    bytes_raw = tokens * shape.bytes_per_token
    codecs = [
        _codec_size(name, ratio if ratio and name == codec else known, bytes_raw, int(config.shard_bytes))
        for name, known in CODEC_RATIOS.items()
        if name != "bf16-planes" or DTYPE_BYTES[shape.dtype] == 2
    ]
    if codec not in CODEC_RATIOS and codec in plugins.names("headrace.codecs"):  # no figure: planned as raw
        codecs.append(_codec_size(codec, ratio or 1.0, bytes_raw, int(config.shard_bytes)))
    if codec not in {size.codec for size in codecs}:
        raise ConfigError(
            f"--codec {codec} cannot hold {shape.dtype} states; choose one of {[size.codec for size in codecs]}"
        )
    stored = next(size.bytes for size in codecs if size.codec == codec)
    places = [Place("the store", str(config.out), stored + int(config.min_free), space(config.out).free)]
    if config.engine in SERVER_ENGINES:
        places.append(
            Place(
                "staging",
                str(config.staging),
                config.tokens_in_flight * shape.bytes_per_token,
                space(config.staging).free,
            )
        )
    engine_rate = config.rate or rate
    workers = config.workers or workers_for(engine_rate, shape)
    return Plan(
        rows=rows,
        tokens=tokens,
        longest=longest,
        lengths=length_buckets(lengths) if lengths is not None else [],
        shape=shape,
        bytes_raw=bytes_raw,
        codec=codec,
        codecs=codecs,
        memory=_memory(config, workers, longest, shape) + rows * BYTES_A_ROW,
        memory_available=(available_memory or _available_memory)(),
        rate=_reached(config, engine_rate, shape),
        engine_rate=engine_rate,
        workers=workers,
        places=places,
    )


def workers_for(rate: float, shape: Shape) -> int:
    """Processes that take ``rate`` tokens a second, or all but a twentieth of one process's part; at least one."""
    return max(1, math.ceil(round(rate * shape.bytes_per_token / PROCESS_RATE, 1)))


def _memory(config: PlanConfig, workers: int, longest: int, shape: Shape) -> int:
    # Answered captures wait at most as long as the budget lets them; a shard is held once and once encoded. Several clients
    # of one server divide what it keeps in flight; engines in the workers do not.
    shared = workers if config.engine in SERVER_ENGINES else 1
    flying = default_budget(config.tokens_in_flight // shared, longest) * shape.bytes_per_token
    driver = PROCESS_BYTES if workers > 1 else 0
    return driver + workers * (PROCESS_BYTES + flying + 2 * int(config.shard_bytes))


def _reached(config: PlanConfig, engine_rate: float, shape: Shape) -> float:
    if not (config.rate and config.workers):  # measured, or taken by as many workers as it needs
        return engine_rate
    return min(engine_rate, config.workers * PROCESS_RATE / shape.bytes_per_token)


def plan_nodes(config: PlanConfig) -> ClusterPlan:
    """Work out the extraction on ``config.nodes`` hosts. Raises as :func:`plan`, and ConfigError for too few GPUs."""
    from headrace.extract.scaling import plan_cluster

    _, tokens, _ = _data(config)
    shape = _shape(config)
    codec = config.codec or usual_codec(shape.dtype)
    rate, measured = _measured(config, codec)
    machine = config.machine
    if config.gpus_per_node:
        machine = machine.model_copy(update={"gpus_per_node": config.gpus_per_node})
    if config.rate or rate:  # of one engine as it captures: nothing is taken off it
        machine = machine.model_copy(update={"prefill": config.rate or rate, "capture_ratio": 1.0})
    return plan_cluster(
        machine,
        nodes=config.nodes,
        tokens=tokens,
        bytes_per_token=shape.bytes_per_token,
        ratio=config.ratio or measured or stored_ratio(codec),
        shard_bytes=int(config.shard_bytes),
    )


def _data(config: PlanConfig) -> tuple[int, int, np.ndarray | None]:
    described = bool(config.num_rows and config.num_tokens)
    if config.rows is None and not described:
        raise ConfigError("give a row folder, or --num-rows and --num-tokens of the data to come")
    if config.rows is None or (described and not config.rows.exists()):
        return config.num_rows, config.num_tokens, None
    from headrace.data.rows import RowFolder

    lengths = RowFolder.open(config.rows).lengths()
    if not len(lengths):
        raise InputError(f"{config.rows} has no rows; see its dropped.parquet for why")
    return len(lengths), int(lengths.sum(dtype=np.int64)), lengths


def _shape(config: PlanConfig) -> Shape:
    num_layers, hidden_size, dtype = config.num_layers, config.hidden_size, config.dtype or "bfloat16"
    if not (num_layers and hidden_size):
        if not config.model:
            raise ConfigError("give --model, or --num-layers and --hidden-size of the target")
        from headrace.target import Target

        target = Target.open(config.model, config.revision)
        num_layers, hidden_size, dtype = target.num_layers, target.hidden_size, config.dtype or target.dtype
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype} is not one of {sorted(DTYPE_BYTES)}")
    try:
        return Shape(parse_taps(config.taps, num_layers), hidden_size, dtype)
    except ValueError as exc:
        raise ConfigError(f"--taps {config.taps}: {exc}") from exc


def _measured(config: PlanConfig, codec: str) -> tuple[float, float]:
    """(tokens a second, stored bytes a raw byte) of an earlier extraction; zeros where it tells none."""
    if config.measured is None:
        return 0.0, 0.0
    sessions = read_json(RunFiles.find(config.measured).manifest)["sessions"]
    results = [s["result"] for s in sessions if s.get("result", {}).get("tokens")]
    if not results:
        raise InputError(
            f"--measured {config.measured}: no session of that extraction has ended with captures"
        )
    last = results[-1]
    ratio = last["ratio"] if last["codec"] == codec else 0.0
    return float(last["tokens_per_second"]), float(ratio)


def _codec_size(codec: str, ratio: float, bytes_raw: int, shard_bytes: int) -> CodecSize:
    stored = math.ceil(bytes_raw * ratio)
    return CodecSize(codec, ratio, stored, max(1, math.ceil(stored / shard_bytes)))


def length_buckets(lengths: np.ndarray) -> list[Bucket]:
    """Rows and tokens up to each power of two, from 64 on; empty ends are left out."""
    top = max(6, math.ceil(math.log2(max(2, int(lengths.max())))))
    edges = [2**n for n in range(6, top + 1)]
    places = np.searchsorted(edges, lengths)
    rows = np.bincount(places, minlength=len(edges))
    tokens = np.bincount(places, weights=lengths.astype(np.float64), minlength=len(edges))
    buckets = [Bucket(edge, int(r), int(t)) for edge, r, t in zip(edges, rows, tokens, strict=True)]
    first = next(i for i, bucket in enumerate(buckets) if bucket.rows)
    return buckets[first:]


def _available_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
