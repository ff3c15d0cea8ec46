"""Every boundary of a few rows by running the target itself: what stored taps are compared with, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.draft.data import Document
from headrace.taps import ResidualTaps
from headrace.target import Target
from headrace.types import FINAL, Capture

LARGEST_BYTES = 20 << 30  # a larger target is not loaded for a diagnosis


@dataclass(frozen=True)
class Rederived:
    """Captures, and for each all boundaries 0..N and the final state [N + 2, L, H] in float32."""

    captures: list[Capture]
    everything: list[Tensor]

    def errors(self, plane: int) -> np.ndarray:
        """Relative error of stored plane ``plane`` against each boundary 0..N."""
        out = []
        for boundary in range(len(self.everything[0]) - 1):
            differences = [
                (c.states[plane].float() - e[boundary]).norm() ** 2
                for c, e in zip(self.captures, self.everything, strict=True)
            ]
            sizes = [e[boundary].norm() ** 2 for e in self.everything]
            out.append(float((sum(differences, torch.zeros(())) / sum(sizes, torch.zeros(()))).sqrt()))
        return np.array(out)

    def documents(self, boundaries: list[int]) -> list[Document]:
        """Documents with these boundaries as taps; the final state stays the stored one."""
        documents = []
        for capture, everything in zip(self.captures, self.everything, strict=True):
            assert capture.mask is not None
            states = torch.cat([everything[boundaries].to(capture.states.dtype), capture.states[-1:]])
            documents.append(Document(capture.ids, capture.mask, states))
        return documents


@torch.no_grad()
def rederive(target: Target, captures: list[Capture]) -> Rederived | None:
    """Run ``target`` on ``captures``; None when its weights are absent, quantized or too large to load here."""
    size = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
    if not size or size > LARGEST_BYTES or target.quantization:
        return None
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(target.path), dtype=torch.float32, local_files_only=True
    )
    model.eval()
    taps = (*range(target.num_layers + 1), FINAL)
    everything = []
    for capture in captures:
        with ResidualTaps(model, target.num_layers, taps) as recorded:
            model(input_ids=torch.from_numpy(capture.ids.astype(np.int64))[None], use_cache=False)
        everything.append(torch.stack([recorded.states[tap][0].float() for tap in taps]))
    return Rederived(captures, everything)
