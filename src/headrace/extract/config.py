"""What an extraction and its plan can be told: the schema behind ``headrace extract``, ``headrace plan`` and their TOML sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ByteSize, Field
from pydantic_settings import CliPositionalArg

from headrace.config import Section, ServerUrl, Taps
from headrace.remote import Place

GIB = 1 << 30


class ExtractConfig(Section):
    """Rows → store, through an inference engine. Can be stopped or killed at any moment; the same command goes on."""

    BARE: ClassVar[dict[str, str]] = {"ray": "auto"}

    # --- what goes in and out ---------------------------------------------------------------------------------
    rows: CliPositionalArg[Place]
    """Row folder made by `headrace prepare`, or the URL of its mirror."""
    model: str
    """Target: a model folder or hub id."""
    revision: str = ""
    """Hub revision of the target."""
    out: Path
    """Store folder; an existing one is continued."""
    store: Place = ""
    """Where the shards go when not into out: a URL such as s3://bucket/run, or another folder. out keeps the run's records."""
    taps: Taps = "eagle3"
    """Preset (eagle3, dflash, last) or a list such as 2,15,27,final."""
    dtype: str = ""
    """dtype of the stored states: bfloat16, float16 or float32; the target's own when empty."""
    final_normed: bool = True
    """Store the final state after the final norm (what lm_head reads)."""
    codec: str = ""
    """How states are stored: raw, bf16-planes (lossless, for 16-bit states) or fp8 (lossy). When empty: that of the store if there is
    one, else bf16-planes for 16-bit states and raw for float32."""
    final_positions: Literal["all", "supervised"] = "all"
    """Keep the final state everywhere, or only where the next token is supervised (all that a loss needs)."""
    shard_bytes: ByteSize = Field(default=ByteSize(GIB), gt=0)
    """Size of a shard file, about."""
    seal_minutes: float = Field(default=10.0, gt=0)
    """A shard is sealed at the latest after so long: the most work that a kill can cost."""

    # --- which rows ----------------------------------------------------------------------------------------------
    split: str = ""
    """One split of the rows (train or validation); all when empty."""
    limit: int = Field(default=0, ge=0)
    """Extract at most so many rows; 0 = all."""
    only: list[str] = Field(default_factory=list)
    """Keys (or unique beginnings of keys) of the only rows to extract."""
    seed: int = 0
    """Seed of the order in which rows are sent."""
    window: int = Field(default=0, ge=0)
    """Rows shuffled together and then sent longest first; 0 = chosen by the size of the data."""

    # --- the engine ----------------------------------------------------------------------------------------------
    engine: str = "hf"
    """Inference engine: hf, sglang, vllm, fake or an installed plug-in."""
    url: list[ServerUrl] = Field(default_factory=list)
    """Server URL, for engines that are servers; may be given several times."""
    device: str = ""
    """Device, for engines that run here."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine: key=value,key=value."""
    skip_preflight: bool = False
    """Start even when the engine's own checks fail."""
    allow_other_settings: bool = False
    """Continue a store although engine settings (not its name or version) differ from those it was begun with."""

    # --- many workers, here or on many hosts --------------------------------------------------------------------
    workers: int = Field(default=0, ge=0)
    """Worker processes on this host, each with a connection to the engine and a writer of its own: for engines faster than one
    process can check, compress and write. Engines that run here have one GPU a worker (or ray_gpus). 0 or 1 = all in this process."""
    ray: str = ""
    """Run on a Ray cluster: its address, auto for the one that this host belongs to (also --ray alone), or local for one
    started here. Empty: on this host alone."""
    ray_workers: int = Field(default=0, ge=0)
    """Workers on the cluster, each with an engine of its own; 0 = one a URL, else one for every ray_gpus GPUs, else one a host,
    hosts that join later included."""
    ray_gpus: int = Field(default=0, ge=0)
    """GPUs of the engine that each worker starts, on Ray or on this host."""
    ray_cpus: float = Field(default=1.0, ge=0)
    """Processor cores that each worker reserves."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """Options of `headrace serve` for SGLang servers that workers start themselves (no url given): key=value,key=value."""
    lease_minutes: float = Field(default=5.0, gt=0)
    """A row that a worker has had for so long without an answer is given to another one as well; a worker silent for so long is
    given up."""

    # --- limits --------------------------------------------------------------------------------------------------
    tokens_in_flight: int = Field(default=0, ge=0)
    """Tokens between admission and disk, at most; 0 = what the engine asks for and the writer needs on top."""
    tries: int = Field(default=3, ge=1)
    """Tries a row gets before it is set aside."""
    retry_failed: bool = False
    """Also try rows that an earlier run set aside for good."""
    max_failures_in_a_row: int = Field(default=50, ge=1)
    """Stop the run after so many failures with no success between."""
    max_failed_share: float = Field(default=0.05, gt=0, le=1)
    """Stop the run when more than this share of at least 200 answers failed."""
    engine_wait_minutes: float = Field(default=10.0, ge=0)
    """How long to wait for a dead engine to come back before the run stops."""
    stall_minutes: float = Field(default=60.0, gt=0)
    """An engine that has rows and answers none of them for so long counts as dead."""
    min_free: ByteSize = Field(default=ByteSize(GIB), ge=0)
    """Disk space to leave free: admission pauses below it (plus what is on its way to disk)."""
    pause_minutes: float = Field(default=60.0, ge=0)
    """How long to wait for disk space before the run stops."""

    @property
    def distributed(self) -> bool:
        """Whether workers in other processes do the work."""
        return bool(self.ray) or self.workers > 1

    @property
    def place(self) -> str:
        """Where the store is: a path or a URL."""
        return self.store or str(self.out)


class Machine(Section):
    """One host of a cluster and what it is connected to. Each default says where it comes from; measure yours and give it."""

    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs of a host."""
    gpus_per_engine: int = Field(default=8, ge=1)
    """GPUs that one engine spans."""
    prefill: float = Field(default=7836.0, gt=0)
    """Tokens a second that one engine prefills without capture (Kimi-K2.5 on 8 GPUs: three times the 2,612 of the one-at-a-time extraction
    that took a third of it)."""
    capture_ratio: float = Field(default=0.985, gt=0, le=1)
    """Share of plain prefill left while capturing (SGLang 0.5.23 on one H200, 8B shape, to the last file in memory)."""
    ray_efficiency: float = Field(default=0.95, gt=0, le=1)
    """Share of the workers' sum that several reach together (the target of bench/scale_out.py)."""
    pcie_gb: float = Field(default=55.0, gt=0)
    """GB/s from one GPU to pinned memory (copy engine of one H200); one GPU of an engine copies."""
    staging_gb: float = Field(default=9.6, gt=0)
    """GB/s into /dev/shm for one server (2.4 a thread on the H200 host, four writer threads)."""
    encoders: int = Field(default=2, ge=1)
    """Cores that encode for each worker."""
    encoder_gb: float = Field(default=1.5, gt=0)
    """GB/s of raw states that one core checks and compresses (bf16-planes on SmolLM2's states, one core)."""
    destination: Literal["bucket", "disk"] = "bucket"
    """Where shards go: an object store, or the disk of each host."""
    disk_gb: float = Field(default=1.0, gt=0)
    """GB/s that a host's disk writes and syncs (the H200 host)."""
    network_gb: float = Field(default=3.1, gt=0)
    """GB/s out of a host (assumed: 25 Gbit/s)."""
    bucket_host_gb: float = Field(default=1.5, gt=0)
    """GB/s that one host's multipart uploads reach (assumed: some 20 parts at a time of 80 MB/s)."""
    bucket_gb: float = Field(default=100.0, gt=0)
    """GB/s that the bucket takes from all hosts (assumed; providers raise it on request)."""
    part_mb: float = Field(default=8.0, gt=0)
    """MB of a part of a multipart upload (assumed)."""
    gpu_hour: float = Field(default=2.5, ge=0)
    """Price of a GPU for an hour (assumed, in dollars)."""
    storage_month: float = Field(default=0.023, ge=0)
    """Price of a GB in the bucket for a month (assumed: S3 Standard's list price, dollars)."""
    thousand_puts: float = Field(default=0.005, ge=0)
    """Price of a thousand upload requests (assumed: S3 Standard's list price, dollars)."""
    seal_minutes: float = Field(default=10.0, gt=0)
    """A shard is sealed at the latest after so long (the default of `headrace extract`)."""


