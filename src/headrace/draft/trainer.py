"""The training loop: packs in, a better drafter out. Knows no files; what it reports goes to an observer.

One update averages the gradients of ``packs_per_step`` packs, whichever workers they ran on and whether each holds the
whole drafter or a shard of it, so one worker and four give the same update up to rounding.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.draft.data import Packs
from headrace.draft.gauges import Gauge
from headrace.draft.graphed import GraphedLoss
from headrace.draft.metrics import Accuracy
from headrace.draft.model import Eagle3Draft
from headrace.draft.objective import COUNTERS, Objective
from headrace.draft.optim import Average, Optimizers
from headrace.draft.options import MachineOptions, TrainOptions
from headrace.draft.sharding import gather, scatter, shard
from headrace.draft.teacher import Teacher
from headrace.draft.ttt import Pack, Unroll
from headrace.draft.workers import Workers
from headrace.errors import ConfigError, TrainingError


@dataclass(frozen=True)
class Machine:
    """How the work runs here, after ``auto`` is settled."""

    device: torch.device
    bfloat16: bool
    attention: str
    compiled: bool
    graphs: bool = False
    """Record a pack's work as a CUDA graph. Needs compiled code, which pads packs to one size, and no host in between."""

    @classmethod
    def settle(cls, options: MachineOptions, device: torch.device) -> Machine:
        """Decide what ``auto`` means on ``device``."""
        cuda = device.type == "cuda"
        attention = options.attention if options.attention != "auto" else ("flex" if cuda else "eager")
        if attention == "flex" and not cuda:
            raise ConfigError("flex attention has no backward pass on a CPU; set --machine.attention eager")
        bfloat16 = cuda if options.precision == "auto" else options.precision == "bfloat16"
        compiled = cuda if options.compile == "auto" else options.compile == "on"
        graphs = cuda and compiled and attention == "flex" and options.graphs == "auto"
        return cls(device, bfloat16, attention, compiled, graphs)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of frozen weights and states."""
        return torch.bfloat16 if self.bfloat16 else torch.float32

    def autocast(self) -> torch.autocast:
        """The context that the drafter runs in."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)


class Observer(Protocol):
    """Told what happens; every call comes from the training loop itself, on the first worker and the others alike."""

    def trained(self, step: int, accuracy: Accuracy, extra: dict[str, float]) -> None:
        """Every ``log_every`` updates: counts since the last call, and rate, gradient norm, tokens, tokens per second."""

    def validate(self, step: int) -> None:
        """A validation is due (weights are those to be judged; they must be left as they are)."""

    def checkpoint(self, step: int, last: bool) -> None:
        """Asked after every update: a place where the run could be resumed."""


class PackLoss(nn.Module):
    """The loss of one pack as one module call: what sharded weights are gathered for."""

    def __init__(
        self, model: Eagle3Draft, unroll: Unroll, objective: Objective, machine: Machine, steps: int
    ) -> None:
        super().__init__()
        self.model = model
        self.unroll, self.objective, self.machine, self.steps = unroll, objective, machine, steps

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor, Tensor]:
        """The differentiable loss, its per-step sums and counts."""
        with self.machine.autocast():
            states = self.unroll(pack, self.steps)
        head = self.model.lm_head.weight.to(self.machine.dtype)
        outcome = self.objective(states, head, pack.labels_final(), pack.layout.room)
        return outcome.loss, outcome.sums, outcome.counts


