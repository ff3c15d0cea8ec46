"""Whether the stored final state means what a trainer takes it to mean: the target's own next token and probabilities.

The stored side uses exactly what training uses (:class:`headrace.target.Head` and, for un-normed stores, the target's final
norm); the other side is the target's own forward pass, so a wrong reading of the head shows as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.target import Target
from headrace.types import FINAL, CaptureSpec, Row
from headrace.verify.faults import Fault

CHUNK = 512  # tokens whose logits are held at once
# Agreement of greedy tokens below this, where the target is not nearly tied, is a fault. Ties flip within the noise.
LEAST_AGREEMENT = 0.98
# Largest change of the mean log-likelihood, in nats a token.
MOST_LIKELIHOOD = 0.02


@dataclass(frozen=True, slots=True)
class Meaning:
    """Sums over the tokens of some captures; add them with :meth:`__add__`."""

    tokens: int = 0
    """Tokens whose greedy next token was compared."""
    agree: int = 0
    clear: int = 0
    """Those where the target's first choice leads by more than the tie limit."""
    clear_agree: int = 0
    supervised: int = 0
    """Supervised tokens whose likelihood was compared."""
    stored_nll: float = 0.0
    """Summed negative log-likelihood of the supervised tokens under the stored states, nats."""
    target_nll: float = 0.0

    def __add__(self, other: Meaning) -> Meaning:
        return Meaning(
            self.tokens + other.tokens,
            self.agree + other.agree,
            self.clear + other.clear,
            self.clear_agree + other.clear_agree,
            self.supervised + other.supervised,
            self.stored_nll + other.stored_nll,
            self.target_nll + other.target_nll,
        )

    @property
    def agreement(self) -> float:
        """Share of equal greedy tokens."""
        return self.agree / self.tokens if self.tokens else 1.0

    @property
    def clear_agreement(self) -> float:
        """The same where the target is not nearly tied."""
        return self.clear_agree / self.clear if self.clear else 1.0

    @property
    def likelihood_change(self) -> float:
        """Mean log-likelihood lost by using the stored states, nats a supervised token."""
        return (self.stored_nll - self.target_nll) / self.supervised if self.supervised else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        count = max(1, self.supervised)
        return {
            "tokens": self.tokens,
            "greedy_agreement": self.agreement,
            "clear_tokens": self.clear,
            "clear_agreement": self.clear_agreement,
            "supervised_tokens": self.supervised,
            "perplexity_stored": math.exp(min(50.0, self.stored_nll / count)),
            "perplexity_target": math.exp(min(50.0, self.target_nll / count)),
            "likelihood_change": self.likelihood_change,
        }


def stored_final(target: Target, spec: CaptureSpec, states: torch.Tensor) -> torch.Tensor | None:
    """The final state [tokens, hidden], normed, as training reads it from ``states`` [taps, tokens, hidden]; None if not stored."""
    if FINAL not in spec.taps:
        return None
    final = states[spec.tap_index(FINAL)]
    return final if spec.final_normed else target.final_norm(final)


def compare(target: Target, final: torch.Tensor, row: Row, kept: np.ndarray, logits: torch.Tensor) -> Meaning:
    """Compare the logits of a stored ``final`` [tokens, hidden] with the target's own ``logits`` [tokens, vocab].

    State t predicts token t + 1: greedy tokens are compared wherever a state is ``kept`` (bool [tokens]), likelihoods where
    token t + 1 is supervised too.
    """
    total = Meaning()
    labels = torch.from_numpy(np.append(row.ids[1:], 0).astype(np.int64))
    counted = torch.from_numpy(np.append(row.mask[1:], False))
    places = torch.from_numpy(np.flatnonzero(kept))
    for part in places.split(CHUNK):
        ours = torch.nan_to_num(target.head.logits(final[part]))
        total += _compare(ours, logits[part], labels[part], counted[part], str(final.dtype))
    return total


def _compare(
    ours: torch.Tensor, theirs: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor, dtype: str
) -> Meaning:
    top = theirs.topk(2, dim=-1)
    # bf16 logits around 20 are 0.125 apart: a lead below a few steps is a tie.
    lead = 1e-2 if "32" in dtype else 0.5
    clear = (top.values[:, 0] - top.values[:, 1]) > lead
    same = ours.argmax(dim=-1) == top.indices[:, 0]
    mine = ours.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    right = theirs.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return Meaning(
        tokens=len(ours),
        agree=int(same.sum()),
        clear=int(clear.sum()),
        clear_agree=int((same & clear).sum()),
        supervised=int(counted.sum()),
        stored_nll=-float(mine[counted].double().sum()),
        target_nll=-float(right[counted].double().sum()),
    )


def judge(found: Meaning) -> list[Fault]:
    """The faults that the meaning of the stored states shows. Limits widen where few tokens were compared."""
    faults: list[Fault] = []
    allowed = max(1 - LEAST_AGREEMENT, 2 / found.clear if found.clear else 1.0)
    if 1 - found.clear_agreement > allowed:
        detail = (
            f"lm_head of the stored final state picks the target's greedy token in {found.clear_agreement:.1%} of "
            f"{found.clear:,} places that are no near-tie, expected at least {LEAST_AGREEMENT:.0%}"
        )
        faults.append(Fault("greedy-differs", detail, values=found.to_dict()))
    limit = MOST_LIKELIHOOD + 0.3 / math.sqrt(max(1, found.supervised))
    if found.supervised and abs(found.likelihood_change) > limit:
        numbers = found.to_dict()
        detail = (
            f"perplexity of {found.supervised:,} supervised tokens is {numbers['perplexity_stored']:.4g} under the stored "
            f"states and {numbers['perplexity_target']:.4g} under the target"
        )
        faults.append(Fault("perplexity-differs", detail, values=numbers))
    return faults
