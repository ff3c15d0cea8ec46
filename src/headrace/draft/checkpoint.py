"""A drafter's folder: ``config.json`` (shape, spec, lineage, hash of the weights) and ``model.safetensors``; whole or not there.

``config.json`` is written last and removed first, so a folder that has one has the weights it speaks of.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from headrace.config import build
from headrace.draft.model import Eagle3Draft
from headrace.draft.shape import DraftConfig
from headrace.errors import ConfigError, CorruptError, SpecMismatchError, StorageFullError
from headrace.files import FULL_ERRNOS, fsync_folder, read_json, write_json
from headrace.target import Target
from headrace.types import CaptureSpec

FORMAT = "headrace-draft"
VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
OWN_METHOD = "eagle3"


@dataclass(frozen=True)
class Draft:
    """A drafter as read from its folder."""

    model: Eagle3Draft
    spec: CaptureSpec
    """What it was trained on: target, taps, dtype, norm."""
    lineage: dict[str, Any] = field(default_factory=dict)
    """Data, settings and metrics of the run that made it."""
    weights_hash: str = ""
    """Hash of model.safetensors, named in reports so that a number can be traced to its weights."""


def save_draft(folder: Path, model: Eagle3Draft, spec: CaptureSpec, lineage: dict[str, Any]) -> None:
    """Write ``folder``; an older drafter there is replaced. The target's embedding is not copied into it.

    Raises StorageFullError when space runs out; what was there is then gone or whole, never mixed.
    """
    tensors = model.state_dict()
    if not model.config.own_embedding:
        del tensors["embed_tokens.weight"]
    write_drafter(folder, OWN_METHOD, model.config.model_dump(mode="json"), tensors, spec, lineage)


def write_drafter(
    folder: Path,
    method: str,
    shape: dict[str, Any],
    tensors: dict[str, Tensor],
    spec: CaptureSpec,
    lineage: dict[str, Any],
) -> None:
    """Write a drafter of any method: ``shape`` is what its weights need to mean something, with ``taps`` among it.

    Raises StorageFullError when space runs out; what was there is then gone or whole, never mixed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (folder / CONFIG).unlink()
    save_tensors(folder / WEIGHTS, {name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    write_json(
        folder / CONFIG,
        {
            "format": FORMAT,
            "version": VERSION,
            "architecture": method,
            "draft": shape,
            "spec": spec.to_dict(),
            "weights": {"file": WEIGHTS, "hash": file_hash(folder / WEIGHTS)},
            "lineage": lineage,
        },
    )


def read_drafter(folder: Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document and the proven weights of a drafter of any method.

    Raises ConfigError for a folder that is no drafter, CorruptError for weights that are not the ones written with its
    document, SpecMismatchError when it was trained for another target.
    """
    document = read_config(folder)
    _require_weights(document, folder)
    target.require(_spec(document, folder), f"drafter {folder}")
    return document, load_tensors(folder / WEIGHTS)


def _require_weights(document: dict[str, Any], folder: Path) -> str:
    expected = str(document["weights"]["hash"])
    if file_hash(folder / WEIGHTS) != expected:
        raise CorruptError(
            f"{folder / WEIGHTS} is not the file its {CONFIG} was written for; train or import the drafter again"
        )
    return expected


def load_draft(
    folder: Path, target: Target | None = None, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Draft:
    """Read a drafter in eval mode, its weights in ``dtype``.

    ``target`` supplies the embedding (and is checked against the drafter's spec); when absent, the folder or hub id
    that the spec names is opened. Raises ConfigError for a folder that is no drafter, CorruptError for damaged weights,
    SpecMismatchError when ``target`` is not the one it was trained for.
    """
    document = read_config(folder)
    method = document.get("architecture", OWN_METHOD)
    if method != OWN_METHOD:
        raise ConfigError(
            f"{folder} is a drafter of the method {method!r}; this command knows {OWN_METHOD} drafters only (evaluate knows both)"
        )
    config = build(DraftConfig, document["draft"], str(folder / CONFIG))
    spec = _spec(document, folder)
    expected = _require_weights(document, folder)
    tensors = load_tensors(folder / WEIGHTS)
    if not config.own_embedding:
        target = target or Target.open(spec.target, spec.revision)
    if target is not None:
        target.require(spec, f"drafter {folder}")
    if not config.own_embedding and target is not None:
        tensors["embed_tokens.weight"] = target.embedding
    with torch.device("meta"):
        model = Eagle3Draft(config)
    assign(model, tensors, str(folder / WEIGHTS))
    model = model.to(device=device, dtype=dtype)
    return Draft(model.eval().requires_grad_(False), spec, dict(document["lineage"]), expected)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a drafter. Raises ConfigError naming what is missing or of another kind."""
    if not folder.is_dir():
        raise ConfigError(f"drafter folder {folder} does not exist; give the --out folder of headrace train")
    try:
        document = read_json(folder / CONFIG)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {CONFIG}: no finished drafter is there; run headrace train again, it goes on"
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(
            f"{folder / CONFIG} is not a Headrace drafter; convert it with headrace import-draft"
        )
    if document.get("version") != VERSION:
        raise ConfigError(
            f"{folder / CONFIG} has format version {document.get('version')}, this Headrace reads {VERSION}; update Headrace"
        )
    missing = [key for key in ("draft", "spec", "weights", "lineage") if key not in document]
    if missing or not (folder / WEIGHTS).is_file():
        raise CorruptError(f"{folder} lacks {missing or WEIGHTS}; train or import the drafter again")
    return document


def _spec(document: dict[str, Any], folder: Path) -> CaptureSpec:
    try:
        return CaptureSpec.from_dict(document["spec"])
    except (ValueError, TypeError) as exc:
        raise SpecMismatchError(f"{folder / CONFIG}: {exc}; train or import the drafter again") from exc


def assign(model: Eagle3Draft, tensors: dict[str, Tensor], where: str) -> None:
    """Give ``model`` (on the meta device or not) exactly ``tensors``. Raises CorruptError for any missing, foreign or misshapen one."""
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    lines = [f"lacks {name}" for name in shapes if name not in tensors]
    lines += [f"has unknown {name}" for name in tensors if name not in shapes]
    lines += [
        f"{n} is {list(t.shape)}, expected {list(shapes[n])}"
        for n, t in tensors.items()
        if n in shapes and tuple(t.shape) != shapes[n]
    ]
    if lines:
        raise CorruptError(
            f"{where}: {'; '.join(lines[:4])}. Its config.json speaks of other weights; train or import the drafter again"
        )
    model.load_state_dict(tensors, assign=True)
    model.embed_tokens.weight.requires_grad_(model.config.own_embedding)
    if model.rotary.inverse.is_meta:  # not in the weights, so a model made on the meta device lacks it
        model.rotary = type(model.rotary)(model.config.rope, model.config.head_dim)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file that appears whole or not at all. Raises StorageFullError when space runs out."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tmp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        save_file(tensors, str(tmp), {"format": "pt"})
        with tmp.open("rb") as file:
            os.fsync(file.fileno())
        tmp.replace(path)
        fsync_folder(path.parent)
    except (OSError, SafetensorError) as exc:
        if getattr(exc, "errno", None) in FULL_ERRNOS or "No space left" in str(exc) or "quota" in str(exc):
            raise StorageFullError(
                f"no space left to write {path}; free some and run the command again, it resumes"
            ) from exc
        raise
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises CorruptError naming it when it is not one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(str(path)))
    except (SafetensorError, OSError) as exc:
        raise CorruptError(f"{path} cannot be read ({exc}); restore it or make it again") from exc


def file_hash(path: Path) -> str:
    """32 hex digits of a file's bytes (xxh3-128)."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