class Trainer:
    """Trains ``model`` (already on the device, its frozen parts in the machine's dtype) on ``packs``."""

    def __init__(
        self,
        model: Eagle3Draft,
        teacher: Teacher,
        packs: Packs,
        options: TrainOptions,
        machine: Machine,
        workers: Workers,
    ) -> None:
        if options.packs_per_step % workers.count:
            raise ConfigError(
                f"packs_per_step {options.packs_per_step} cannot be shared by {workers.count} workers; give a multiple of it"
            )
        self.model, self.packs, self.options, self.machine, self.workers = (
            model,
            packs,
            options,
            machine,
            workers,
        )
        self.unroll = Unroll(model, attention=machine.attention, compiled=machine.compiled)
        weights = tuple(options.loss.step_decay**s for s in range(options.ttt_steps))
        self.objective = Objective(
            teacher, options.loss.kind, weights, chunk=options.loss.chunk, compiled=machine.compiled
        )
        self.loss_of = PackLoss(model, self.unroll, self.objective, machine, options.ttt_steps)
        self.sharded = workers.count > 1 and options.machine.parallel == "shard"
        if self.sharded:
            shard(self.loss_of, workers)
        self.rounds = options.packs_per_step // workers.count
        self.total_steps = options.max_steps or max(
            1, math.ceil(packs.per_epoch() * options.epochs / options.packs_per_step)
        )
        self.optimizers = Optimizers(model, options.optim, self.total_steps)
        self.graphed = (
            GraphedLoss(self.loss_of, self.optimizers.parameters, 1 / options.packs_per_step)
            if machine.graphs and not self.sharded
            else None
        )
        self.average = (
            Average(self.optimizers.parameters, options.optim.average) if options.optim.average else None
        )
        self.gauge = Gauge(
            model.config,
            options.ttt_steps,
            machine.device,
            bfloat16=machine.bfloat16,
            train_lm_head=model.lm_head.weight.requires_grad,
        )
        self.window = Window(options.ttt_steps, machine.device)
        self.step = 0
        self.tokens = 0

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self, observer: Observer) -> None:
        """Train to the last step. Raises TrainingError when the loss is not finite or the data ends early."""
        self.model.train()
        window = self.window
        window.restart()
        stream = iter(self.packs)
        packs_per_step = self.options.packs_per_step
        validate_every = self.options.validate_every or max(1, self.packs.per_epoch() // packs_per_step)
        while self.step < self.total_steps:
            rate, norm = self._update(stream, window)
            self.step += 1
            last = self.step == self.total_steps
            if self.step % self.options.log_every == 0 or last:
                accuracy, extra = window.close(self.workers)
                extra |= self.gauge.read(extra.pop("seconds"))
                self.tokens += int(extra["tokens"])
                self._require_finite(accuracy, norm)
                extra |= {
                    "learning_rate": rate,
                    "gradient_norm": float(norm),
                    "tokens_seen": float(self.tokens),
                }
                observer.trained(self.step, accuracy, extra)
            with window.paused():
                if last or self.step % validate_every == 0:
                    with self.judged():
                        observer.validate(self.step)
                observer.checkpoint(self.step, last)

    def _update(self, stream: Iterator[Pack], window: Window) -> tuple[float, Tensor]:
        for _ in range(self.rounds):
            pack = next(stream, None)
            if pack is None:
                raise TrainingError("the training packs ended before the last step; give packs without end")
            self.gauge.count(pack)
            with self.gauge.working():
                window.add(*self.add_gradients(pack), pack.tokens)
        with self.gauge.working():
            if not self.sharded:  # shards are summed as they are made
                self.workers.sum_(*[p.grad for p in self.optimizers.parameters if p.grad is not None])
            rate, norm = self.optimizers.step(self.step)
            if self.average is not None:
                self.average.update(self.step)
        return rate, norm

    def add_gradients(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Run one pack forward and backward, adding to the gradients of this update; its per-step sums and counts."""
        if self.graphed is not None:
            return self.graphed(pack)
        loss, sums, counts = self.loss_of(pack)
        (loss / self.options.packs_per_step).backward()
        return sums, counts

    def _require_finite(self, accuracy: Accuracy, norm: Tensor) -> None:
        if not math.isfinite(float(norm)) or not all(map(math.isfinite, accuracy.losses)):
            raise TrainingError(
                f"the loss or its gradient is not finite at step {self.step} (gradient norm {float(norm)}); lower --optim.learning-rate, "
                "and check the states with headrace verify"
            )

    def judged(self) -> _Judged:
        """A context in which every worker holds the whole weights that validation and the saved drafter use, in eval mode."""
        return _Judged(self.loss_of, self.average)


class _Judged:
    """Swaps the averaged weights in and gathers what is sharded; puts training weights, shards and mode back."""

    def __init__(self, module: PackLoss, average: Average | None) -> None:
        self.module, self.average = module, average

    def __enter__(self) -> None:
        self.was_training = self.module.model.training
        self.module.model.eval()
        if self.average is not None:
            self.average.swap()
        gather(self.module)

    def __exit__(self, *_: Any) -> None:
        scatter(self.module)
        if self.average is not None:
            self.average.swap()
        self.module.model.train(self.was_training)


class Window:
    """Counts since the last log line, kept on the device so that no update waits for them."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.sums = torch.zeros(steps, dtype=torch.float64, device=device)
        self.counts = torch.zeros(len(COUNTERS), steps, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(1, dtype=torch.int64)
        self.started = 0.0

    def restart(self) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the rate."""
        begun = time.perf_counter()
        yield
        self.started += time.perf_counter() - begun

    def add(self, sums: Tensor, counts: Tensor, tokens: int) -> None:
        """Count one pack."""
        self.sums += sums.double()
        self.counts += counts
        self.tokens += tokens

    def close(self, workers: Workers) -> tuple[Accuracy, dict[str, float]]:
        """Counts over all workers; tokens, seconds and tokens per second. The window begins anew."""
        total = self.tokens.to(self.sums.device)
        workers.sum_(self.sums, self.counts, total)
        # Copies: on the CPU .numpy() shares the memory that is cleared below.
        accuracy = Accuracy(self.counts.cpu().numpy().copy(), self.sums.cpu().numpy().copy())
        elapsed = max(1e-9, time.perf_counter() - self.started)
        extra = {"tokens": float(total), "tokens_per_second": float(total) / elapsed, "seconds": elapsed}
        for tensor in (self.sums, self.counts, self.tokens):
            tensor.zero_()
        self.restart()
        return accuracy, extra

    def state_dict(self) -> dict[str, Tensor]:
        """The open window, so that a resumed run logs what an unbroken one would."""
        return {"sums": self.sums, "counts": self.counts, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.sums.copy_(state["sums"])
        self.counts.copy_(state["counts"])
        self.tokens.copy_(state["tokens"])
