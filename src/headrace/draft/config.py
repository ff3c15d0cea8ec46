"""The commands `train`, `diagnose` and `import-draft` as schemas; no torch, so that their help is immediate."""

from __future__ import annotations

from headrace.draft.shape import DraftConfig, FcNorm, RopeConfig, RopeType

__all__ = ["DraftConfig", "FcNorm", "RopeConfig", "RopeType"]
