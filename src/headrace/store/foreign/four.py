"""Four ``.pt`` files a sample: three aux states and the final one, each a bare tensor [tokens, hidden]; perhaps the ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.errors import ConfigError, InputError
from headrace.store.foreign.base import ForeignLayout, Sample, load_torch, natural, save_torch, states, vector


@dataclass(frozen=True)
class FourFiles(ForeignLayout):
    """File names follow patterns with ``{sample}`` and, for aux states, ``{i}``; both a folder a sample and flat names work."""

    name = "four-pt"
    final_normed = None
    aux_pattern: str = "{sample}/aux_{i}.pt"
    final_pattern: str = "{sample}/final.pt"
    ids_pattern: str = "{sample}/input_ids.pt"
    aux: int = 3

    def __post_init__(self) -> None:
        for pattern, fields in ((self.aux_pattern, ("{sample}", "{i}")), (self.final_pattern, ("{sample}",))):
            if any(pattern.count(field) != 1 for field in fields):
                raise ConfigError(f"pattern {pattern!r} must name each of {list(fields)} once")

    def find(self, folder: Path) -> list[Path]:
        return sorted((p for p in folder.rglob("*.pt") if self._sample(folder, p)), key=natural)

    def _sample(self, folder: Path, path: Path) -> str:
        pattern = re.escape(self.final_pattern).replace(r"\{sample\}", "(?P<sample>.+)")
        match = re.fullmatch(pattern, path.relative_to(folder).as_posix())
        return match["sample"] if match else ""

    def _file(self, folder: Path, pattern: str, sample: str, index: int = 0) -> Path:
        return folder / pattern.replace("{sample}", sample).replace("{i}", str(index))

    def read(self, folder: Path, path: Path) -> Sample:
        sample = self._sample(folder, path)
        final = states(path, load_torch(path), "the final state")
        aux = []
        for index in range(self.aux):
            file = self._file(folder, self.aux_pattern, sample, index)
            if not file.exists():
                raise InputError(f"{file} is missing beside {path}")
            aux.append(states(file, load_torch(file), "an aux state"))
            if aux[-1].shape != final.shape:
                raise InputError(f"{file} has shape {list(aux[-1].shape)} and {path} {list(final.shape)}")
        ids_file = self._file(folder, self.ids_pattern, sample)
        ids = vector(ids_file, load_torch(ids_file), "of ids", np.int32) if ids_file.exists() else None
        return Sample(sample, aux, final, ids)

    def place(self, folder: Path, number: int, key: str) -> Path:
        return self._file(folder, self.final_pattern, key)

    def write(self, folder: Path, number: int, key: str, sample: Sample) -> None:
        for index, aux in enumerate(sample.aux):
            save_torch(self._file(folder, self.aux_pattern, key, index), aux.clone())
        if sample.ids is not None:
            save_torch(
                self._file(folder, self.ids_pattern, key), torch.from_numpy(sample.ids.astype(np.int64))
            )
        save_torch(self.place(folder, number, key), sample.final.clone())
