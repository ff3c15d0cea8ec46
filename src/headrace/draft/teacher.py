"""What the target would say at a stored final state: its head, with the draft vocabulary first. Logits are never stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.target import Head

if TYPE_CHECKING:
    # Shapes for readers, and for tests/test_shapes.py, which checks them; nothing is imported at run time.
    from jaxtyping import Float


@dataclass(frozen=True)
class Labels:
    """The target's word on C rows."""

    log_probs: Tensor
    """[C, V] log of its distribution on the draft vocabulary, renormalized."""
    mass: Tensor
    """[C] its probability of the draft vocabulary."""
    best: Tensor
    """int64 [C] its most likely token as a draft id; -1 where the draft vocabulary lacks it, so no draft is right there."""
    top: Tensor
    """int64 [C] its most likely token within the draft vocabulary."""


class Teacher:
    """The target's head, reordered so that the draft's part of its logits is a view.

    ``temperature`` divides the logits of ``log_probs`` only: below 1 it sharpens what the draft is taught towards the
    target's best token.
    """

    def __init__(self, head: Head, draft_ids: Tensor, *, temperature: float = 1.0) -> None:
        rest = torch.ones(head.weight.shape[0], dtype=torch.bool)
        rest[draft_ids] = False
        order = torch.cat([draft_ids, rest.nonzero()[:, 0]])
        self.size = len(draft_ids)
        self.weight = head.weight[order]
        self.bias = None if head.bias is None else head.bias[order].float()
        self.scale, self.softcap, self.temperature = head.scale, head.softcap, temperature

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Teacher:
        """Move and convert in place; returns itself."""
        self.weight = self.weight.to(device, dtype)
        self.bias = None if self.bias is None else self.bias.to(device)
        return self

    def labels(self, final: Float[Tensor, "C H"]) -> Labels:
        """Final states [C, H], after the target's final norm → what it says there."""
        return self.read(matmul32(final, self.weight))

    def read(self, logits: Float[Tensor, "C vocab"]) -> Labels:
        """The product of final states and the reordered matrix [C, vocab] → labels."""
        if self.bias is not None:
            logits = logits + self.bias
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        draft = logits[:, : self.size]
        inside = draft.logsumexp(-1)
        mass = (inside - logits.logsumexp(-1)).exp()
        log_probs = (
            draft - inside[:, None] if self.temperature == 1.0 else (draft / self.temperature).log_softmax(-1)
        )
        best = logits.argmax(-1)
        return Labels(log_probs, mass, torch.where(best < self.size, best, -1), draft.argmax(-1))


def matmul32(states: Float[Tensor, "C H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "C V"]:
    """states [C, H] x weight [V, H] → [C, V] in float32, or float64 for float64 states.

    On CUDA a bf16 weight gives bf16 inputs and a float32 result: a bf16 result would round logits near 20 by 0.06, more
    than what often separates the two likeliest tokens.
    """
    if states.dtype == torch.float64:
        return states @ weight.double().T
    if states.is_cuda and weight.dtype == torch.bfloat16:
        return torch.mm(states.to(torch.bfloat16), weight.T, out_dtype=torch.float32)
    return states.float() @ weight.float().T