class PlanConfig(Section):
    """What an extraction will take, before it starts: bytes, shards, memory, hours, and whether it fits (exit code 3 if not)."""

    # --- the data: a row folder, or its summary ----------------------------------------------------------------------
    rows: CliPositionalArg[Path | None] = None
    """Row folder made by `headrace prepare`; as long as there is none, num_rows and num_tokens describe it."""
    num_rows: int = Field(default=0, ge=0)
    """Rows, when there is no row folder yet."""
    num_tokens: int = Field(default=0, ge=0)
    """Tokens of all rows, when there is no row folder yet."""
    max_tokens: int = Field(default=0, ge=0)
    """Tokens of the longest row, when there is no row folder yet."""

    # --- the states ----------------------------------------------------------------------------------------------------
    model: str = ""
    """Target: a folder with a config.json or a hub id; without one, give num_layers and hidden_size."""
    revision: str = ""
    """Hub revision of the target."""
    num_layers: int = Field(default=0, ge=0)
    """Layers of the target, when its config is not at hand."""
    hidden_size: int = Field(default=0, ge=0)
    """Hidden size of the target, when its config is not at hand."""
    taps: Taps = "eagle3"
    """Preset (eagle3, dflash, last) or a list such as 2,15,27,final."""
    dtype: str = ""
    """dtype of the stored states; the target's own (bfloat16 when not known) when empty."""

    # --- how -------------------------------------------------------------------------------------------------------------
    out: Path = Path()
    """Where the store will be."""
    codec: str = ""
    """Codec that the verdict is about; what an extraction would use when empty."""
    shard_bytes: ByteSize = Field(default=ByteSize(GIB), gt=0)
    """Size of a shard file, about."""
    min_free: ByteSize = Field(default=ByteSize(GIB), ge=0)
    """Disk space to leave free."""
    engine: str = "hf"
    """Inference engine."""
    tokens_in_flight: int = Field(default=65536, ge=1)
    """Tokens that the engine keeps in flight."""
    staging: Path = Path("/dev/shm")
    """Folder through which a server hands over captures; counts only for engines that are servers."""
    rate: float = Field(default=0.0, ge=0)
    """Tokens a second to expect; 0 = as measured."""
    measured: Path | None = None
    """A store already extracted on this machine: its rate and its codec's ratio are used."""
    workers: int = Field(default=0, ge=0)
    """Worker processes on this host, as `headrace extract` has them; 0 = as many as the rate needs."""

    # --- many hosts ------------------------------------------------------------------------------------------------------
    nodes: int = Field(default=0, ge=0)
    """Work it out for so many hosts, with what machine says of them; 0 = for this machine."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of a host; 0 = machine.gpus_per_node."""
    ratio: float = Field(default=0.0, ge=0, le=1)
    """Stored bytes a raw byte; 0 = the codec's usual one, or as measured."""
    machine: Machine = Machine()
    """Bandwidths and prices of the hosts."""
