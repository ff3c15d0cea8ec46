"""Accuracies and acceptance lengths from pooled counts, so that 1 and k workers report the same and nothing exceeds 1.

Convention for every acceptance length here: greedy, a chain (no tree), the token the target adds included. With
conditional accuracies a_1, a_2, ... it is 1 + a_1 + a_1 a_2 + ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from headrace.draft.objective import COUNTERS
from headrace.errors import TrainingError


def implied_length(conditional: list[float]) -> float:
    """1 + sum of running products of *conditional* accuracies (not joint ones)."""
    length, product = 1.0, 1.0
    for value in conditional:
        product *= value
        length += product
    return length


@dataclass(frozen=True)
class Accuracy:
    """Pooled counts over any number of packs and workers; add them up, then read the ratios."""

    counts: np.ndarray
    """int64 [6, S], rows as COUNTERS."""
    loss_sums: np.ndarray
    """float64 [S]"""

    @classmethod
    def zero(cls, steps: int) -> Self:
        """Nothing counted yet."""
        return cls(np.zeros((len(COUNTERS), steps), dtype=np.int64), np.zeros(steps))

    def __add__(self, other: Accuracy) -> Accuracy:
        return Accuracy(self.counts + other.counts, self.loss_sums + other.loss_sums)

    def _ratio(self, above: str, below: str) -> list[float]:
        top, bottom = self.counts[COUNTERS.index(above)], self.counts[COUNTERS.index(below)]
        if (top > bottom).any():
            raise TrainingError(
                f"counted more {above} ({top.tolist()}) than {below} ({bottom.tolist()}): counts were added twice"
            )
        return [float(a / b) if b else 0.0 for a, b in zip(top, bottom, strict=True)]

    @property
    def conditional(self) -> list[float]:
        """A step: right, given that all earlier steps were; a label outside the draft vocabulary is a miss."""
        return self._ratio("accepted", "reached")

    @property
    def conditional_in_vocab(self) -> list[float]:
        """The same over labels inside the draft vocabulary only: what the draft could have known."""
        return self._ratio("accepted", "reached_covered")

    @property
    def marginal(self) -> list[float]:
        """A step: right, whatever the earlier ones were."""
        return self._ratio("hit", "counted")

    @property
    def coverage(self) -> float:
        """Share of step-0 labels that the draft vocabulary has."""
        return self._ratio("covered", "counted")[0]

    @property
    def losses(self) -> list[float]:
        """A step: mean loss over covered labels."""
        covered = self.counts[COUNTERS.index("covered")]
        return [float(s / n) if n else 0.0 for s, n in zip(self.loss_sums, covered, strict=True)]

    @property
    def length(self) -> float:
        """Acceptance length implied by :attr:`conditional`."""
        return implied_length(self.conditional)

    def summary(self) -> dict[str, Any]:
        """JSON-able, all of the above."""
        return {
            "loss": self.losses,
            "accuracy": self.conditional,
            "accuracy_in_vocab": self.conditional_in_vocab,
            "accuracy_marginal": self.marginal,
            "coverage": self.coverage,
            "implied_length": self.length,
            "labels": int(self.counts[0, 0]),
        }
