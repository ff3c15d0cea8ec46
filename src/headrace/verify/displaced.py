"""States that are right for another token of the same row, and the measures for states that are right elsewhere.

A step of the diagnosis takes the taps (places in the spec) still without an explanation and returns its findings and the
taps left.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.types import FINAL
from headrace.verify.measure import token_errors
from headrace.verify.problem import FIT, Finding, Problem, explains, ranges

MOST = 0.5  # of the bad tokens must be explained by one source for it to be named
ALL = 0.8  # of a row's tokens are bad: the row as a whole is displaced
_FEW = 3  # scattered tokens up to here are single replacements

Result = tuple[list[Finding], list[int]]


def in_row(problem: Problem, left: list[int]) -> Result:
    """States of other tokens of the same row: shifted, repeated, reordered or replaced."""
    findings: list[Finding] = []
    rest: list[int] = []
    for taps in same_places(problem, left):
        tokens = problem.tokens(taps[0])
        stored = problem.stored[taps][:, tokens]
        places, errors = nearest(stored, problem.claimed[taps])
        own = float(np.median(joint_errors(stored, problem.claimed[taps][:, tokens])))
        moved = (errors <= FIT) & (places != tokens)
        if moved.mean() < MOST or not explains(float(np.median(errors[moved])), own):
            rest += taps
            continue
        code, detail, value = _name_move(problem, taps[0], tokens[moved], places[moved])
        findings.append(
            problem.finding(code, detail, taps, error=float(np.median(errors[moved])), value=value)
        )
    return findings, rest


def same_places(problem: Problem, taps: list[int]) -> list[list[int]]:
    """Taps whose bad tokens are the same, together: what moved them moved them as one."""
    groups: list[list[int]] = []
    for tap in sorted(
        taps, key=lambda k: -_depth(problem, k)
    ):  # a deep tap knows its position; the embedding does not
        for group in groups:
            both = problem.bad[group[0]] & problem.bad[tap]
            either = problem.bad[group[0]] | problem.bad[tap]
            if both.sum() > 0.8 * either.sum():
                group.append(tap)
                break
        else:
            groups.append([tap])
    return groups


def _depth(problem: Problem, tap: int) -> int:
    return 1 << 30 if problem.taps[tap] == FINAL else int(problem.taps[tap])


def joint_errors(stored: torch.Tensor, reference: torch.Tensor) -> np.ndarray:
    """[tokens]: relative error of each token, the worst over the taps, of two [taps, tokens, H]."""
    worst: np.ndarray = token_errors(stored, reference).relative.max(axis=0)
    return worst


def nearest(stored: torch.Tensor, reference: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """For each token of ``stored`` [taps, B, H], the place in ``reference`` [taps, T, H] nearest over all taps, and its error."""
    distance = torch.zeros(stored.shape[1], reference.shape[1])
    for ours, theirs in zip(stored, reference, strict=True):
        ours = torch.nan_to_num(ours, nan=0.0, posinf=0.0, neginf=0.0)
        distance += torch.cdist(ours, theirs) / theirs.norm(dim=-1).clamp_min(1e-30)
    places = distance.argmin(dim=1).numpy()
    return places, joint_errors(stored, reference[:, places])


def _name_move(
    problem: Problem, tap: int, tokens: np.ndarray, places: np.ndarray
) -> tuple[str, str, int | None]:
    """Name what happened to ``tokens`` that hold the states of ``places`` of the same row."""
    total = problem.bad.shape[1]
    bad = int(problem.bad[tap].sum())
    offsets, counts = np.unique(places - tokens, return_counts=True)
    offset = int(offsets[counts.argmax()])
    if counts.max() >= ALL * len(tokens) and (len(tokens) > 1 or total <= 2):
        side = "later" if offset > 0 else "earlier"
        if bad >= ALL * (total - abs(offset)):
            return "token-shift", f"every token holds the state of the token {abs(offset)} {side}", offset
        if offset > 0 and problem.bad[tap][int(tokens[0]) :].mean() > ALL:
            return (
                "token-shift",
                f"from token {int(tokens[0])} on, each holds the state of the token {abs(offset)} {side}",
                offset,
            )
        return "chunk-repeated", f"{ranges(tokens)} repeat {ranges(places)} of the row", offset
    if bad <= max(_FEW, total // 20):
        pairs = ", ".join(
            f"token {t} holds the state of token {p}" for t, p in zip(tokens[:3], places[:3], strict=True)
        )
        return "token-replaced", pairs, None
    mirrored = (tokens + places == total - 1).mean() >= ALL
    return (
        "token-order",
        "the tokens are in reverse" if mirrored else f"the tokens of {ranges(tokens)} are in another order",
        None,
    )
