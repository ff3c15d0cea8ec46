"""Lets the index's CUDA-built torchvision be imported beside a CPU torch.

SGLang imports torchvision when it starts. Its compiled part does not load without CUDA, and its Python part then fails to
register fakes for two operators that do not exist; they are declared (never implemented) just before it is imported.
Imported through a ``.pth`` file, because SGLang spawns its processes: so this module must stay cheap and never import torch
by itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class TorchvisionOps(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is first asked for."""

    def __init__(self) -> None:
        self._library: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called for every import; acts on ``torchvision`` alone and leaves finding it to the others."""
        if name == "torchvision" and self._library is None:
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                library: Any = torch.library.Library
                self._library = library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self._library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
        return None


if not any(isinstance(finder, TorchvisionOps) for finder in sys.meta_path):
    sys.meta_path.insert(0, TorchvisionOps())
