"""What is wrong with one capture: its bad states are compared with every near miss until one fits.

The order matters: a reading of the whole capture (layout, dtype), then each tap for the same tokens (neighbouring boundaries,
norms), then other tokens of the row, then other captures, then other contexts, then what kind of noise it is.

Shapes: K taps, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.types import Row
from headrace.verify import displaced, texture
from headrace.verify.candidates import Candidate, World, candidates, layouts
from headrace.verify.elsewhere import Elsewhere
from headrace.verify.measure import Tolerance, bad_tokens, token_errors
from headrace.verify.problem import BETTER, Finding, Problem, explains, fit, tap_names
from headrace.verify.reference import Reference

_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
)  # in a config: experts are routed to


class Diagnoser:
    """Explains captures with the help of a reference that can compute every boundary."""

    def __init__(self, reference: Reference, tolerance: Tolerance, elsewhere: Elsewhere) -> None:
        self.reference = reference
        self.tolerance = tolerance
        self.elsewhere = elsewhere

    def nearest_is_claimed(self, row: Row, stored: torch.Tensor, kept: np.ndarray) -> list[Finding]:
        """Taps that another boundary of the same tokens fits clearly better, even though the error is within the tolerance.

        In a deep model neighbouring boundaries differ by less than the noise allows: nearness decides, not size.
        """
        world = self._world(row)
        claimed = torch.stack([world.claimed(tap) for tap in world.spec.taps])
        problem = Problem(row, stored.float(), claimed, kept, world.spec.taps)
        found = (self._same_tokens(problem, world, k) for k in range(len(problem.taps)) if kept[k].any())
        return [finding for finding in found if finding is not None]

    def diagnose(self, row: Row, stored: torch.Tensor, kept: np.ndarray) -> list[Finding]:
        """Findings about ``stored`` [K, T, H]; they cover every tap that is beyond the tolerance, ``unexplained`` at worst.

        Only states that are ``kept`` (bool [K, T]) are looked at.
        """
        world = self._world(row)
        spec = world.spec
        claimed = torch.stack([world.claimed(tap) for tap in spec.taps])
        stored = torch.where(torch.from_numpy(kept)[..., None], stored, claimed.to(stored.dtype))
        relative = token_errors(stored, claimed).relative
        bad = np.stack([bad_tokens(tap, self.tolerance, kept[k]) for k, tap in enumerate(relative)])
        values = stored.float()
        problem = Problem(row, values, claimed, bad, spec.taps)
        findings = texture.broken_values(problem)
        if any(name in self.reference.target.config for name in _EXPERTS):
            bad &= ~texture.routing_flips(problem)
        if not bad.any():
            return findings
        if (whole := self._layout(problem, stored)) is not None:
            return [*findings, whole]
        left = [k for k in range(len(spec.taps)) if bad[k].any()]
        for step in (
            self._by_tap(world),
            displaced.in_row,
            self.elsewhere.in_captures,
            self.elsewhere.in_context,
            self._by_texture,
        ):
            found, left = step(problem, left)
            findings += found
        return findings

    def _world(self, row: Row) -> World:
        return World(self.reference.target, self.reference.spec, self.reference.everything(row.ids))

    def _layout(self, problem: Problem, stored: torch.Tensor) -> Finding | None:
        """The whole capture under another reading of its bytes."""
        taps = [k for k in range(len(problem.taps)) if problem.bad[k].any()]
        own = max(fit(problem.stored[k], problem.claimed[k]) for k in taps)
        for reading in layouts(stored, self.reference.spec.dtype):
            error = max(fit(reading.states[k], problem.claimed[k]) for k in range(len(problem.taps)))
            if explains(error, own):
                return problem.finding(reading.code, f"the states are {reading.detail}", taps, error=error)
        return None

    def _by_tap(self, world: World) -> Callable[[Problem, list[int]], tuple[list[Finding], list[int]]]:
        def step(problem: Problem, left: list[int]) -> tuple[list[Finding], list[int]]:
            found = {k: self._same_tokens(problem, world, k) for k in left}
            return [f for f in found.values() if f is not None], [k for k in left if found[k] is None]

        return step

    def _same_tokens(self, problem: Problem, world: World, tap: int) -> Finding | None:
        """The candidate that fits one tap's bad tokens best, if it explains them."""
        tokens = problem.tokens(tap)
        own = problem.error(tap, problem.claimed[tap], tokens)
        best: Candidate | None = None
        least = BETTER * own
        for candidate in [*candidates(problem.taps[tap], world), *texture.scaled(problem, tap)]:
            error = problem.error(tap, candidate.states, tokens)
            if error < least and explains(error, own):
                best, least = candidate, error
        if best is None:
            return None
        detail = f"{tap_names([problem.taps[tap]])} holds {best.detail}"
        return problem.finding(best.code, detail, [tap], error=least, what=best.detail, holds=best.holds)

    def _by_texture(self, problem: Problem, left: list[int]) -> tuple[list[Finding], list[int]]:
        return texture.classify(problem, left), []
