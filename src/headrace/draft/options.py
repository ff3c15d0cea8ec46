"""Everything that can be chosen about training, apart from paths; importable where only pydantic is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section


class LossOptions(Section):
    """What the drafter is taught."""

    kind: Literal["kl", "ce", "tv", "lk", "hybrid"] = "kl"
    """kl: soft cross-entropy; ce: the target's best token only; tv: total variation; lk: -log acceptance; hybrid: kl moving to tv."""
    step_decay: float = Field(default=1.0, gt=0, le=1)
    """Weight of test-time step s is this to the power s."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the target's distribution; below 1 sharpens it towards greedy decoding."""
    everywhere: bool = False
    """Also train on tokens that the target did not write (prompts); accuracies then cover them as well."""


class OptimOptions(Section):
    """How the weights move."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of the layer and fc with adamw for everything else."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak rate of AdamW."""
    muon_rate: float = Field(default=3e-3, gt=0)
    """Peak rate of Muon; its updates are scaled to the size of AdamW's."""
    warmup: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the rate rises."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after that, reaching the floor with the last step."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Last rate as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices (norm weights never decay)."""
    beta1: float = 0.9
    """AdamW."""
    beta2: float = 0.95
    """AdamW."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of a moving average of the weights that is validated and saved in their place; 0 is off."""
