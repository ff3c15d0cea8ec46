"""The commands `train`, `diagnose` and `import-draft` as schemas; no torch, so that their help is immediate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ByteSize, ConfigDict, Field, model_validator
from pydantic_settings import CliPositionalArg

from headrace.config import Section
from headrace.draft.live_options import LiveOptions
from headrace.draft.options import LossOptions, MachineOptions, OptimOptions, TrainOptions
from headrace.draft.shape import DraftConfig, FcNorm, RopeConfig, RopeType
from headrace.remote import Place

__all__ = [
    "DiagnoseConfig",
    "DraftConfig",
    "FcNorm",
    "ImportConfig",
    "LossOptions",
    "MachineOptions",
    "OptimOptions",
    "RopeConfig",
    "RopeType",
    "ShapeOptions",
    "TrainConfig",
    "TrainOptions",
]


class ShapeOptions(Section):
    """What a new drafter looks like; anything left out follows the target."""

    taps: list[int] = Field(default_factory=list)
    """Boundaries to fuse; empty: all that the store holds."""
    vocab: int = Field(default=32000, ge=0)
    """Draft vocabulary: the most frequent supervised tokens; 0, or at least the target's size: all."""
    variant: Literal["eagle3", "eagle3.1"] = "eagle3.1"
    """eagle3.1 norms each tap and feeds the normed output back (SGLang 0.5.14, vLLM 0.32 and newer serve it); eagle3 does neither."""
    intermediate_size: int = Field(default=0, ge=0)
    """Width of the MLP."""
    num_heads: int = Field(default=0, ge=0)
    """Query heads."""
    num_kv_heads: int = Field(default=0, ge=0)
    """Key and value heads."""
    head_dim: int = Field(default=0, ge=0)
    """Width of a head."""
    fc_norm: Literal["", "none", "joint", "each"] = ""
    """Norm of the taps before they are fused; the variant's when empty."""
    norm_before_residual: bool = False
    """Start the layer's residual from the normed state (vLLM serves it, stock SGLang does not)."""
    own_embedding: bool = False
    """Train an embedding of the drafter's own instead of using the target's."""
    train_lm_head: bool = False
    """Train the drafter's head instead of keeping the target's rows."""


class TrainConfig(TrainOptions):
    """Train an EAGLE-3 drafter from a store. Can be stopped or killed at any moment; the same command goes on."""

    model_config = ConfigDict(populate_by_name=True)

    store: CliPositionalArg[Place] = ""
    """Store made by `headrace extract`: a folder or a URL. None with --from-engine."""
    rows: Place
    """The rows it was extracted from: their split says what is held out."""
    model: str
    """Target: a model folder or hub id."""
    revision: str = ""
    """Hub revision of the target."""
    out: Path
    """Drafter folder; a run that was stopped there is continued."""
    mirror: Place = ""
    """Also copy each finished checkpoint, the best drafter and the manifest to this URL; a run whose out is gone goes on from there."""
    start: Path | None = Field(default=None, alias="from")
    """Start from this drafter (ours, or after `headrace import-draft`) instead of new weights; its shape is kept."""
    from_engine: str = ""
    """Take the states straight from this engine (sglang, hf, ...) instead of a store: each pack is captured as it is needed, in every epoch anew."""
    live: LiveOptions = LiveOptions()
    """That engine."""
    shape: ShapeOptions = ShapeOptions()
    """The drafter's shape."""
    method: str = "eagle3"
    """Draft method: eagle3, or one that an installed package adds (docs/add-a-method.md); such a one has options of its own alone."""
    method_options: dict[str, Any] = Field(default_factory=dict)
    """Options of an added method."""
    cache: Path | None = None
    """Where blocks of a store at a URL are kept on disk; ~/.cache/headrace/blocks when empty."""
    cache_bytes: ByteSize = Field(default=ByteSize(32 << 30), ge=0)
    """What that cache may hold; least recently used goes first. 0 = no cache, each read travels."""
    threads: int = Field(default=2, ge=1)
    """Threads that read and decode the store, where no processes do."""
    readers: int = Field(default=-1, ge=-1)
    """Processes that do so, each a whole pack at a time, without sharing one interpreter's lock. -1 = on a GPU one for every four
    cores, four at most, and none for a store at a URL, which threads wait for well enough. No more than there are cores."""
    save_minutes: float = Field(default=5.0, gt=0)
    """Minutes between checkpoints: the most work that a kill can cost."""
    validation_tokens: int = Field(default=200_000, ge=1)
    """Validate on the first rows of the validation split up to about so many tokens."""
    validation_steps: int = Field(default=5, ge=1, le=32)
    """Draft steps in validation: K of the acceptance lengths."""
    tensorboard: bool = True
    """Write TensorBoard curves when it is installed."""
    wandb: str = ""
    """Also log to this Weights & Biases project; off when empty. The key comes from WANDB_API_KEY or `wandb login`, never from here."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.store) == bool(self.from_engine):
            raise ValueError("give either a store, or from_engine with the name of an engine")
        return self


class DiagnoseConfig(Section):
    """Find out why a drafter's acceptance is low: measures each known cause on the drafter and the store, and ranks them."""

    draft: CliPositionalArg[Path]
    """Drafter folder."""
    store: CliPositionalArg[Place]
    """Store to measure on: a folder or a URL."""
    rows: Place | None = None
    """The store's rows; with them only held-out rows are used."""
    model: str = ""
    """The target, if it is no longer where the drafter's spec says."""
    tokens: int = Field(default=50_000, ge=100)
    """Measure on about so many tokens."""
    steps: int = Field(default=5, ge=1, le=32)
    """Draft steps: K of the acceptance lengths."""
    machine: MachineOptions = MachineOptions()
    """The device."""


class ImportConfig(Section):
    """Convert a drafter of SGLang, vLLM or SpecForge into a Headrace drafter folder."""

    draft: CliPositionalArg[Path]
    """Folder with config.json and weights (.safetensors)."""
    model: str
    """The target it drafts for: a model folder or hub id."""
    revision: str = ""
    """Hub revision of the target."""
    out: Path
    """Drafter folder to write."""
    taps: list[int] = Field(default_factory=list)
    """Boundaries it reads, when its config does not say or you know better."""
    tap_convention: Literal["auto", "sglang", "vllm"] = "auto"
    """What its layer ids mean: sglang, the output of layer k (boundary k + 1) for most targets; vllm, the input of layer k (boundary k); auto: by its format."""

    @model_validator(mode="after")
    def _taps(self) -> Self:
        if self.taps and self.tap_convention != "auto":
            raise ValueError("taps are boundaries already; give either taps or tap_convention")
        return self
