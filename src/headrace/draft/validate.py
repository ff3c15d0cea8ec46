"""How good a drafter is on held-out rows: pooled accuracies under teacher forcing, and acceptance with its own tokens.

*Implied* length compares the draft with the target's best token at every start, whatever the row sampled. *Simulated*
length replays each row as serving would have written it: from a start the drafter proposes K tokens of its own choosing,
those that equal the row's text are accepted, the target adds the next one, and the walk goes on from there. On rows the
target wrote greedily the two views agree with greedy serving; on sampled rows simulation is the lower of the two, since a
draft that names the likelier token is wrong wherever the sample was another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.draft.metrics import Accuracy
from headrace.draft.model import Eagle3Draft
from headrace.draft.objective import Objective
from headrace.draft.teacher import matmul32
from headrace.draft.ttt import Pack, Unroll


@dataclass
class Simulated:
    """Counts of replayed rounds."""

    steps: int
    rounds: int = 0
    at_least: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Rounds that accepted at least 1, 2, ... K drafted tokens."""

    def add(self, accepted: np.ndarray) -> None:
        """Count rounds by how many drafted tokens each accepted."""
        if not len(self.at_least):
            self.at_least = np.zeros(self.steps, dtype=np.int64)
        self.rounds += len(accepted)
        self.at_least += (accepted[:, None] > np.arange(self.steps)).sum(0)

    @property
    def length(self) -> float:
        """Mean tokens a round gives, the target's own included."""
        return 1.0 + float(self.at_least.sum()) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Validation:
    """Of one drafter on one set of packs."""

    accuracy: Accuracy
    simulated: Simulated

    def summary(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **self.accuracy.summary(),
            "simulated_length": self.simulated.length,
            "simulated_rounds": self.simulated.rounds,
        }


@torch.no_grad()
def validate(
    model: Eagle3Draft,
    unroll: Unroll,
    objective: Objective,
    packs: Iterable[Pack],
    steps: int,
    autocast: torch.autocast,
) -> Validation:
    """Run ``packs`` through ``model`` (in eval mode, with the weights to be judged) twice: forced and free."""
    accuracy, simulated = Accuracy.zero(steps), Simulated(steps)
    for pack in packs:
        with autocast:
            states = unroll(pack, steps)
            drafted = draft_freely(model, unroll, pack, steps)
        head = model.lm_head.weight.to(states.dtype)
        outcome = objective(states, head, pack.labels_final(), pack.layout.room)
        accuracy = accuracy + Accuracy(outcome.counts.cpu().numpy(), outcome.sums.double().cpu().numpy())
        simulated.add(replay(drafted, pack))
    return Validation(accuracy, simulated)


def draft_freely(model: Eagle3Draft, unroll: Unroll, pack: Pack, steps: int) -> Tensor:
    """Target ids [S, M] that greedy chains of ``steps`` propose from every start, each step reading the one before."""
    proposed: list[Tensor] = []

    def choose(normed: Tensor) -> Tensor:
        tokens = model.to_target(matmul32(normed, model.lm_head.weight).argmax(-1))
        proposed.append(tokens)
        return tokens

    states = unroll(pack, steps, choose)
    choose(states[-1])
    return torch.stack(proposed)


def replay(drafted: Tensor, pack: Pack) -> np.ndarray:
    """Accepted tokens of every round of walking the rows of ``pack`` with chains ``drafted`` [S, M]."""
    layout, steps = pack.layout, drafted.shape[0]
    last = layout.tokens - 1
    texts = torch.stack([pack.ids[(layout.starts + 2 + s).clamp(max=last)] for s in range(steps)])
    inside = torch.stack([layout.room > s for s in range(steps)])
    accepted = ((drafted == texts) & inside).long().cumprod(0).sum(0).cpu().numpy()
    room = layout.room.cpu().numpy()
    rounds, m = [], 0
    while m < len(room) and room[m] > 0:
        rounds.append(accepted[m])
        # The accepted tokens and the target's own move the start on; past the end of a span the next span begins.
        m += min(int(accepted[m]) + 1, int(room[m]))
    return np.array(rounds, dtype=np.int64)
