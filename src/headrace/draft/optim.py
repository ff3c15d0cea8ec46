"""Optimizers and the learning-rate schedule: AdamW for everything, or Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.draft.options import OptimOptions
from headrace.draft.sharding import local, locals_of, part_of, put, whole, whole_from_part

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's Newton-Schulz coefficients (K. Jordan, 2024)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of matrices [B, m, n] towards 1 by a quintic Newton-Schulz iteration."""
    a, b, c = _QUINTIC
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.to(torch.bfloat16) if x.is_cuda else x
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = (x if wide else x.transpose(1, 2)).to(matrices.dtype)
    return out


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized. Matrices of one shape are stacked, so a step launches few kernels.

    Updates are scaled to the RMS of an AdamW step (0.2 * sqrt(max(m, n))), so that one learning rate serves both. Only a
    whole matrix can be orthogonalized: where parameters are sharded, momentum is kept in shards, and every worker gathers the
    matrices of one shape, makes their update and keeps its part.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                self._update(group, shape, parameters)

    def _update(self, group: dict[str, Any], shape: torch.Size, parameters: list[Tensor]) -> None:
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
        moved = locals_of(buffers)
        gradients = locals_of([p.grad for p in parameters if p.grad is not None])
        torch._foreach_lerp_(moved, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, moved, group["momentum"])
        matrices = [whole_from_part(n, p) for n, p in zip(nesterov, parameters, strict=True)]
        update = orthogonalize(torch.stack(matrices)) * (0.2 * math.sqrt(max(shape)))
        parts = [part_of(u, p) for u, p in zip(update.unbind(0), parameters, strict=True)]
        weights = locals_of(parameters)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, parts, alpha=-group["lr"])


class Optimizers:
    """The optimizers of a run as one; sets the learning rate of each step."""

    def __init__(self, model: nn.Module, options: OptimOptions, total_steps: int) -> None:
        self.options, self.total = options, max(1, total_steps)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        matrices = [
            p
            for n, p in named
            if p.dim() == 2 and options.kind == "muon" and not n.startswith(("lm_head", "embed_tokens"))
        ]
        chosen = {id(p) for p in matrices}
        decayed = [p for p in self.parameters if id(p) not in chosen and p.dim() >= 2]
        plain = [p for p in self.parameters if id(p) not in chosen and p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.fused = all(p.is_cuda for p in self.parameters)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [g for g in groups if g["params"]],
                lr=options.learning_rate,
                betas=(options.beta1, options.beta2),
                fused=self.fused,
            )
        ]
        if matrices:
            self.optimizers.append(Muon(matrices, options.muon_rate, weight_decay=options.weight_decay))
        self._base = [o.param_groups[0]["lr"] for o in self.optimizers]

    def factor(self, step: int) -> float:
        """Share of the peak rate at ``step`` (0-based): linear warm-up, then cosine, linear or constant to the floor."""
        options = self.options
        warm = max(1, round(options.warmup * self.total))
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm + 1) / max(1, self.total - warm))
        shape = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[
            options.decay
        ]
        return options.floor + (1 - options.floor) * shape

    def step(self, step: int) -> tuple[float, Tensor]:
        """Clip gradients, update, clear them. Returns the learning rate and the gradient norm before clipping."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients, foreach=True))
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.options.clip, norm, foreach=True)
        factor = self.factor(step)
        for optimizer, base in zip(self.optimizers, self._base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return self._base[0] * factor, norm

    def state_dict(self) -> dict[str, Tensor]:
        """The whole moments of every parameter, by place in :attr:`parameters`; all workers call it together."""
        places = {id(p): i for i, p in enumerate(self.parameters)}
        return {
            f"{places[id(p)]}.{name}": whole(value)
            for optimizer in self.optimizers
            for p, state in optimizer.state.items()
            for name, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state_dict`."""
        owner = {id(p): o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        for name, value in state.items():
            place, what = name.split(".", 1)
            parameter = self.parameters[int(place)]
            state_of = owner[id(parameter)].state[parameter]
            if value.dim() > 0:
                state_of[what] = torch.zeros_like(parameter)
                put(state_of[what], value)
            else:  # AdamW counts its steps in a CPU tensor unless fused
                state_of[what] = value.to(parameter.device if self.fused else "cpu")


class Average:
    """Exponential moving average of the trained weights; what is validated and saved when it is on."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the current weights; early steps forget faster, so the start does not linger."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            locals_of(self.values), locals_of([p.detach() for p in self.parameters]), 1 - decay
        )

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their average; call twice to come back."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            mine, average = local(parameter.detach()), local(value)
            current = mine.clone()
            mine.copy_(average)
            average.copy_(current)
