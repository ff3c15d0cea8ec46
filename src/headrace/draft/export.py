"""`headrace export`: a drafter as a folder that a stock serving engine loads, written, read back and compared bit by bit.

The manifest comes last and goes first, so a folder that has one has the weights and config it speaks of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace._version import __version__
from headrace.draft.card import model_card
from headrace.draft.checkpoint import (
    CONFIG,
    WEIGHTS,
    Draft,
    file_hash,
    load_draft,
    load_tensors,
    read_config,
    save_tensors,
)
from headrace.draft.config import DraftConfig
from headrace.draft.serving import TESTED, ExportConfig, check, engine_config
from headrace.errors import ConfigError, CorruptError
from headrace.files import atomic_write, read_json, write_json
from headrace.target import Target

Say = Callable[[str], None]
FORMAT = "headrace-export"
MANIFEST, CARD = "manifest.json", "README.md"


def export(config: ExportConfig, say: Say) -> dict[str, Any]:
    """Write the export and return its manifest.

    Raises ConfigError for what the engine cannot represent (nothing is written then) or a folder that holds something
    else, CorruptError when what was written does not read back as it was meant.
    """
    version = config.engine_version or TESTED[config.engine]
    spec = read_config(config.draft)["spec"]
    target = Target.open(config.model or spec["target"], config.revision or spec["revision"])
    draft = load_draft(config.draft, target)
    check(draft.model.config, target, config.engine, version)
    _require_replaceable(config.out)
    dtype = config.dtype or str(draft.model.fc.weight.dtype).removeprefix("torch.")
    tensors, shape = exported_tensors(draft, getattr(torch, dtype))
    check_tensors(shape, tensors, f"drafter {config.draft}")
    positions = config.max_positions or _context(target, draft.model.config)
    document = engine_config(shape, target, config, positions, dtype)
    say(f"writing {len(tensors)} tensors for {config.engine} {version} to {config.out}")
    _write(config.out, document, tensors)
    _read_back(config.out, document, tensors)
    manifest = _manifest(config, draft, target, version, document, tensors)
    with atomic_write(config.out / CARD) as file:
        file.write(model_card(manifest, draft).encode())
    write_json(config.out / MANIFEST, manifest)
    return manifest


def exported_tensors(draft: Draft, dtype: torch.dtype) -> tuple[dict[str, Tensor], DraftConfig]:
    """The tensors an engine needs, under its names, and the shape they have: taps in ascending order.

    The engines fuse taps in the order in which the target computes them, whatever order a config names, so the columns of
    ``fc`` follow. The map is left out for a full vocabulary, the embedding unless it is the drafter's own.
    """
    config = draft.model.config
    state = {name: tensor.detach().cpu() for name, tensor in draft.model.state_dict().items()}
    order = sorted(range(len(config.taps)), key=lambda i: config.taps[i])
    width = config.hidden_size
    columns = torch.cat([torch.arange(i * width, (i + 1) * width) for i in order])
    state["fc.weight"] = state["fc.weight"][:, columns]
    if config.fc_norm == "joint":
        state["input_norm.weight"] = state["input_norm.weight"][columns]
    elif config.fc_norm == "each":
        norms = [state[f"fc_norm.{i}.weight"] for i in order]
        state |= {f"fc_norm.{place}.weight": norm for place, norm in enumerate(norms)}
    if not config.own_embedding:
        del state["embed_tokens.weight"]
    if config.full_vocabulary:
        del state["d2t"], state["t2d"]
    out = {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in state.items()}
    return out, config.model_copy(update={"taps": tuple(config.taps[i] for i in order)})


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that both engines need for a drafter of this shape: a missing one would be served at random."""
    h, taps = config.hidden_size, len(config.taps)
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, taps * h),
        "norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
        **{
            f"{layer}{name}.weight": (h,)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        f"{layer}self_attn.q_proj.weight": (query, 2 * h),
        f"{layer}self_attn.k_proj.weight": (key, 2 * h),
        f"{layer}self_attn.v_proj.weight": (key, 2 * h),
        f"{layer}self_attn.o_proj.weight": (h, query),
        f"{layer}mlp.gate_proj.weight": (config.intermediate_size, h),
        f"{layer}mlp.up_proj.weight": (config.intermediate_size, h),
        f"{layer}mlp.down_proj.weight": (h, config.intermediate_size),
    }
    if config.attention_bias:
        sizes = {"q": query, "k": key, "v": key, "o": h}
        shapes |= {f"{layer}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.fc_norm == "joint":
        shapes["input_norm.weight"] = (taps * h,)
    elif config.fc_norm == "each":
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(taps)}
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, h)
    if not config.full_vocabulary:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def check_tensors(config: DraftConfig, tensors: dict[str, Tensor], where: str) -> None:
    """Raise CorruptError unless ``tensors`` are complete, well-shaped, finite, and the map is a map."""
    expected = expected_shapes(config)
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if shapes != expected:
        wrong = sorted(
            name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)
        )
        raise CorruptError(
            f"{where}: tensors {wrong[:5]} are missing, foreign or of another shape; train or import the drafter again"
        )
    broken = sorted(
        n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())
    )
    if broken:
        raise CorruptError(f"{where}: {broken[:5]} hold NaN or infinity; train the drafter again")
    if config.full_vocabulary:
        return
    ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    chosen = tensors["t2d"].nonzero()[:, 0]
    if (
        tensors["d2t"].dtype != torch.int64
        or tensors["t2d"].dtype != torch.bool
        or not torch.equal(ids, chosen)
    ):
        raise CorruptError(
            f"{where}: d2t and t2d do not describe one ascending set of {config.draft_vocab_size} target tokens"
        )


