"""Small drafters and packs with nothing special about them: random everything, norm weights never ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.draft.layout import make_layout
from headrace.draft.model import Eagle3Draft
from headrace.draft.shape import DraftConfig
from headrace.draft.ttt import Pack


def toy_config(**changes: Any) -> DraftConfig:
    values: dict[str, Any] = {
        "taps": (1, 2, 4),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 30,
        "draft_vocab_size": 12,
        "max_positions": 64,
        "norm_eps": 1e-5,
    }
    return DraftConfig(**{**values, **changes})


def toy_draft(config: DraftConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Eagle3Draft:
    generator = torch.Generator().manual_seed(seed)
    model = Eagle3Draft(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        model.d2t.copy_(ids - torch.arange(config.draft_vocab_size))
        model.t2d.zero_()[ids] = True
    model.lm_head.weight.requires_grad_(False)
    return model.to(dtype)


def toy_pack(
    config: DraftConfig,
    masks: list[list[bool]],
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    **layout: Any,
) -> Pack:
    """Random ids and states for documents with the given masks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(m) for m in masks]
    shape = make_layout(lengths, np.concatenate([np.array(m, dtype=bool) for m in masks]), **layout)
    rows = shape.tokens
    ids = torch.randint(0, config.vocab_size, (rows,), generator=generator)
    taps = torch.randn(rows, len(config.taps) * config.hidden_size, generator=generator)
    final = torch.randn(rows, config.hidden_size, generator=generator)
    return Pack(ids, taps.to(dtype), final.to(dtype), shape)


def draft_ids(model: Eagle3Draft) -> Tensor:
    """Target ids of the draft vocabulary."""
    return model.t2d.nonzero()[:, 0]
