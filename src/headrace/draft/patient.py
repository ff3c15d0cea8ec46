"""A drafter under diagnosis: the captures to judge it on, what is measured on them once, and the form of a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headrace.draft.checkpoint import Draft
from headrace.draft.data import Document, MemoryPacks, Placing
from headrace.draft.model import Eagle3Draft
from headrace.draft.objective import Objective
from headrace.draft.rederive import Rederived, rederive
from headrace.draft.teacher import Teacher
from headrace.draft.trainer import Machine
from headrace.draft.ttt import Unroll
from headrace.draft.validate import Validation, validate
from headrace.target import Target
from headrace.types import Capture

Verdict = Literal["fault", "suspect", "ok", "unknown"]
PACK_TOKENS = 4096
TRIAL_TOKENS = 8192  # variants are tried on so many tokens: differences of faults are far above their noise


@dataclass(frozen=True)
class Finding:
    """What one check measured."""

    name: str
    verdict: Verdict
    measured: str
    """The numbers, in words."""
    mend: str = ""
    gain: float = 0.0
    """Acceptance length gained when the mend was tried here; 0 when it could not be."""
    values: dict[str, Any] = field(default_factory=dict)


class Patient:
    """A drafter, captures to judge it on, and the target's head."""

    def __init__(
        self, draft: Draft, captures: list[Capture], target: Target, machine: Machine, steps: int
    ) -> None:
        self.draft, self.captures, self.target, self.machine, self.steps = (
            draft,
            captures,
            target,
            machine,
            steps,
        )
        self.folder: Path | None = None
        """Where the drafter came from, if that holds the record of its training."""
        self.taps = draft.model.config.taps

    def documents(self, captures: list[Capture], tap_order: list[int]) -> list[Document]:
        """Documents of ``captures`` with the planes ``tap_order``."""
        return [Document(c.ids, mask_of(c), c.states[tap_order]) for c in captures]

    @cached_property
    def order(self) -> list[int]:
        """Planes of the drafter's taps and the final state in :attr:`captures`."""
        return list(range(len(self.taps) + 1))

    @cached_property
    def few(self) -> list[Capture]:
        """The first captures up to about TRIAL_TOKENS."""
        ends = np.cumsum([len(c.ids) for c in self.captures])
        return self.captures[: max(1, int(np.searchsorted(ends, TRIAL_TOKENS)))]

    @cached_property
    def final(self) -> Callable[[Tensor], Tensor] | None:
        """What the store's final states need before the head reads them, by its spec."""
        return None if self.draft.spec.final_normed else self.target.final_norm

    def judge(self, documents: list[Document], model: Eagle3Draft | None = None) -> Validation:
        """Held-out accuracies and lengths of ``model`` (the drafter itself when absent) on ``documents``."""
        model = model or self.draft.model
        placing = Placing(self.machine.device, self.machine.dtype, final_norm=self.final)
        budget = max(PACK_TOKENS, *(len(d.ids) for d in documents))
        packs = MemoryPacks(documents, placing, token_budget=budget, epochs=1)
        ids = self.draft.model.to_target(
            torch.arange(model.config.draft_vocab_size, device=model.d2t.device)
        ).cpu()
        teacher = Teacher(self.target.head, ids).to(self.machine.device, self.machine.dtype)
        objective = Objective(teacher, "kl", (1.0,) * self.steps, chunk=512)
        return validate(model, Unroll(model), objective, packs, self.steps, self.machine.autocast())

    @cached_property
    def whole(self) -> Validation:
        """The drafter as it is, on everything."""
        return self.judge(self.documents(self.captures, self.order))

    @cached_property
    def sample(self) -> Validation:
        """The drafter as it is, on the few captures that variants are tried on."""
        return self.judge(self.documents(self.few, self.order))

    @cached_property
    def rederived(self) -> Rederived | None:
        """Every boundary of a few rows by the target itself; None when it cannot be run here."""
        return rederive(self.target, self.few[:4])

    @cached_property
    def agreement(self) -> dict[str, np.ndarray]:
        """Per supervised token: whether it is the target's best one, its log-probability, whether the drafter can say it."""
        parts: dict[str, list[np.ndarray]] = {"best": [], "log_prob": [], "sayable": [], "label_sayable": []}
        for capture in self.captures:
            for name, values in self._agreement_of(capture).items():
                parts[name].append(values)
        return {name: np.concatenate(values) for name, values in parts.items()}

    def _agreement_of(self, capture: Capture) -> dict[str, np.ndarray]:
        mask = mask_of(capture)
        places = np.flatnonzero(mask[1:])  # the final state at i speaks of token i + 1
        states = capture.states[-1][torch.from_numpy(places)]
        if self.final is not None:
            states = self.final(states)
        logits = self.target.head.logits(states)
        tokens = torch.from_numpy(capture.ids[places + 1].astype(np.int64))
        best = logits.argmax(-1)
        member = self.draft.model.t2d.cpu()
        return {
            "best": (best == tokens).numpy(),
            "log_prob": logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].numpy(),
            "sayable": member[tokens].numpy(),
            "label_sayable": member[best].numpy(),
        }


def mask_of(capture: Capture) -> np.ndarray:
    assert capture.mask is not None, "a store fills the mask in"
    return capture.mask
