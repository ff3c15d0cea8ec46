"""Drafters of other tools → ours: SGLang and SpecForge folders (``LlamaForCausalLMEagle3``) and vLLM's speculators format.

What such a folder leaves unsaid is the target's (embedding) or an error (head, vocabulary map): nothing is made up. Layer
ids mean what the engine of the folder's format would capture for this target (:mod:`headrace.draft.layerids`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.config import build
from headrace.draft.checkpoint import assign, load_tensors, save_draft
from headrace.draft.config import ImportConfig
from headrace.draft.layerids import EngineName, boundaries
from headrace.draft.model import Eagle3Draft
from headrace.draft.shape import DraftConfig, RopeConfig
from headrace.errors import ConfigError, InputError
from headrace.files import read_json
from headrace.target import Target
from headrace.types import FINAL, hash_json

# Of the target's, stored by some tools beside the drafter: read from the target instead.
_IGNORED = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")
_RENAMED = {"midlayer.": "layers.0.", "input_layernorms.": "input_layernorm."}


@dataclass(frozen=True)
class Foreign:
    """A foreign drafter's config, read."""

    kind: EngineName
    """sglang or vllm: which tool's folder it is."""
    layer: dict[str, Any]
    """The llama keys of its decoder layer."""
    values: dict[str, Any]
    """The rest."""
    taps: tuple[int, ...]
    """Boundaries."""


