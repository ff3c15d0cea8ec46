"""The layouts that keep a dict in one ``torch.save`` file a sample: SpecForge and ModelOpt.

Read in their sources: SpecForge ``scripts/prepare_hidden_states.py``, ModelOpt ``collect_hidden_states/compute_hidden_states_*.py``
and ``modelopt/torch/speculative/eagle/utils.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.store.foreign.base import (
    ForeignLayout,
    Sample,
    load_dict,
    natural,
    save_torch,
    split_aux,
    states,
    vector,
)

GROUP = 2000
"""Files a folder, SpecForge's default."""


@dataclass(frozen=True)
class SpecForge(ForeignLayout):
    """``rows_A-B/data_N.ckpt``: input_ids [T], loss_mask [T], hidden_state [1, T, H], aux_hidden_state [1, T, K*H].

    Its trainer feeds hidden_state to ``lm_head`` directly.
    """

    name = "specforge"
    final_normed = True

    def find(self, folder: Path) -> list[Path]:
        return sorted([*folder.rglob("data_*.ckpt"), *folder.rglob("data_*.ckpt.gz")], key=natural)

    def read(self, folder: Path, path: Path) -> Sample:
        data = load_dict(path)
        final = states(path, data.get("hidden_state"), "hidden_state")
        aux = split_aux(path, states(path, data.get("aux_hidden_state"), "aux_hidden_state"), final)
        ids = vector(path, data.get("input_ids"), "input_ids", np.int32)
        mask = vector(path, data.get("loss_mask"), "loss_mask", np.bool_)
        return Sample(path.name.split(".")[0].removeprefix("data_"), aux, final, ids, mask)

    def place(self, folder: Path, number: int, key: str) -> Path:
        first = number // GROUP * GROUP
        return folder / f"rows_{first}-{first + GROUP}" / f"data_{number}.ckpt"

    def write(self, folder: Path, number: int, key: str, sample: Sample) -> None:
        assert sample.ids is not None and sample.mask is not None
        value = {
            "input_ids": torch.from_numpy(sample.ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(sample.mask.astype(np.int64)),
            "hidden_state": sample.final.clone()[None],
            "aux_hidden_state": torch.cat(sample.aux, dim=-1)[None],
        }
        save_torch(self.place(folder, number, key), value)


@dataclass(frozen=True)
class ModelOpt(ForeignLayout):
    """``CONVERSATION.pt``: input_ids [T], hidden_states [T, H], aux_hidden_states [T, K*H], conversation_id, perhaps loss_mask.

    Its reader takes the final state for normed unless ``hidden_states_prenorm`` is there and true; the dumping scripts do
    not write that field, and the one that runs vLLM stores the state before the norm. So a file without it says nothing.
    """

    name = "modelopt"
    final_normed = None

    def find(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*.pt"), key=natural)

    def read(self, folder: Path, path: Path) -> Sample:
        data = load_dict(path)
        final = states(path, data.get("hidden_states"), "hidden_states")
        aux = data.get("aux_hidden_states")
        split = (
            []
            if aux is None or aux.numel() == 0
            else split_aux(path, states(path, aux, "aux_hidden_states"), final)
        )
        prenorm = data.get("hidden_states_prenorm")
        return Sample(
            path.stem,
            split,
            final,
            vector(path, data.get("input_ids"), "input_ids", np.int32),
            vector(path, data["loss_mask"], "loss_mask", np.bool_) if "loss_mask" in data else None,
            None if prenorm is None else not bool(prenorm),
        )

    def place(self, folder: Path, number: int, key: str) -> Path:
        return folder / f"{key}.pt"

    def write(self, folder: Path, number: int, key: str, sample: Sample) -> None:
        assert sample.ids is not None and sample.mask is not None
        value = {
            "input_ids": torch.from_numpy(sample.ids.astype(np.int64)),
            "hidden_states": sample.final.clone(),
            "aux_hidden_states": torch.cat(sample.aux, dim=-1) if sample.aux else torch.empty(0),
            "loss_mask": torch.from_numpy(sample.mask.astype(np.int64)),
            "hidden_states_prenorm": not sample.final_normed,
            "conversation_id": key,
        }
        save_torch(self.place(folder, number, key), value)
