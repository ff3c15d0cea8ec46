"""Weights, gradients and optimizer split over workers (PyTorch's FSDP2), and the few places that need a whole tensor again.

The drafter is one layer, so it is one group: gathered when a pack's loss begins, its gradients summed into shards when the
backward pass ends. Everything here also takes plain tensors and then does nothing, so callers have one path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from headrace.draft.model import Eagle3Draft
from headrace.draft.workers import Workers


def shard(module: nn.Module, workers: Workers) -> None:
    """Split the trained parameters of ``module`` over all workers, in place; gradients are summed, not averaged.

    Every worker must hold the same values before. Frozen parameters stay whole everywhere: each step reads them and none
    has a gradient or an optimizer state. ``module`` must be called (not pieces of it) for the gathering to happen.
    """
    mesh = init_device_mesh(workers.device.type, (workers.count,))
    frozen = {p for p in module.parameters() if not p.requires_grad}
    fully_shard(module, mesh=mesh, ignored_params=frozen)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # A plain sum: the scaled reductions are NCCL's alone, and gloo has to give the same numbers.
    module.set_force_sum_reduction_for_comms(True)


def gather(module: nn.Module) -> None:
    """Make the parameters of a sharded ``module`` whole in place, until :func:`scatter`; all workers call it together."""
    if isinstance(module, FSDPModule):
        module.unshard()


def scatter(module: nn.Module) -> None:
    """Undo :func:`gather`."""
    if isinstance(module, FSDPModule):
        module.reshard()


def unsharded(model: Eagle3Draft) -> Eagle3Draft:
    """``model`` as a plain module that can be saved, while its parameters are gathered; no exchange.

    The state dict of a sharded module is its shards, whatever is gathered.
    """
    parameters = dict(model.named_parameters())
    with torch.device("meta"):
        plain = Eagle3Draft(model.config)
    buffers = dict(model.named_buffers())
    tensors = {name: parameters.get(name, buffers.get(name)) for name in plain.state_dict()}
    plain.load_state_dict({n: t.detach() for n, t in tensors.items() if t is not None}, assign=True)
    return plain


def local(tensor: Tensor) -> Tensor:
    """This worker's part of ``tensor`` (shares its memory); a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`local` of each."""
    return [local(t) for t in tensors]


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``, gathered from the workers, which all have to call this in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of ``full`` (the same on every worker) that this worker holds of ``like``; no exchange."""
    if not isinstance(like, DTensor):
        return full
    spread = DTensor.from_local(full, like.device_mesh, [Replicate()], run_check=False)
    return spread.redistribute(placements=like.placements).to_local()


def whole_from_part(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which every worker gives the ``part`` that it holds of ``like``."""
    if not isinstance(like, DTensor):
        return part
    placements = [p for p in like.placements if isinstance(p, Shard)]
    spread = DTensor.from_local(
        part, like.device_mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return spread.full_tensor()


@torch.no_grad()
def put(into: Tensor, full: Tensor) -> None:
    """Copy this worker's part of ``full`` into ``into``."""
    local(into).copy_(part_of(full.to(into.device), into))
