"""What kind of wrong values these are, when they are the states of nothing else: broken, scaled, partial, coarse, foreign."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from headrace.verify.candidates import Candidate
from headrace.verify.measure import token_errors
from headrace.verify.problem import FIT, Finding, Problem, fit, ranges

_PARTS = 16  # the hidden dimension is looked at in this many parts
_FLIPS = 0.02  # of a capture's tokens may have been routed to other experts
_FLIP_ERROR = 0.8  # and may be this far off
_SELF = 0.8  # of the bad tokens are nearest to their own right state: the token is right, its numbers are not


def broken_values(problem: Problem) -> list[Finding]:
    """Non-finite and all-zero states; their tokens are taken out of ``problem.bad``, which nothing else can explain."""
    findings: list[Finding] = []
    finite = torch.isfinite(problem.stored).all(dim=-1).numpy()
    zero = (problem.stored == 0).all(dim=-1).numpy() & ~(problem.claimed == 0).all(dim=-1).numpy()
    for code, what, where in (("non-finite", "NaN or infinity", ~finite), ("zero-rows", "only zeros", zero)):
        taps = [k for k in range(len(problem.taps)) if where[k].any()]
        if not taps:
            continue
        tokens = np.flatnonzero(where[taps].any(axis=0))
        some = ", ".join(map(str, tokens[:4])) + (", ..." if len(tokens) > 4 else "")
        findings.append(
            Finding(
                code,
                f"{len(tokens)} tokens ({some}) hold {what}",
                problem.row.key,
                tuple(problem.taps[k] for k in taps),
                int(tokens[0]),
                int(tokens[-1]),
                len(tokens),
            )
        )
        problem.bad[where] = False
    return findings


def routing_flips(problem: Problem) -> np.ndarray:
    """bool [K, T]: bad tokens that a mixture of experts explains: few, not far off, and nearest to their own right state.

    Rounding may send a token to another expert in one engine and not in the other; that is noise, however large it looks.
    """
    flips = np.zeros_like(problem.bad)
    for k in range(len(problem.taps)):
        tokens = np.flatnonzero(problem.bad[k])
        if not len(tokens) or len(tokens) > max(1, _FLIPS * problem.bad.shape[1]):
            continue
        errors = token_errors(problem.stored[k, tokens], problem.claimed[k, tokens]).relative
        near = tokens[(errors < _FLIP_ERROR) & own_nearest(problem, k, tokens)]
        flips[k, near] = True
    return flips


def scaled(problem: Problem, tap: int) -> Iterator[Candidate]:
    """The claimed states times the constant that fits best, if that is not 1."""
    tokens = problem.tokens(tap)
    ours, right = problem.stored[tap, tokens], problem.claimed[tap, tokens]
    factors = (ours * right).sum(-1) / right.pow(2).sum(-1).clamp_min(1e-30)
    factor = float(factors.median())
    if abs(factor - 1) > 0.02 and abs(factor) > 1e-6:
        yield Candidate("scaled", f"the right states times {factor:.4g}", problem.claimed[tap] * factor)


def classify(problem: Problem, left: list[int]) -> list[Finding]:
    """Name what remains, tap by tap joined where the name is the same; ``unexplained`` when there is none."""
    names: dict[tuple[str, str], list[int]] = {}
    for tap in left:
        names.setdefault(_name(problem, tap), []).append(tap)
    return [problem.finding(code, detail, taps) for (code, detail), taps in names.items()]


def _name(problem: Problem, tap: int) -> tuple[str, str]:
    tokens = problem.tokens(tap)
    ours, right = problem.stored[tap, tokens], problem.claimed[tap, tokens]
    part = _right_parts(ours, right)
    if part is not None:
        return "hidden-partial", part
    if not _own_token_nearest(problem, tap, tokens):
        return "unexplained", "the states match nothing that was tried"
    if _distinct(ours) < 0.75 * _distinct(right):
        return "precision", "the values use far fewer levels than their dtype has"
    if int(tokens[0]) > 0 and not problem.bad[tap][0]:
        return (
            "wrong-context",
            "each token is nearest to its own state, and those before it are right: its context was another",
        )
    return (
        "other-weights",
        "each token is nearest to its own state, but the numbers are those of other weights or settings",
    )


def _right_parts(ours: torch.Tensor, right: torch.Tensor) -> str | None:
    """Which parts of the hidden dimension are right, when some are and some are not."""
    hidden = ours.shape[-1]
    parts = next((p for p in (_PARTS, 12, 8, 6, 4, 3, 2) if hidden % p == 0), 1)
    if parts == 1:
        return None
    size = hidden // parts
    errors = [
        fit(ours[:, i * size : (i + 1) * size], right[:, i * size : (i + 1) * size]) for i in range(parts)
    ]
    good = [i for i, error in enumerate(errors) if error <= FIT]
    wrong = [i for i, error in enumerate(errors) if error > 2 * FIT]
    if len(good) + len(wrong) < parts or not good or not wrong:
        return None
    zero = all(bool((ours[:, i * size : (i + 1) * size] == 0).all()) for i in wrong)
    places = ranges(np.concatenate([np.arange(i * size, (i + 1) * size) for i in wrong]), "value")
    return f"{places} of the {hidden} of each state are {'zero' if zero else 'wrong'}"


def _own_token_nearest(problem: Problem, tap: int, tokens: np.ndarray) -> bool:
    """Whether most bad states are nearer to their own token's right state than to any other token's of the row."""
    far = token_errors(problem.stored[tap, tokens], problem.claimed[tap, tokens]).cosine
    return bool(own_nearest(problem, tap, tokens).mean() >= _SELF) and float(np.median(far)) > 0.2


def own_nearest(problem: Problem, tap: int, tokens: np.ndarray) -> np.ndarray:
    """bool [tokens]: whether each state is nearer to its own token's right state than to any other's of the row."""
    distance = torch.cdist(torch.nan_to_num(problem.stored[tap, tokens]), problem.claimed[tap])
    places = (torch.arange(len(tokens)), torch.from_numpy(tokens))
    own = distance[places].clone()
    distance[places] = float("inf")
    nearer: np.ndarray = (own < distance.min(dim=1).values).numpy()
    return nearer


def _distinct(values: torch.Tensor) -> float:
    """Mean number of different magnitudes a token."""
    return float(np.mean([len(torch.unique(row.abs())) for row in values]))
