"""What an update needs: the model against what autograd really keeps, and refusals that compute the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.draft import memory
from headrace.draft.memory import GIB, Need, activations, need
from headrace.draft.options import TrainOptions
from headrace.draft.train import train
from headrace.draft.trainer import Machine
from headrace.draft.ttt import Unroll
from headrace.errors import ConfigError

from .conftest import World
from .test_train import config, quiet
from .toys import toy_config, toy_draft, toy_pack

CPU = Machine(torch.device("cpu"), False, "eager", False)


def kept_bytes(shape: Any, steps: int, lengths: list[int], share: float) -> tuple[int, int, int]:
    """Bytes that the forward pass leaves for the backward pass (weights apart), rows, starts."""
    model = toy_draft(shape)
    pack = toy_pack(shape, [[i >= n * (1 - share) for i in range(n)] for n in lengths])
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:  # holding the tensor keeps its address from being used again
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        Unroll(model)(pack, steps)
    return sum(size for size, _ in kept.values()), pack.layout.tokens, len(pack.layout.starts)


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize(
    ("changes", "lengths", "share"),
    [
        ({}, [64] * 3, 1.0),
        ({}, [128, 100], 0.5),
        ({"hidden_size": 96, "intermediate_size": 64}, [64] * 2, 1.0),
        ({"intermediate_size": 512}, [64] * 2, 1.0),
        ({"num_heads": 12, "num_kv_heads": 12}, [64] * 2, 0.8),
        ({"fc_norm": "each"}, [64] * 2, 1.0),
    ],
)
def test_the_model_is_what_autograd_keeps(
    changes: dict[str, Any], lengths: list[int], share: float, steps: int
) -> None:
    """Within a quarter, whatever is large: steps, width, MLP, heads, norms."""
    shape = toy_config(vocab_size=300, draft_vocab_size=100, max_positions=4096, **changes)
    kept, rows, starts = kept_bytes(shape, steps, lengths, share)
    row, start = activations(shape, steps, CPU, longest=max(lengths))
    assert row * rows + start * starts == pytest.approx(kept, rel=0.25)


def test_the_limit_is_where_the_need_meets_what_is_there() -> None:
    found = Need(fixed=3 * GIB, per_token=1 << 20)
    assert found.of(1024) == 4 * GIB
    assert found.most(4 * GIB) == 1024
    assert found.most(GIB) == 0


def test_sharding_takes_the_optimizer_apart_and_leaves_the_activations() -> None:
    shape = toy_config()
    options = TrainOptions()
    alone = need(shape, options, CPU, starts_share=0.7, longest=100)
    shared = need(shape, options, CPU, starts_share=0.7, longest=100, shards=8)
    assert shared.per_token == alone.per_token and shared.fixed < alone.fixed


def test_more_steps_and_more_supervised_tokens_need_more() -> None:
    shape = toy_config()
    few, many = (
        need(shape, TrainOptions(ttt_steps=s), CPU, starts_share=0.5, longest=100).per_token for s in (3, 7)
    )
    assert 1.8 * few < many
    assert need(shape, TrainOptions(ttt_steps=7), CPU, starts_share=1.0, longest=100).per_token > many


def test_a_pack_that_cannot_fit_is_refused_with_the_limit(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128K tokens on a machine with a GiB to spare; nothing is written. What is smaller trains there."""
    monkeypatch.setattr(memory, "available", lambda device: GIB // 2)
    with pytest.raises(
        ConfigError, match=r"a pack of 131,072 tokens unrolled over 3 steps needs about .* GiB"
    ) as info:
        train(config(world, tmp_path / "d", tokens_per_pack=131072), quiet)
    assert not (tmp_path / "d").exists()
    most = int(str(info.value).split("at most ")[1].split(" ")[0].replace(",", ""))
    assert 1000 < most < 131072 and f"set tokens_per_pack to at most {most:,}" in str(info.value)
    train(config(world, tmp_path / "d", tokens_per_pack=most, max_steps=1), quiet)


def test_a_row_that_is_too_long_is_told_from_a_pack_that_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match="one row is never split over devices: prepare rows of at most"):
        train(config(world, tmp_path / "d"), quiet)
