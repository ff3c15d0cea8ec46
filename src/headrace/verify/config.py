"""What ``headrace verify`` and ``headrace compare`` can be told. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from headrace.config import Section
from headrace.remote import Place


class VerifyConfig(Section):
    """Prove a store: every checksum and count, ids against the rows, a random sample re-extracted, and its meaning."""

    store: CliPositionalArg[Place]
    """The store to prove: a folder, or a URL such as s3://bucket/run."""
    rows: Place | None = None
    """The rows it was extracted from; without them ids are only checked against each capture's own key."""
    model: str
    """Target model: a folder or a hub id."""
    revision: str = ""
    """Hub revision of the target."""
    out: Path | None = None
    """Where the journal and report go; STORE.verify when not given (of a URL, its last part, here). A second run goes on from there."""
    engine: str = "hf"
    """Reference engine the sample is re-extracted with."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reference engine."""
    seed: int = 0
    """Seed of the sample."""
    confidence: float = Field(0.99, gt=0, lt=1)
    """How sure to be that a fault in at least ``fault_share`` of the captures is seen; with it sets the sample's size."""
    fault_share: float = Field(0.01, gt=0, le=1)
    """The smallest share of faulty captures that the sample is sized to find."""
    missing_share: float = Field(0.0, ge=0, le=1)
    """The largest share of rows without a capture that is accepted."""
    budget_tokens: int = Field(0, ge=0)
    """Most tokens to re-extract in this run; 0 = no limit. A later run goes on."""
    budget_minutes: float = Field(0.0, ge=0)
    """Longest time for this run; 0 = no limit. A later run goes on."""
    scan: bool = True
    """Read every state once for rows that are zero, non-finite, repeated or wrongly normed; suspects are re-extracted first."""
    noise_captures: int = Field(16, ge=1)
    """How many captures of the sample are re-extracted one by one too, to measure the noise of the dtype."""
    tolerance: float = Field(0.0, ge=0)
    """Largest median relative error of a capture; 0 = derived from the dtype and the measured noise."""


class CompareConfig(Section):
    """Error a tap between two stores of the same rows, made by two engines or settings."""

    store_a: CliPositionalArg[Place]
    """The first store: a folder or URL."""
    store_b: CliPositionalArg[Place]
    """The second store: errors are relative to its states."""
    model: str = ""
    """Target model; needed only when one store's final state is normed and the other's is not."""
    out: Path | None = None
    """Folder for report.json and the plot; nothing is written when not given."""
    max_captures: int = Field(0, ge=0)
    """Most captures to compare, a seeded sample; 0 = all that both stores hold."""
    seed: int = 0
    """Seed of that sample."""
    worst: int = Field(10, ge=0)
    """How many of the worst captures to list."""
    tolerance: float = Field(0.0, ge=0)
    """Fail (exit code 1) when a tap's median relative error exceeds this; 0 = only report."""
