"""One process a GPU, started by torchrun: whose share of the packs is whose, and the sums that have to cross.

Packs are what is shared out (data parallelism); :mod:`headrace.draft.sharding` splits the drafter too, where it is asked for.
Gradients are summed once, before clipping, and counts are added once: nothing is reduced twice.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.draft.options import MachineOptions


@dataclass(frozen=True)
class Workers:
    """This process among its peers."""

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def sum_(self, *tensors: Tensor) -> None:
        """Add equal-shaped tensors over all workers, in place, in one exchange a dtype."""
        if self.count == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([t.reshape(-1) for t in group])
            dist.all_reduce(flat)
            for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def agree(self, wish: bool) -> bool:
        """The first worker's ``wish``, for all: what the clock decides must not differ between workers."""
        if self.count == 1:
            return wish
        flag = torch.tensor([int(wish and self.first)], device=self.device)
        self.sum_(flag)
        return bool(flag)

    def same(self, value: int) -> bool:
        """Whether all workers have the same ``value``; all call it together."""
        if self.count == 1:
            return True
        found = torch.tensor([value, -value], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found[0]) == -int(found[1])

    def barrier(self) -> None:
        """Wait for all."""
        if self.count > 1:
            dist.barrier()


def join(machine: MachineOptions) -> Workers:
    """Join the workers that torchrun started (or be the only one) and pick this one's device.

    Raises ConfigError for a device that is not there.
    """
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    name = machine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":  # torch wants to be told which, also when there is only one
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"device {name!r} is not known: {str(exc).splitlines()[0]}") from exc
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {name!r} is not there (torch sees {torch.cuda.device_count()} CUDA devices); set --machine.device cpu"
            )
        torch.cuda.set_device(device)
    if count > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    return Workers(rank, count, device)


def _leave() -> None:
    """Take the group down in order: threads of it that outlive Python abort the process, which torchrun calls a failure."""
    if dist.is_initialized():
        dist.destroy_process_group()
