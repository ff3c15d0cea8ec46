"""Everything that can be chosen about training, apart from paths; importable where only pydantic is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section


class LossOptions(Section):
    """What the drafter is taught."""

    kind: Literal["kl", "ce", "tv", "lk", "hybrid"] = "kl"
    """kl: soft cross-entropy; ce: the target's best token only; tv: total variation; lk: -log acceptance; hybrid: kl moving to tv."""
    step_decay: float = Field(default=0.6, gt=0, le=1)
    """Weight of test-time step s is this to the power s."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the target's distribution; below 1 sharpens it towards greedy decoding."""
    everywhere: bool = False
    """Also train on tokens that the target did not write (prompts)."""
    chunk: int = Field(default=1024, ge=1)
    """Labels whose logits exist at a time: bounds memory at chunk x vocabulary x (steps + 1) floats."""


class OptimOptions(Section):
    """How the weights move."""

    kind: Literal["adamw", "muon"] = "muon"
    """muon for the matrices of the layer and fc with adamw for everything else, or adamw for all."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak rate of AdamW, also for what Muon leaves to it."""
    muon_rate: float = Field(default=3e-3, gt=0)
    """Peak rate of Muon; its updates are scaled to the size of AdamW's."""
    warmup: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps over which the rate rises."""
    decay: Literal["cosine", "linear", "constant"] = "linear"
    """How the rate falls after that, reaching the floor with the last step."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Last rate as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of matrices (norm weights never decay)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second moment."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay of a moving average of the weights that is validated and saved in their place; 0 is off."""


class MachineOptions(Section):
    """What the work runs on; changes speed and rounding, never the meaning."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes CUDA where there is one."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16: matrix products in bf16, weights and optimizer in float32. auto: bfloat16 on CUDA, float32 on a CPU."""
    attention: Literal["auto", "eager", "flex"] = "auto"
    """flex: flex_attention (CUDA); eager: exact in plain torch (anywhere). auto: by device."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on CUDA."""
    graphs: Literal["auto", "off"] = "auto"
    """auto: replay each pack's work as one CUDA graph where code is compiled; off: queue its kernels one by one."""
    parallel: Literal["replicate", "shard"] = "replicate"
    """With several workers: replicate the drafter on each (DDP), or shard its weights, gradients and optimizer over them (FSDP2)."""


class TrainOptions(Section):
    """The course of a training run."""

    ttt_steps: int = Field(default=7, ge=1, le=32)
    """Draft steps each chain is unrolled over (test-time training)."""
    tokens_per_pack: int = Field(default=4096, ge=1)
    """Tokens of one pack; no row may be longer."""
    packs_per_step: int = Field(default=1, ge=1)
    """Packs whose gradients are averaged for one update, over all workers."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the training rows; the learning rate ends with the last."""
    max_steps: int = Field(default=0, ge=0)
    """Updates to make; 0: as many as ``epochs`` takes."""
    log_every: int = Field(default=20, ge=1)
    """Updates between lines of metrics."""
    validate_every: int = Field(default=0, ge=0)
    """Updates between validations; 0: once an epoch. There is always one at the end."""
    seed: int = 0
    """Seed of the first weights and of the order of the data."""
    init: Literal["target", "random"] = "target"
    """target: start the layer from the target's last one; random: start it at random."""
    loss: LossOptions = LossOptions()
    """The loss."""
    optim: OptimOptions = OptimOptions()
    """The optimizer."""
    machine: MachineOptions = MachineOptions()
    """The device."""