def _context(target: Target, config: DraftConfig) -> int:
    return int(target.config.get("max_position_embeddings") or config.max_positions)


def _require_replaceable(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, CorruptError):
        if read_json(out / MANIFEST).get("format") == FORMAT:
            return
    if out.is_dir() and {p.name for p in out.iterdir()} <= {WEIGHTS, CONFIG, CARD}:
        return  # an export that was killed before its manifest
    raise ConfigError(f"{out} exists and is not an export; choose another --out")


def _write(out: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (out / MANIFEST).unlink()
    save_tensors(out / WEIGHTS, tensors)
    write_json(out / CONFIG, document)


def _read_back(out: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    again = load_tensors(out / WEIGHTS)
    wrong = [
        n
        for n in again.keys() | tensors.keys()
        if n not in again or n not in tensors or not _same(again[n], tensors[n])
    ]
    if wrong or read_json(out / CONFIG) != document:
        raise CorruptError(
            f"{out} does not read back as written ({sorted(wrong)[:5] or CONFIG}); check the disk and export again"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _manifest(
    config: ExportConfig,
    draft: Draft,
    target: Target,
    version: str,
    document: dict[str, Any],
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": 1,
        "headrace": __version__,
        "engine": config.engine,
        "engine_version": version,
        "out": str(config.out),
        "steps": config.steps,
        "served_model": config.served_model or target.name,
        "draft": {
            "path": str(config.draft),
            "weights_hash": draft.weights_hash,
            "config": draft.model.config.model_dump(mode="json"),
        },
        "spec": draft.spec.to_dict(),
        "target": {
            "name": target.name,
            "config_hash": target.config_hash,
            "weights_hash": target.weights_hash,
        },
        "taps": sorted(draft.model.config.taps),
        "engine_tap_ids": _engine_ids(document),
        "tensors": {
            name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()
        },
        "weights_hash": file_hash(config.out / WEIGHTS),
        "config_hash": file_hash(config.out / CONFIG),
        "bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
        "lineage": draft.lineage,
    }


def _engine_ids(document: dict[str, Any]) -> list[int]:
    ids: list[int] = document.get("eagle_config", document)["eagle_aux_hidden_state_layer_ids"]
    return ids
