"""Drafters of other tools: what they mean is kept number for number, and what cannot be kept is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.config import build
from headrace.draft.checkpoint import load_draft
from headrace.draft.config import ImportConfig
from headrace.draft.foreign import import_draft
from headrace.draft.model import Eagle3Draft
from headrace.draft.shape import DraftConfig
from headrace.errors import HeadraceError, InputError

from .conftest import World
from .toys import toy_draft

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def original(world: World, **changes: Any) -> Eagle3Draft:
    """A drafter with random weights of the world's target, 40 of 96 draft tokens."""
    model = toy_draft(DraftConfig.for_target(world.target, (2, 3, 4), 40, **changes), seed=4)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(world.target.embedding)
    return model


def foreign_folder(
    world: World, folder: Path, kind: str, model: Eagle3Draft, edit: Edit | None = None
) -> Path:
    """``model`` as SGLang/SpecForge or vLLM's speculators would have saved it."""
    c = model.config
    layer = {
        "model_type": "llama", "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim, "rms_norm_eps": c.norm_eps, "num_hidden_layers": 1,
        "hidden_act": "silu", "max_position_embeddings": c.max_positions, "vocab_size": c.vocab_size,
        "rope_parameters": c.rope.to_hf(),
    }  # fmt: skip
    flags = {
        "norm_before_fc": c.fc_norm == "joint",
        "fc_norm": c.fc_norm == "each",
        "norm_output": c.normed_feedback,
        "norm_before_residual": c.norm_before_residual,
    }
    weights = {n: t.detach().clone() for n, t in model.state_dict().items()}
    if kind == "vllm":
        document = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "transformer_layer_config": layer,
                    "draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": list(c.taps), **flags}  # fmt: skip
        weights["verifier_lm_head.weight"] = torch.zeros(2, 2)
    else:
        ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [t - 1 for t in c.taps]}
        document = {
            **layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 40,
            "tie_word_embeddings": False,
            "eagle_config": ids,
            **flags,
        }
        del weights["embed_tokens.weight"]
        weights = {n.replace("layers.0.", "midlayer."): t for n, t in weights.items()}
    if edit is not None:
        edit(document, weights)
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def imported(world: World, folder: Path, out: Path, **options: Any) -> dict[str, Any]:
    values = {"draft": folder, "model": str(world.model), "out": out, **options}
    return import_draft(build(ImportConfig, values, "test"), lambda _: None)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    "variant",
    [{}, {"fc_norm": "joint", "normed_feedback": True, "norm_before_residual": True}, {"fc_norm": "each"}],
)
def test_weights_and_meaning_are_kept(
    world: World, tmp_path: Path, kind: str, variant: dict[str, Any]
) -> None:
    model = original(world, **variant)
    result = imported(world, foreign_folder(world, tmp_path / "f", kind, model), tmp_path / "d")
    assert result["taps"] == [2, 3, 4], "SGLang's ids are outputs, vLLM's are inputs of a block"
    loaded = load_draft(tmp_path / "d", world.target).model
    assert loaded.config == model.config
    theirs = model.state_dict()
    assert all(torch.equal(t, theirs[n]) for n, t in loaded.state_dict().items())


def test_convention_can_be_overruled(world: World, tmp_path: Path) -> None:
    folder = foreign_folder(world, tmp_path / "f", "sglang", original(world))
    assert imported(world, folder, tmp_path / "a", tap_convention="vllm")["taps"] == [1, 2, 3]
    assert imported(world, folder, tmp_path / "b", taps=[1, 3, 5])["taps"] == [1, 3, 5]


def test_shards_and_an_embedding_of_its_own(world: World, tmp_path: Path) -> None:
    """XP-11: several files, ``model.`` in front of the names; a trained embedding is kept, the target's is not copied."""
    model = original(world)

    def edit(_: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        weights["embed_tokens.weight"] = weights["embed_tokens.weight"] + 1
        for name in list(weights):
            weights[f"model.{name}"] = weights.pop(name)

    folder = foreign_folder(world, tmp_path / "f", "vllm", model, edit)
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({n: weights[n] for n in part}, folder / f"model-0000{number + 1}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    imported(world, folder, tmp_path / "d")
    loaded = load_draft(tmp_path / "d", world.target).model
    assert loaded.config.own_embedding
    torch.testing.assert_close(loaded.embed_tokens.weight, world.target.embedding + 1)


def drop(name: str) -> Edit:
    def edit(_: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return edit


def say(**values: Any) -> Edit:
    return lambda document, _: document.update(values)


def deeper(**values: Any) -> Edit:
    return lambda document, _: document["transformer_layer_config"].update(values)


def put(name: str, tensor: torch.Tensor) -> Edit:
    return lambda _, weights: weights.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop("lm_head.weight"), "no lm_head.weight"),
        (drop("d2t"), "no d2t"),
        (drop("norm.weight"), "lacks norm.weight"),
        (put("layers.0.self_attn.q_norm.weight", torch.ones(8)), "unknown layers.0.self_attn.q_norm.weight"),
        (put("d2t", torch.full((40,), 90)), "d2t does not map"),
        (put("d2t", torch.zeros(40, dtype=torch.int64)), "t2d and d2t name different tokens"),
        (put("model.fc.weight", torch.zeros(2, 2)), "fc.weight twice"),
        (say(speculators_model_type="dflash"), "dflash"),
        (say(draft_vocab_size=41), "draft_vocab_size 41"),
        (say(eagle_aux_hidden_state_layer_ids=[2, 18, 33]), "drafter of another target"),
        (deeper(num_hidden_layers=2), "num_hidden_layers is 2"),
        (deeper(hidden_act="gelu"), "hidden_act"),
        (deeper(hidden_size=64), "hidden_size 64"),
        (deeper(rope_parameters={"rope_type": "longrope"}), "longrope"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(world: World, tmp_path: Path, edit: Edit, words: str) -> None:
    folder = foreign_folder(world, tmp_path / "f", "vllm", original(world), edit)
    with pytest.raises(HeadraceError, match=words):
        imported(world, folder, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_pickles_are_never_loaded(world: World, tmp_path: Path) -> None:
    folder = foreign_folder(world, tmp_path / "f", "sglang", original(world))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="is a pickle"):
        imported(world, folder, tmp_path / "d")
