"""torch.compile as training uses it: one shape a function, and no advice that only torch's own developers could follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


def compile_static(function: Callable[..., Any], on: bool) -> Callable[..., Any]:
    """``function`` compiled on its first call, for static shapes; as it is unless ``on``."""
    if not on:
        return function
    # Inductor says for each kernel whose softmax it splits that it does so, and asks for an issue.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled", category=UserWarning)
    return torch.compile(function, dynamic=False)
