"""What a foreign layout is: how its samples are found, read and written. What its files cannot say is not decided here."""

from __future__ import annotations

import gzip
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # what torch.load raises when it refuses a file; nothing is unpickled here
from typing import Any, ClassVar

import numpy as np
import torch

from headrace.errors import InputError
from headrace.files import atomic_write
from headrace.store.format import Array


@dataclass(frozen=True)
class Sample:
    """One sample as another tool stores it. T tokens, K aux states."""

    name: str
    """How the tool calls it: a number, a conversation id, a key."""
    aux: list[torch.Tensor]
    """K of [T, hidden], in the order stored"""
    final: torch.Tensor
    """[T, hidden]"""
    ids: Array | None = None
    """int32 [T], None where the layout has none"""
    mask: Array | None = None
    """bool [T], None where the layout has none"""
    final_normed: bool | None = None
    """None where the file does not say it"""


class ForeignLayout(ABC):
    """One tool's files. Reading never runs code from a file; what cannot be read raises InputError naming the file."""

    name: ClassVar[str]
    final_normed: ClassVar[bool | None]
    """What the tool's own trainer takes the final state for; None: it does not matter to it."""

    @abstractmethod
    def find(self, folder: Path) -> list[Path]:
        """One path a sample under ``folder``, in the tool's own order; what :meth:`read` takes."""

    @abstractmethod
    def read(self, folder: Path, path: Path) -> Sample:
        """Raises InputError naming the file when it is unreadable or lacks something."""

    @abstractmethod
    def place(self, folder: Path, number: int, key: str) -> Path:
        """The file whose presence means that sample ``number`` is written whole."""

    @abstractmethod
    def write(self, folder: Path, number: int, key: str, sample: Sample) -> None:
        """Write one sample so that ``place`` appears last, whole or not at all."""

    def finish(  # noqa: B027 - most layouts keep nothing
        self, folder: Path, rows: Iterator[tuple[Array, Array]]
    ) -> None:
        """Write what the layout keeps beside the samples, from (ids, mask) of all of them in order."""


def natural(path: Path) -> list[Any]:
    """Sort key under which ``data_10`` comes after ``data_9``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def load_torch(path: Path) -> Any:
    """What ``torch.save`` wrote, tensors and plain containers only. Raises InputError naming the file."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as exc:
        reason = (str(exc).splitlines() or [""])[0]
        raise InputError(f"{path} cannot be read as tensors ({type(exc).__name__}: {reason[:120]})") from exc


def load_dict(path: Path) -> dict[str, Any]:
    """A dict of tensors. Raises InputError naming the file."""
    value = load_torch(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__} where a dict of tensors belongs")
    return value


def save_torch(path: Path, value: Any) -> None:
    """``torch.save``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        torch.save(value, file)


def states(path: Path, value: Any, what: str) -> torch.Tensor:
    """A float tensor [T, width], a leading batch axis of one taken off. Raises InputError naming file and field."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise InputError(f"{path} has no tensor {what}")
    if value.dim() == 3 and value.shape[0] == 1:
        value = value.squeeze(0)
    if value.dim() != 2:
        raise InputError(f"{path}: {what} has shape {list(value.shape)} where [tokens, hidden] belongs")
    out: torch.Tensor = value
    return out


def vector(path: Path, value: Any, what: str, dtype: type[np.int32] | type[np.bool_]) -> Array:
    """A vector of ids or of mask values. Raises InputError naming file and field."""
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{path} has no tensor {what}")
    out: Array = value.reshape(-1).numpy().astype(dtype)
    return out


def split_aux(path: Path, aux: torch.Tensor, final: torch.Tensor) -> list[torch.Tensor]:
    """Aux states concatenated along the width, cut apart. Raises InputError when they do not divide."""
    hidden = final.shape[1]
    if aux.shape[0] != final.shape[0] or aux.shape[1] % hidden:
        raise InputError(
            f"{path}: aux states {list(aux.shape)} are not a multiple of the final state's {list(final.shape)}"
        )
    return list(aux.split(hidden, dim=1))


def _is_zip(path: Path) -> bool:
    """Files of ``torch.save`` since 1.6 are zip archives and can be mapped; older ones cannot."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest that an export of ours left, None for folders of other tools."""
    try:
        value = json.loads((folder / "manifest.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) and value.get("kind") == "headrace.states-export" else None
