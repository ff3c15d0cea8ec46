"""States that are right for another capture, or for the same tokens in another context.

What was in flight with a capture is what it may be mixed up with, so its neighbours in the store are always looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from headrace.types import FINAL, Row
from headrace.verify.displaced import ALL, MOST, Result, joint_errors, nearest, same_places
from headrace.verify.pool import Match, Pool
from headrace.verify.problem import FIT, Finding, Problem, explains, ranges, thin
from headrace.verify.reference import Reference

Neighbours = Callable[[str], list[Row]]
Context = tuple[str, str, np.ndarray, int, int]


class Elsewhere:
    """Searches other captures and other contexts; keeps no state but the pool's."""

    def __init__(self, reference: Reference, pool: Pool, neighbours: Neighbours) -> None:
        self.reference = reference
        self.pool = pool
        self.neighbours = neighbours

    # --- other captures ---------------------------------------------------------------------------------------

    def in_captures(self, problem: Problem, left: list[int]) -> Result:
        """States of other captures; suspects come from the pool and are re-extracted to be sure."""
        findings: list[Finding] = []
        rest: list[int] = []
        for taps in same_places(problem, left):
            finding = self._other_capture(problem, taps)
            if finding is None:
                rest += taps
            else:
                findings.append(finding)
        return findings, rest

    def _other_capture(self, problem: Problem, taps: list[int]) -> Finding | None:
        tokens = problem.tokens(taps[0])
        stored = problem.stored[taps][:, tokens]
        own = float(np.median(joint_errors(stored, problem.claimed[taps][:, tokens])))
        for match in self._matches(problem, taps, stored):
            other = self.reference.one(self.pool.row_of(match.key))[taps].float()
            places, errors = nearest(stored, other)
            taken = errors <= FIT
            if taken.mean() < MOST or not explains(float(np.median(errors[taken])), own):
                continue
            where = ranges(tokens[taken])
            if (tokens[taken] == places[taken]).mean() >= MOST:
                detail = f"{where} hold the states of the same places in capture {match.key}"
            else:
                detail = f"{where} hold the states of {ranges(places[taken])} of capture {match.key}"
            whole = len(tokens) >= ALL * len(thin(np.arange(problem.bad.shape[1])))
            error = float(np.median(errors[taken]))
            return problem.finding(
                "other-capture", detail, taps, error=error, other=match.key, value=int(whole)
            )
        return None

    def _matches(self, problem: Problem, taps: list[int], stored: torch.Tensor) -> Iterator[Match]:
        """Captures to try: from what was re-extracted so far, then from that and the neighbours."""
        tried: set[str] = set()
        for match in self.pool.find(stored, taps, problem.row.key):
            tried.add(match.key)
            yield match
        for row in self.neighbours(problem.row.key):
            if row.key not in self.pool:
                self.pool.add(row.key, self.reference.one(row))
        yield from (m for m in self.pool.find(stored, taps, problem.row.key) if m.key not in tried)

    # --- other contexts ---------------------------------------------------------------------------------------

    def in_context(self, problem: Problem, left: list[int]) -> Result:
        """The same tokens, computed after a BOS token, after another row's tokens, or without those before them."""
        if not left:
            return [], left
        taps = [k for k in left if problem.taps[k] != 0] or left
        own = max(problem.error(k, problem.claimed[k], problem.tokens(k)) for k in taps)
        where = np.flatnonzero(problem.bad[taps].any(axis=0))
        for code, detail, prefix, start, offset in self._contexts(problem.row, int(where[0])):
            again = self._states(np.concatenate([prefix, problem.row.ids[start:]]), problem, taps)
            tokens = thin(where[where >= start])
            index = tokens - start + offset
            keep = index < again.shape[1]
            error = float(
                np.median(joint_errors(problem.stored[taps][:, tokens[keep]], again[:, index[keep]]))
            )
            if explains(error, own):
                return [problem.finding(code, detail, left, error=error)], []
        return [], left

    def _contexts(self, row: Row, first: int) -> Iterator[Context]:
        """Contexts to try: code, detail, ids put before, first token of the row used, and where that token's state then is."""
        empty = np.zeros(0, dtype=np.int32)
        if first > 0:
            yield (
                "context-lost",
                f"from token {first} on, states were computed as if the row began there",
                empty,
                first,
                0,
            )
        bos = self.reference.target.config.get("bos_token_id")
        for token in bos if isinstance(bos, list) else [bos]:
            if isinstance(token, int) and token != int(row.ids[0]):
                one = np.array([token], dtype=np.int32)
                yield "bos-added", f"states are those of the row after token {token} (BOS)", one, 0, 1
                yield (
                    "bos-added",
                    f"states begin with that of token {token} (BOS), which is not in the row",
                    one,
                    0,
                    0,
                )
        if first <= 1 and len(row) > 1:
            yield "context-lost", "states were computed without the row's first token", empty, 1, 0
        for other in self.neighbours(row.key) if first > 0 else []:
            if len(other) >= first:
                detail = f"from token {first} on, states were computed after the tokens of row {other.key}"
                yield "wrong-context", detail, other.ids[:first], first, first

    def _states(self, ids: np.ndarray, problem: Problem, taps: list[int]) -> torch.Tensor:
        """float32 [len(taps), tokens, H] of other ids."""
        everything = self.reference.everything(ids.astype(np.int32))
        last = everything.final if self.reference.spec.final_normed else everything.boundaries[-1]
        return torch.stack(
            [last if problem.taps[k] == FINAL else everything.boundaries[int(problem.taps[k])] for k in taps]
        )
