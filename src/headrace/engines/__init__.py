"""Inference engines that capture hidden states; found through the entry-point group ``headrace.engines``."""

from headrace.engines.base import Check, Engine, EngineInfo, EngineOptions, engine_names, open_engine

__all__ = ["Check", "Engine", "EngineInfo", "EngineOptions", "engine_names", "open_engine"]
