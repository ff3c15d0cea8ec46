"""Where states come from when training takes them straight from an engine; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.config import Section, ServerUrl, Taps


class LiveOptions(Section):
    """The engine that captures while training, as of `headrace extract`."""

    taps: Taps = "eagle3"
    """Preset (eagle3, dflash) or a list such as 2,15,27,final; must hold final."""
    dtype: str = ""
    """dtype of the states: bfloat16, float16 or float32; the target's own when empty."""
    url: list[ServerUrl] = Field(default_factory=list)
    """Server URL, for engines that are servers; may be given several times."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine: key=value,key=value."""
    workers: int = Field(default=0, ge=0)
    """Worker processes on this host that hold the engines, instead of a Ray cluster; 0 = Ray."""
    ray: str = "local"
    """Ray cluster whose workers hold the engines: its address, auto for the one this host belongs to, or local for one started here."""
    ray_workers: int = Field(default=0, ge=0)
    """Workers, each with an engine of its own; 0 = one a URL, else one for every ray_gpus GPUs, else one a host."""
    ray_gpus: int = Field(default=0, ge=0)
    """GPUs of the engine that each worker starts."""
    ray_cpus: float = Field(default=1.0, ge=0)
    """Processor cores that each worker reserves."""
    serve: dict[str, Any] = Field(default_factory=dict)
    """Options of `headrace serve` for SGLang servers that workers start themselves (no url given): key=value,key=value."""
    skip_preflight: bool = False
    """Start even when the engine's own checks fail."""
    keep: Path | None = None
    """Also keep the states in this store as they pass: a later run can train from it."""
    in_flight: int = Field(default=64, ge=1)
    """Rows asked for at a time, at most (and three packs); what the trainer does not take holds the engines back."""
