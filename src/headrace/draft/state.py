"""Checkpoints that training resumes from exactly: ``checkpoints/step-00000100/{state.safetensors, state.json}``.

A checkpoint is written under another name, synced, given ``state.json`` with the hash of its tensors last, and renamed.
Loading takes the newest whole one and says which it passed over and why. No pickle is involved.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.draft.checkpoint import file_hash, load_tensors, save_tensors
from headrace.draft.sharding import put, whole
from headrace.draft.trainer import Trainer
from headrace.errors import ConfigError, CorruptError, SpecMismatchError
from headrace.files import fsync_folder, read_json, write_json

TENSORS, FACTS = "state.safetensors", "state.json"


def save_state(folder: Path, trainer: Trainer, facts: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint of ``trainer`` and JSON-able ``facts`` under ``folder``; older ones beyond ``keep`` are removed.

    Every worker calls this; the first one writes. Tensors are whole, whatever they were split over, so that any number of
    workers can go on from it.
    """
    window = {name: tensor.clone() for name, tensor in trainer.window.state_dict().items()}
    trainer.workers.sum_(*window.values())
    tensors = _tensors(trainer, window)
    path = folder / f"step-{trainer.step:08d}"
    if not trainer.workers.first:
        return path
    work = folder / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    work.mkdir(parents=True)
    try:
        save_tensors(work / TENSORS, tensors)
        document = {
            "step": trainer.step,
            "tokens": trainer.tokens,
            "packs": trainer.packs.state_dict(),
            "facts": facts,
            "hash": file_hash(work / TENSORS),
        }
        write_json(work / FACTS, document)
        if path.exists():
            shutil.rmtree(path)
        work.replace(path)
        fsync_folder(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for old in _checkpoints(folder)[keep:]:
        shutil.rmtree(old)
    return path


def load_state(folder: Path, trainer: Trainer, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Bring ``trainer`` to the newest whole checkpoint under ``folder`` and return its facts; None when there is none.

    A damaged checkpoint is named, and the one before it is used. Raises SpecMismatchError when the data has changed.
    """
    if trainer.workers.first:
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
    found = _newest(folder, say)
    step = -1 if found is None else int(found[1]["step"])
    if not trainer.workers.same(step):
        raise ConfigError(
            f"the workers do not see the same checkpoints in {folder} (this one step {step}); give an --out on storage that all hosts share"
        )
    if found is not None:
        path, document, tensors = found
        trainer.packs.load_state_dict(document["packs"])
        _restore(trainer, tensors, path)
        trainer.step, trainer.tokens = int(document["step"]), int(document["tokens"])
        return dict(document["facts"])
    return None


def _newest(
    folder: Path, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any], dict[str, Tensor]] | None:
    for path in _checkpoints(folder):
        try:
            return path, *_read(path)
        except CorruptError as exc:
            say(f"checkpoint {path.name} is not whole ({exc}); going back to the one before it")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        document = read_json(path / FACTS)
        if file_hash(path / TENSORS) != document["hash"]:
            raise CorruptError(f"{path / TENSORS} does not have the hash in {FACTS}")
    except (FileNotFoundError, KeyError, TypeError) as exc:
        raise CorruptError(f"{path} lacks {exc}") from exc
    return document, load_tensors(path / TENSORS)


def _tensors(trainer: Trainer, window: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    groups: dict[str, dict[str, Tensor]] = {
        "weight": dict(named),
        "optimizer": trainer.optimizers.state_dict(),
        "window": window,
        "random": {"cpu": torch.get_rng_state()},
    }
    if trainer.average is not None:
        groups["average"] = {str(i): v for i, v in enumerate(trainer.average.values)}
    return {
        f"{g}/{n}": whole(t.detach()).cpu().contiguous()
        for g, tensors in groups.items()
        for n, t in tensors.items()
    }


def _restore(trainer: Trainer, tensors: dict[str, Tensor], path: Path) -> None:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, rest = name.split("/", 1)
        groups.setdefault(group, {})[rest] = tensor
    named = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
    if {n: p.shape for n, p in named.items()} != {n: t.shape for n, t in groups["weight"].items()}:
        raise SpecMismatchError(
            f"checkpoint {path} holds another drafter than the one to train; give another --out or the same settings"
        )
    with torch.no_grad():
        for name, parameter in named.items():
            put(parameter, groups["weight"][name])
        if trainer.average is not None:
            for i, value in enumerate(trainer.average.values):
                put(value, groups["average"][str(i)])
    trainer.optimizers.load_state_dict(groups["optimizer"])
    if trainer.workers.first:  # it holds the counts of all; the others begin at nothing
        trainer.window.load_state_dict(groups["window"])
    torch.set_rng_state(groups["random"]["cpu"])
