"""What an extraction and its plan can be told: the schema behind ``headrace extract``, ``headrace plan`` and their TOML sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import CliPositionalArg

from headrace.config import Section
from headrace.remote import Place

GIB = 1 << 30


def _join_taps(value: Any) -> Any:
    """TOML may spell taps as a list, ``[3, 31, 59, "final"]``; inside it is the command line's ``"3,31,59,final"``."""
    return ",".join(str(tap) for tap in value) if isinstance(value, list) else value


Taps = Annotated[str, BeforeValidator(_join_taps)]


class ExtractConfig(Section):
    """Rows → store, through an inference engine. Can be stopped or killed at any moment; the same command goes on."""

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
    url: list[str] = Field(default_factory=list)
    """Server URL, for engines that are servers; may be given several times."""
    device: str = ""
    """Device, for engines that run here."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine: key=value,key=value."""
    skip_preflight: bool = False
    """Start even when the engine's own checks fail."""
    allow_other_settings: bool = False
    """Continue a store although engine settings (not its name or version) differ from those it was begun with."""

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
    def place(self) -> str:
        """Where the store is: a path or a URL."""
        return self.store or str(self.out)


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
