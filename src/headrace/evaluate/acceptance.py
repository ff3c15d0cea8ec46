"""Acceptance in numbers: pooled counts, so that sets, drafters and servers can be added up and compared.

Conventions: the acceptance length tau is the mean over verifications of (accepted drafted tokens + 1), the +1 being the token the
target adds itself; every verification counts in full, also the last one of an answer, whose accepted tokens may reach past
its end. This is what vLLM's counters and SGLang's spec_verify_ct and spec_num_correct_drafts give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over verifications of ``len(reached)`` drafted positions."""

    verifications: int
    reached: tuple[int, ...]
    """How many verifications accepted at least 1, 2, ... drafted tokens."""

    @classmethod
    def count(cls, accepted: Iterable[int], steps: int) -> Acceptance:
        """From the number of accepted tokens of each verification."""
        values = list(accepted)
        return cls(len(values), tuple(sum(v >= i for v in values) for i in range(1, steps + 1)))

    @classmethod
    def pooled(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """The sum of several. Raises ValueError when they have different numbers of positions."""
        if len({len(p.reached) for p in parts}) > 1:
            raise ValueError("acceptance over different numbers of drafted positions cannot be pooled")
        reached = zip(*(p.reached for p in parts), strict=True)
        return cls(sum(p.verifications for p in parts), tuple(map(sum, reached)))

    def minus(self, earlier: Acceptance) -> Acceptance:
        """What was counted since ``earlier``."""
        reached = zip(self.reached, earlier.reached, strict=True)
        return Acceptance(
            self.verifications - earlier.verifications, tuple(now - then for now, then in reached)
        )

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens."""
        return sum(self.reached)

    @property
    def length(self) -> float:
        """tau = mean(accepted + 1); 1.0 is what plain decoding has. 0.0 when nothing was verified."""
        return 1 + self.accepted / self.verifications if self.verifications else 0.0

    @property
    def joint(self) -> list[float]:
        """Share of verifications that accepted at least 1, 2, ... drafted tokens."""
        return [r / self.verifications if self.verifications else 0.0 for r in self.reached]

    @property
    def conditional(self) -> list[float]:
        """Share of those that accepted all drafted tokens before, position by position."""
        before = (self.verifications, *self.reached)
        return [r / b if b else 0.0 for r, b in zip(self.reached, before, strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "verifications": self.verifications,
            "accepted": self.accepted,
            "acceptance_length": round(self.length, 4),
            "reached": list(self.reached),
            "joint": [round(x, 4) for x in self.joint],
            "conditional": [round(x, 4) for x in self.conditional],
        }
