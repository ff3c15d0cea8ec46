"""The loss of all steps of a pack, label by label in chunks: target logits, draft logits and gradient live for one chunk only.

Compact numbers as in :mod:`headrace.draft.layout`: the chain that step s of start m belongs to is judged by label m + s.
A chunk of labels therefore needs, of step s, the states of the same starts moved down by s.
Shapes: S steps, M starts (and labels), C labels of a chunk, V draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.draft.compiling import compile_static
from headrace.draft.losses import LossKind, loss_and_gradient
from headrace.draft.teacher import Labels, Teacher, matmul32

if TYPE_CHECKING:
    # Shapes for readers, and for tests/test_shapes.py, which checks them; nothing is imported at run time.
    from jaxtyping import Float, Int

COUNTERS = ("counted", "covered", "hit", "reached", "reached_covered", "accepted")
"""Rows of a count table [6, S]: chains whose step s counts; those with the label in the draft vocabulary; those where the
draft's best token is the target's; chains whose earlier steps were all hits ("reached"), those of them with a label in
the vocabulary, and those that hit again."""


@dataclass(frozen=True)
class Outcome:
    """Of one pack: the differentiable loss, and plain numbers for reports."""

    loss: Tensor
    """Scalar: sum over steps of the step's weight times its mean."""
    sums: Tensor
    """float [S]: sum of the losses over covered labels."""
    counts: Tensor
    """int64 [6, S], rows as :data:`COUNTERS`."""


class Objective:
    """Loss of chains against a teacher.

    A label that the draft vocabulary lacks adds no loss (its renormalized distribution would teach a wrong best token)
    and counts as a miss in every accuracy. A step's mean is over all its counted labels.
    """

    def __init__(
        self,
        teacher: Teacher,
        kind: LossKind,
        step_weights: tuple[float, ...],
        *,
        chunk: int = 1024,
        compiled: bool = False,
    ) -> None:
        self.teacher, self.kind, self.step_weights, self.chunk = teacher, kind, step_weights, chunk
        self._weights = torch.tensor(step_weights, dtype=torch.float64)
        self._judge: Callable[..., tuple[Tensor, Tensor, Tensor]] = compile_static(_judge, compiled)
        self._read = compile_static(teacher.read, compiled)

    def __call__(
        self,
        states: Float[Tensor, "S M H"],
        lm_head: Float[Tensor, "V H"],
        final: Float[Tensor, "M H"],
        room: Int[Tensor, " M"],
    ) -> Outcome:
        """states [S, M, H] after the draft's last norm, lm_head [V, H], final [M, H] of the label rows, room [M]."""
        loss, sums, counts = _Chunked.apply(states, lm_head, final, room, self)  # type: ignore[no-untyped-call]
        return Outcome(loss, sums, counts)

    def run(
        self, states: Tensor, lm_head: Tensor, final: Tensor, room: Tensor, wanted: tuple[bool, bool]
    ) -> _Run:
        """Judge every label; ``wanted`` says which gradients to make: on the states, on lm_head."""
        steps, starts, _ = states.shape
        counted = _counted(room, steps)
        exact = torch.promote_types(states.dtype, torch.float32)
        if self._weights.device != states.device:  # once: a copy to the GPU waits for everything before it
            self._weights = self._weights.to(states.device)
        scale = (self._weights[:steps] / counted.sum(1).clamp(min=1)).to(exact)
        lead = steps - 1  # room in front, so that every chunk of every step has the same shape
        padded = F.pad(states, (0, 0, lead, 0))
        gradient = torch.zeros_like(padded) if wanted[0] else None
        head_gradient = torch.zeros_like(lm_head, dtype=exact) if wanted[1] else None
        sums = torch.zeros(steps, dtype=exact, device=states.device)
        hits, covered = torch.zeros_like(counted), torch.zeros_like(counted)
        for begin in range(0, starts, self.chunk):
            end = min(begin + self.chunk, starts)
            labels = self._read(matmul32(final[begin:end], self.teacher.weight))
            moved = torch.stack([padded[s, begin - s + lead : end - s + lead] for s in range(steps)])
            logits = matmul32(moved.flatten(0, 1), lm_head).view(steps, end - begin, -1)
            used = counted[:, begin:end] & (labels.best >= 0)
            losses, best, slope = self._judge(
                self.kind, logits, labels, used, scale, lm_head.dtype if any(wanted) else None
            )
            sums += losses.sum(1)
            hits[:, begin:end] = best == labels.best
            covered[:, begin:end] = used
            if gradient is not None:
                for s, back in enumerate((slope.flatten(0, 1) @ lm_head).view(moved.shape)):
                    gradient[s, begin - s + lead : end - s + lead] = back.to(gradient.dtype)
            if head_gradient is not None:
                head_gradient += slope.flatten(0, 1).T @ moved.flatten(0, 1).to(slope.dtype)
        counts = _count(counted, covered, hits)
        return _Run(
            (sums * scale).sum(),
            sums,
            counts,
            None if gradient is None else gradient[:, lead:],
            head_gradient,
        )


class _Run(NamedTuple):
    loss: Tensor
    sums: Tensor
    counts: Tensor
    gradient: Tensor | None
    head_gradient: Tensor | None


def _judge(
    kind: LossKind, logits: Tensor, labels: Labels, used: Tensor, scale: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [S, C, V], used bool [S, C], scale [S] → losses [S, C] unscaled, best ids [S, C], gradient [S, C, V] scaled.

    The gradient is made in ``dtype``, or not at all when that is None.
    """
    losses, slope = loss_and_gradient(kind, logits, labels.log_probs, labels.mass, labels.top)
    best = logits.argmax(-1)
    if dtype is None:
        return losses * used, best, losses
    weight = used * scale[:, None]
    return losses * used, best, (slope * weight[..., None]).to(dtype)


def _counted(room: Tensor, steps: int) -> Tensor:
    """bool [S, M]: whether step s of the chain judged by label r (start r - s) counts."""
    table = [F.pad(room, (s, 0))[: len(room)] > s for s in range(steps)]
    return torch.stack(table)


def _count(counted: Tensor, covered: Tensor, hits: Tensor) -> Tensor:
    """The count table [6, S] from bool [S, M] tables over labels."""
    hits = hits & covered
    alive, rows = counted[0], []
    for s in range(len(counted)):
        if s:  # the same chain was judged one label earlier by the step before
            alive = F.pad(alive & hits[s - 1], (1, 0))[:-1] & counted[s]
        rows.append(
            torch.stack([counted[s], covered[s], hits[s], alive, alive & covered[s], alive & hits[s]]).sum(1)
        )
    return torch.stack(rows, dim=1)


class _Chunked(torch.autograd.Function):
    """The objective as one differentiable step whose gradient is made along with the loss."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, lm_head: Tensor, final: Tensor, room: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor, Tensor]:
        done = objective.run(states, lm_head, final, room, ctx.needs_input_grad[:2])
        ctx.mark_non_differentiable(done.sums, done.counts)
        ctx.save_for_backward(done.gradient, done.head_gradient)
        return done.loss, done.sums, done.counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, head_gradient = ctx.saved_tensors
        scaled = None if head_gradient is None else head_gradient * grads[0]
        return None if gradient is None else gradient * grads[0], scaled, None, None, None
