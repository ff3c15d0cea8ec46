"""What a wrong tap might hold: every near miss of the field, computed from the reference, each with its name.

Shapes: T tokens, H hidden, N layers, K taps. Everything is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headrace.target import Target
from headrace.types import FINAL, CaptureSpec, Tap
from headrace.verify.reference import Everything


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something a tap might hold instead of what the spec says."""

    code: str
    """A code of the fault catalogue."""
    detail: str
    """What it is, to follow "holds"."""
    states: torch.Tensor
    """[T, H]"""
    holds: Tap | None = None
    """Boundary or final, where the candidate is one as it stands."""


class World:
    """The reference states of one row and the target's final norm, from which candidates are made."""

    def __init__(self, target: Target, spec: CaptureSpec, everything: Everything) -> None:
        self.target = target
        self.spec = spec
        self.boundaries = everything.boundaries
        self.final = everything.final
        self.num_layers = spec.num_layers

    def claimed(self, tap: Tap) -> torch.Tensor:
        """[T, H]: what ``tap`` should hold by the spec."""
        if tap != FINAL:
            return self.boundaries[int(tap)]
        return self.final if self.spec.final_normed else self.boundaries[self.num_layers]

    def norm(self, states: torch.Tensor) -> torch.Tensor:
        """The target's final norm, rounding as the target does in the spec's dtype."""
        return self.target.final_norm(states.to(getattr(torch, self.spec.dtype))).float()

    @functools.cached_property
    def norm_weight(self) -> torch.Tensor | None:
        """[H]: what an RMS norm multiplies by (1 + w included); None for LayerNorm."""
        if self.spec.norm_kind == "layernorm":
            return None
        return self.target.final_norm(torch.ones(self.spec.hidden_size))


def candidates(tap: Tap, world: World) -> Iterator[Candidate]:
    """Everything ``tap`` might hold for the same tokens, nearest misses first."""
    if tap == FINAL:
        yield from _final_candidates(world)
    else:
        yield from _boundary_candidates(int(tap), world)
    yield from _hidden_orders(world.claimed(tap))


def _boundary_candidates(tap: int, world: World) -> Iterator[Candidate]:
    for boundary in sorted(set(range(world.num_layers + 1)) - {tap}, key=lambda b: (abs(b - tap), b)):
        yield Candidate("boundary-shifted", f"boundary {boundary}", world.boundaries[boundary], boundary)
    yield Candidate("tap-order", "the final state", world.final, FINAL)
    yield Candidate(
        "boundary-normed", f"boundary {tap} after the final norm", world.norm(world.boundaries[tap])
    )
    for layer in (tap, tap + 1):
        if 1 <= layer <= world.num_layers:
            own = world.boundaries[layer] - world.boundaries[layer - 1]
            yield Candidate("residual-missing", f"what layer {layer} adds, without the residual stream", own)


def _final_candidates(world: World) -> Iterator[Candidate]:
    last = world.num_layers
    if world.spec.final_normed:
        yield Candidate(
            "final-not-normed", f"boundary {last}, before the final norm", world.boundaries[last], last
        )
        yield Candidate("final-normed-twice", "the final state normed once more", world.norm(world.final))
    else:
        yield Candidate("final-normed", "the state after the final norm", world.final)
    for boundary in range(last - 1, -1, -1):
        normed = world.norm(world.boundaries[boundary])
        yield Candidate("final-wrong-layer", f"boundary {boundary} after the final norm", normed)
        yield Candidate(
            "final-wrong-layer", f"boundary {boundary}, not normed", world.boundaries[boundary], boundary
        )
    yield from _norm_weights(world)


def _norm_weights(world: World) -> Iterator[Candidate]:
    """The final norm with a wrong weight; RMS norms only."""
    weight = world.norm_weight
    if weight is None:
        return
    last = world.boundaries[world.num_layers]
    unit = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + world.spec.norm_eps)
    wrong = weight + 1 if world.spec.norm_kind == "rms" else weight - 1
    names = {"rms": ("w", "1 + w"), "rms1p": ("1 + w", "w")}[world.spec.norm_kind]
    yield Candidate(
        "norm-weight", f"the norm with {names[1]} where the target multiplies by {names[0]}", unit * wrong
    )
    yield Candidate("norm-weight", "the norm without its weight", unit)


def _hidden_orders(states: torch.Tensor) -> Iterator[Candidate]:
    """The right values at other places of the hidden dimension, as joined parts of ranks give."""
    hidden = states.shape[-1]
    for parts in (2, 4, 8):
        if hidden % parts == 0:
            blocks = states.unflatten(-1, (parts, hidden // parts))
            for shift in range(1, parts):
                rolled = blocks.roll(shift, dims=-2).flatten(-2)
                yield Candidate("hidden-order", f"its {parts} hidden parts rotated by {shift}", rolled)
            if parts > 2:
                yield Candidate(
                    "hidden-order", f"its {parts} hidden parts in reverse", blocks.flip(-2).flatten(-2)
                )
            yield Candidate(
                "hidden-order",
                f"its hidden values interleaved by {parts}",
                blocks.transpose(-1, -2).flatten(-2),
            )
    yield Candidate("hidden-order", "its hidden values in reverse", states.flip(-1))


def layouts(stored: torch.Tensor, dtype: str) -> Iterator[Candidate]:
    """Other readings of the bytes of ``stored`` [K, T, H] (in its own dtype); the states of each are [K, T, H] too."""
    taps, tokens, hidden = stored.shape
    flat = stored.contiguous().flatten()
    if taps > 1 and tokens > 1:
        by_token = flat.view(tokens, taps, hidden).transpose(0, 1).float()
        yield Candidate("layout", "written as [tokens, taps, hidden]", by_token)
    by_value = flat.view(taps, hidden, tokens).transpose(1, 2).float()
    yield Candidate("layout", "written as [taps, hidden, tokens]", by_value)
    if stored.element_size() != 2:
        return
    for other in ("bfloat16", "float16"):
        if other != dtype:
            yield Candidate(
                "dtype", f"{other} bytes under the name {dtype}", stored.view(getattr(torch, other)).float()
            )
    swapped = stored.contiguous().view(torch.uint8).unflatten(-1, (hidden, 2)).flip(-1).flatten(-2)
    yield Candidate("dtype", "bytes in big-endian order", swapped.contiguous().view(stored.dtype).float())
