"""A pack's loss and gradients as one CUDA graph: queueing a drafter's many small kernels one by one takes longer than running them.

A drafter's layer is small, so a training step is a thousand short kernels, and the host that queues them is what limits it.
Packs are padded to one size, so the same work can be recorded once and replayed on the tensors of each pack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from headrace.draft.layout import Layout
from headrace.draft.ttt import Pack
from headrace.errors import TrainingError

WARM = 3  # runs of a size before it is recorded: compilation, autotuning and lazy set-up must not be in the recording

LossOf = Callable[[Pack], tuple[Tensor, Tensor, Tensor]]
Size = tuple[int, int]


class GraphedLoss:
    """Runs a pack forward and backward, adding to the ``.grad`` of ``parameters`` what ``loss_of`` times ``scale`` gives them.

    The first packs of a size run as they are; then the size is recorded. A size that is seldom seen never is.
    """

    def __init__(self, loss_of: LossOf, parameters: Sequence[nn.Parameter], scale: float) -> None:
        self.loss_of, self.parameters, self.scale = loss_of, list(parameters), scale
        self._seen: Counter[Size] = Counter()
        self._recorded: dict[Size, _Recording] = {}

    def __call__(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Sums and counts of the pack, as :class:`~headrace.draft.objective.Outcome` has them; good until the next call."""
        size = (pack.layout.tokens, len(pack.layout.starts))
        recording = self._recorded.get(size)
        if recording is None and self._seen[size] < WARM:
            self._seen[size] += 1
            return self._run(pack)
        earlier = [p.grad for p in self.parameters]
        if recording is None:
            recording = self._recorded[size] = self._record(pack)
        elif any(g is mine for g, mine in zip(earlier, recording.gradients, strict=True)):
            earlier = [None if g is None else g.clone() for g in earlier]  # the replay overwrites its own
        recording.replay(pack)
        for parameter, gradient, before in zip(self.parameters, recording.gradients, earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if before is None else gradient.add_(before)
        return recording.sums, recording.counts

    def _run(self, pack: Pack) -> tuple[Tensor, Tensor]:
        loss, sums, counts = self.loss_of(pack)
        (loss * self.scale).backward()
        return sums, counts

    def _record(self, pack: Pack) -> _Recording:
        """Record one run on copies of the pack's tensors, which each replay fills anew."""
        inputs = _copied(pack)
        for parameter in self.parameters:
            parameter.grad = None  # the recording makes them, in memory that stays its own
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Another thread makes packs meanwhile: its allocations and copies are none of the recording's business.
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                sums, counts = self._run(inputs)
        except RuntimeError as exc:
            raise TrainingError(
                f"the training step could not be recorded as a CUDA graph ({str(exc).splitlines()[0]}); set --machine.graphs off"
            ) from exc
        gradients = [p.grad for p in self.parameters]
        return _Recording(graph, inputs, sums, counts, gradients)


@dataclass
class _Recording:
    """One size: its graph, and the tensors that it reads and writes."""

    graph: Any
    inputs: Pack
    sums: Tensor
    counts: Tensor
    gradients: list[Tensor | None]

    def replay(self, pack: Pack) -> None:
        """Run the recorded work on ``pack``."""
        for mine, given in zip(_tensors(self.inputs), _tensors(pack), strict=True):
            mine.copy_(given)
        self.graph.replay()


def _tensors(pack: Pack) -> list[Tensor]:
    """Everything of a pack that lives on the device. Its spans do not: only the eager attention reads them."""
    layout = [getattr(pack.layout, f.name) for f in fields(Layout) if f.name != "spans"]
    return [pack.ids, pack.taps, pack.final, *layout]


def _copied(pack: Pack) -> Pack:
    ids, taps, final, *layout = (t.clone() for t in _tensors(pack))
    names = [f.name for f in fields(Layout) if f.name != "spans"]
    return Pack(ids, taps, final, Layout(**dict(zip(names, layout, strict=True)), spans=pack.layout.spans))
