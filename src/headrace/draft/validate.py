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
from headrace.draft.workers import Workers


@dataclass
class Simulated:
    """Counts of replayed rounds."""

    steps: int
    rounds: int = 0
    at_least: np.ndarray = field(init=False)
    """int64 [K]: rounds that accepted at least 1, 2, ... K drafted tokens."""

    def __post_init__(self) -> None:
        self.at_least = np.zeros(self.steps, dtype=np.int64)

    def add(self, accepted: np.ndarray) -> None:
        """Count rounds by how many drafted tokens each accepted."""
        self.rounds += len(accepted)
        self.at_least += (accepted[:, None] > np.arange(self.steps)).sum(0)

    @property
    def length(self) -> float:
        """Mean tokens a round gives, the target's own included."""
        return 1.0 + float(self.at_least.sum()) / self.rounds if self.rounds else 0.0


ON_POLICY = 0.6
"""Below this share of tokens that are the target's best, a text was hardly written by it (even sampling at 1 gives more)."""


@dataclass(frozen=True)
class Validation:
    """Of one drafter on one set of packs."""

    accuracy: Accuracy
    simulated: Simulated
    agreement: tuple[int, int] = (0, 0)
    """Labels whose text is the target's best token, of all whose best token the draft vocabulary has."""

    @property
    def on_policy(self) -> bool:
        """Whether the target can have written these rows; numbers on others are not to be compared with those on its own."""
        return self.agreement[0] >= ON_POLICY * self.agreement[1]

    def summary(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            **self.accuracy.summary(),
            "simulated_length": self.simulated.length,
            "simulated_rounds": self.simulated.rounds,
            "text_agreement": self.agreement[0] / self.agreement[1] if self.agreement[1] else 0.0,
            "on_policy": self.on_policy,
        }


def pool(found: Validation, workers: Workers) -> Validation:
    """What all workers counted on their shares of the packs, added once; the same on each of them."""
    accuracy, simulated = found.accuracy, found.simulated
    device = workers.device
    counts = torch.from_numpy(accuracy.counts).to(device)
    sums = torch.from_numpy(accuracy.loss_sums).to(device)
    others = np.array([*found.agreement, simulated.rounds, *simulated.at_least], dtype=np.int64)
    rest = torch.from_numpy(others).to(device)
    workers.sum_(counts, sums, rest)
    agreed, known, rounds, *at_least = rest.tolist()
    pooled = Simulated(simulated.steps, rounds)
    pooled.at_least = np.array(at_least, dtype=np.int64)
    return Validation(Accuracy(counts.cpu().numpy(), sums.cpu().numpy()), pooled, (agreed, known))


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
    accuracy, simulated, agreed, known = Accuracy.zero(steps), Simulated(steps), 0, 0
    for pack in packs:
        with autocast:
            states = unroll(pack, steps)
            drafted = draft_freely(model, unroll, pack, steps)
        head = model.lm_head.weight.to(states.dtype)
        outcome = objective(states, head, pack.labels_final(), pack.layout.room)
        accuracy = accuracy + Accuracy(outcome.counts.cpu().numpy(), outcome.sums.double().cpu().numpy())
        simulated.add(replay(drafted, pack))
        right, of = text_agreement(model, objective, pack)
        agreed, known = agreed + right, known + of
    return Validation(accuracy, simulated, (agreed, known))


def text_agreement(model: Eagle3Draft, objective: Objective, pack: Pack) -> tuple[int, int]:
    """Of the labels of step 0 whose best token the draft vocabulary has: those where the text is that token, and all."""
    layout, final = pack.layout, pack.labels_final()
    texts = pack.ids[(layout.starts + 2).clamp(max=layout.tokens - 1)]
    agreed, known = 0, 0
    for begin in range(0, len(texts), objective.chunk):
        part = slice(begin, begin + objective.chunk)
        best = objective.teacher.labels(final[part]).best
        used = (best >= 0) & (layout.room[part] > 0)
        agreed += int(((model.to_target(best.clamp(min=0)) == texts[part]) & used).sum())
        known += int(used.sum())
    return agreed, known


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
