"""What a regeneration did: counts, cost and reasons, as a line while it runs and as an account at its end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from headrace.data.answers import AnswerFile
from headrace.errors import HeadraceError, IncompleteError


@dataclass
class Totals:
    """What this run did."""

    started: float = field(default_factory=time.monotonic)
    answered: int = 0
    requests: int = 0
    retries: int = 0
    tokens: int = 0
    cost: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    in_a_row: int = 0
    dearest: float = 0.0
    """Cost of the most expensive request so far: what one more may cost."""

    def line(self) -> str:
        """How it stands, for the progress line."""
        seconds = max(1e-9, time.monotonic() - self.started)
        facts = f"{self.answered:,} done, {sum(self.failed.values()):,} failed, {self.requests / seconds:.1f} requests/s, {self.tokens / seconds:,.0f} tokens/s"
        return facts + (f", ${self.cost:.4f}" if self.cost else "")

    def account(self, answers: AnswerFile) -> dict[str, Any]:
        """Plain JSON values for the command's result."""
        return {
            "conversations": len(answers.done),
            "answered": self.answered,
            "failed": dict(self.failed),
            "skipped": dict(self.skipped),
            "requests": self.requests,
            "retries": self.retries,
            "tokens": self.tokens,
            "cost": round(self.cost, 6),
            "with_token_ids": answers.with_ids,
            "finish_reasons": dict(answers.finish_reasons),
            "providers": dict(answers.providers),
            "seconds": round(time.monotonic() - self.started, 3),
        }

    def require_whole(self, answers: AnswerFile, stopped: str) -> None:
        """Raise IncompleteError when conversations failed or ``stopped`` says why the run ended early, HeadraceError when nothing was answered."""
        failed = ", ".join(f"{reason} {n}" for reason, n in self.failed.most_common())
        if stopped:
            raise IncompleteError(
                f"stopped: {stopped}; {self.answered:,} answered, failed: {failed or 'none'}. Run the command again to go on"
            )
        if self.failed:
            raise IncompleteError(
                f"{sum(self.failed.values()):,} conversations failed ({failed}), see {answers.failed_path}; run the command again to try them anew"
            )
        if not answers.done:
            raise HeadraceError(
                f"no conversation was answered (skipped: {dict(self.skipped) or 'the input is empty'}); look at the input"
            )