def import_draft(config: ImportConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Convert ``config.draft`` into a Headrace drafter at ``config.out``; returns what was found.

    Raises InputError naming the key or tensor that cannot be represented, ConfigError for a folder that is no drafter.
    """
    target = Target.open(config.model, config.revision)
    if (config.out / "config.json").exists():
        raise ConfigError(f"{config.out} holds a drafter already; give another --out")
    file = config.draft / "config.json"
    try:
        document = read_json(file)
    except FileNotFoundError:
        raise ConfigError(f"{config.draft} has no config.json; give the folder of a drafter") from None
    foreign = read_config(document, file, config, target)
    weights = read_weights(config.draft)
    vocab_ids = _vocabulary(weights, foreign, target, file)
    shape = _shape(foreign, weights, target, len(vocab_ids), file)
    model = Eagle3Draft(shape)
    weights.setdefault("embed_tokens.weight", target.embedding)
    _fill_vocabulary(weights, vocab_ids, target.vocab_size)
    assign(model, weights, str(config.draft))
    spec = target.spec((*shape.taps, FINAL))
    facts = {
        "imported_from": str(config.draft),
        "format": foreign.kind,
        "config_hash": hash_json(document),
        "own_embedding": shape.own_embedding,
        "vocabulary": {"size": len(vocab_ids)},
    }
    save_draft(config.out, model, spec, facts)
    say(
        f"{config.draft} ({foreign.kind} folder): taps {list(shape.taps)} as boundaries, draft vocabulary {len(vocab_ids):,} → {config.out}"
    )
    return {
        **facts,
        "out": str(config.out),
        "taps": list(shape.taps),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def read_config(document: dict[str, Any], file: Path, config: ImportConfig, target: Target) -> Foreign:
    """Tell the format, and the boundaries it reads. Raises InputError for what it is not."""
    speculators = document.get("speculators_model_type")
    if speculators is not None and speculators != "eagle3":
        raise InputError(f"{file} is a {speculators!r} drafter; only eagle3 can be imported")
    names = [str(n) for n in document.get("architectures", [])]
    if speculators is None and not any("eagle3" in n.lower() for n in names):
        raise InputError(
            f"{file} has architectures {names} and no speculators_model_type; it is not an EAGLE-3 drafter"
        )
    kind: EngineName = "vllm" if speculators else "sglang"
    layer = dict(document.get("transformer_layer_config") or document)
    inner = dict(document.get("eagle_config") or {})
    ids = document.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    convention: EngineName = config.tap_convention if config.tap_convention != "auto" else kind
    layers = target.num_layers
    if config.taps:
        taps = tuple(config.taps)
    elif ids:
        taps = boundaries([int(i) for i in ids], target, convention)
    else:  # what both engines do without a word
        taps = (2, layers // 2, layers - 3)
    if max(taps) > layers or min(taps) < 0:
        raise InputError(
            f"{file} reads boundaries {list(taps)}, {target.name} has {layers} layers; is it the drafter of another target?"
        )
    return Foreign(kind, layer, {**document, **inner}, taps)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder under our names. Raises InputError for pickled weights, two names for one tensor, or none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        hint = (
            f"{pickled[0]} is a pickle, which is never loaded; save it as model.safetensors"
            if pickled
            else "give the folder with its model.safetensors"
        )
        raise InputError(f"{folder} has no .safetensors file; {hint}")
    out: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in load_tensors(file).items():
            ours = name.removeprefix("model.")
            if ours.startswith(_IGNORED):
                continue
            for theirs, mine in _RENAMED.items():
                ours = ours.replace(theirs, mine)
            if ours in out:
                raise InputError(f"{folder} has {ours} twice (once as {name}); keep one")
            out[ours] = tensor
    return out


def _vocabulary(weights: dict[str, Tensor], foreign: Foreign, target: Target, file: Path) -> Tensor:
    """Target ids of the draft vocabulary, int64 [V], ascending or not as stored; checked against every sign of it."""
    head = weights.get("lm_head.weight")
    if head is None:
        raise InputError(
            f"{file.parent} has no lm_head.weight; a drafter without a head proposes noise. Export it again with its head"
        )
    size = head.shape[0]
    declared = foreign.values.get("draft_vocab_size")
    if declared not in (None, size):
        raise InputError(f"{file} says draft_vocab_size {declared}, lm_head.weight has {size} rows")
    offsets = weights.pop("d2t", None)
    member = weights.pop("t2d", None)
    if offsets is None:
        if size != target.vocab_size:
            raise InputError(
                f"{file.parent} has {size} draft tokens of {target.vocab_size} and no d2t to say which; the first {size} would be a guess"
            )
        return torch.arange(size)
    ids = torch.arange(size) + offsets.to(torch.int64)
    if (
        len(offsets) != size
        or int(ids.min()) < 0
        or int(ids.max()) >= target.vocab_size
        or len(ids.unique()) != size
    ):
        raise InputError(
            f"{file.parent}: d2t does not map {size} draft tokens to distinct ids below {target.vocab_size}"
        )
    if member is not None and not torch.equal(member.bool().nonzero()[:, 0], ids.sort().values):
        raise InputError(
            f"{file.parent}: t2d and d2t name different tokens; one of them is of another drafter"
        )
    return ids


def _fill_vocabulary(weights: dict[str, Tensor], ids: Tensor, vocab_size: int) -> None:
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids] = True
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = member


def _shape(
    foreign: Foreign, weights: dict[str, Tensor], target: Target, vocab: int, file: Path
) -> DraftConfig:
    layer, values = foreign.layer, foreign.values
    _refuse(layer, file)
    hidden = int(layer["hidden_size"])
    if hidden != target.hidden_size or values.get("target_hidden_size") not in (None, hidden):
        raise InputError(
            f"{file}: hidden_size {hidden}, {target.name} has {target.hidden_size}; drafters narrower than their target cannot be imported"
        )
    heads = int(layer["num_attention_heads"])
    joint, each = bool(values.get("norm_before_fc")), bool(values.get("fc_norm"))
    embedding = weights.get("embed_tokens.weight")
    own = embedding is not None and not torch.equal(embedding.to(target.embedding.dtype), target.embedding)
    if not own:
        weights.pop("embed_tokens.weight", None)
    shape = {
        "taps": foreign.taps,
        "hidden_size": hidden,
        "intermediate_size": int(layer["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or hidden // heads),
        "vocab_size": target.vocab_size,
        "draft_vocab_size": vocab,
        "norm_eps": float(layer.get("rms_norm_eps", 1e-6)),
        "rope": RopeConfig.from_hf(layer),
        "max_positions": int(layer.get("max_position_embeddings", 2048)),
        "fc_norm": "each" if each else ("joint" if joint else "none"),
        "norm_before_residual": bool(values.get("norm_before_residual", False)),
        "normed_feedback": bool(values.get("norm_output", False)),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in weights,
        "own_embedding": own,
    }
    return build(DraftConfig, shape, str(file))


def _refuse(layer: dict[str, Any], file: Path) -> None:
    """Raise InputError for what our one Llama layer cannot be."""
    wants = {
        "num_hidden_layers": (1, None),
        "hidden_act": ("silu", None),
        "mlp_bias": (False, None),
        "bias": (False, None),
    }
    for key, allowed in wants.items():
        if layer.get(key) not in allowed:
            raise InputError(f"{file}: {key} is {layer[key]!r}; only {allowed[0]!r} can be imported")
    missing = [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if key not in layer]
    if missing:
        raise InputError(f"{file} lacks {', '.join(missing)}")
