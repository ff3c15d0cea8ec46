"""What the store's commands can be told. No torch here: ``--help`` must be immediate."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import CliPositionalArg

from headrace.config import Section, Taps
from headrace.remote import Place

Layout = Literal["four-pt", "specforge", "speculators", "modelopt"]


class CheckConfig(Section):
    """Every checksum of a store."""

    store: CliPositionalArg[Place]
    """Store folder, or a URL such as s3://bucket/run."""
    quick: bool = False
    """Structure, keys and a sample of the states only."""
    sample: ByteSize = Field(default=ByteSize(256 << 20), gt=0)
    """States to look at with --quick."""
    threads: int = Field(default=0, ge=0)
    """Reading threads; 0 = one a core, at most 8."""


class RepairConfig(Section):
    """Drop what is broken, so that the next extract brings back exactly that; rebuild a lost index or dataset.json."""

    store: CliPositionalArg[Place]
    """Store folder, or a URL such as s3://bucket/run."""
    delete: bool = False
    """Delete broken files; otherwise they are kept under broken/ in the store."""
    threads: int = Field(default=0, ge=0)
    """Reading threads; 0 = one a core, at most 8."""


class InfoConfig(Section):
    """What a store holds."""

    store: CliPositionalArg[Place]
    """Store folder, or a URL such as s3://bucket/run."""


class ConvertConfig(Section):
    """Rewrite a store with another codec or other taps. Can be stopped at any moment; the same command goes on."""

    store: CliPositionalArg[Place]
    """Store folder or URL to read."""
    out: Place
    """Store folder or URL to write."""
    codec: str = ""
    """raw, bf16-planes or fp8; as it is when empty."""
    taps: Taps = ""
    """Taps to keep, such as 2,15,27,final; from several passes they are joined. As it is when empty."""
    final_positions: Literal["", "all", "supervised"] = ""
    """supervised: keep the final state only where the next token is supervised. As it is when empty."""
    allow_lossy: bool = False
    """Let states that have been through fp8 into a store of a lossless codec."""
    shard_bytes: ByteSize = Field(default=ByteSize(1 << 30), gt=0)
    """Size of a shard file, about."""
    threads: int = Field(default=0, ge=0)
    """Encoding threads; 0 = one a core, at most 8."""


class ImportConfig(Section):
    """Read states of other tools into a store.

    What their files do not say has to be said here: which boundaries they hold, and whether the last state is normed.
    """

    source: CliPositionalArg[Path]
    """Folder the other tool wrote."""
    layout: Layout
    """four-pt (three aux and one final .pt a sample), specforge (.ckpt), speculators (hs_*.safetensors), modelopt (.pt)."""
    model: str
    """Target the states came from: a model folder or hub id."""
    out: Path
    """Store folder to write."""
    layers: Taps = ""
    """Layer numbers of the aux states in the order they are stored, such as 1,14,26. Required."""
    layers_are: Literal["", "boundaries", "outputs"] = ""
    """What those numbers mean: boundaries (k = after k layers; Hugging Face, vLLM, speculators) or outputs (k = output of the
    0-based layer k, which is boundary k+1; SpecForge, SGLang). Required."""
    final: Literal["", "normed", "unnormed"] = ""
    """Whether the last state was stored after the model's final norm. Required unless the files say it."""
    rows: Path | None = None
    """Row folder that has the loss masks (and, for four-pt, the ids); needed where the files have none."""
    mask: Literal["files", "rows", "all"] = "files"
    """Where loss masks come from: the files, --rows, or every token supervised."""
    names: Literal["keys", "numbers"] = "keys"
    """four-pt without input_ids.pt: sample names are row keys, or numbers of rows in the order of --rows."""
    aux_pattern: str = "{sample}/aux_{i}.pt"
    """four-pt: where aux state i (0, 1, 2) of a sample lies."""
    final_pattern: str = "{sample}/final.pt"
    """four-pt: where the final state of a sample lies."""
    ids_pattern: str = "{sample}/input_ids.pt"
    """four-pt: where the token ids of a sample lie, if they do."""
    codec: str = ""
    """raw, bf16-planes or fp8; the lossless one that fits when empty."""
    shard_bytes: ByteSize = Field(default=ByteSize(1 << 30), gt=0)
    """Size of a shard file, about."""


class ExportConfig(Section):
    """Write a store in another tool's format. Can be stopped at any moment; the same command goes on."""

    store: CliPositionalArg[Place]
    """Store folder or URL to read."""
    layout: Layout
    """four-pt (three aux and one final .pt a sample), specforge (.ckpt), speculators (hs_*.safetensors), modelopt (.pt)."""
    out: Path
    """Folder to write."""
    layers: Taps = ""
    """Boundaries that become the aux states, in order, such as 2,15,27; all but the final state when empty."""
    model: str = ""
    """Target, needed only when a state stored before the final norm must be written after it."""
    limit: int = Field(default=0, ge=0)
    """Write at most so many samples; 0 = all."""
