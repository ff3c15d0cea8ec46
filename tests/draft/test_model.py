"""The drafter's shape, rotary positions, folder, vocabulary and first weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.draft.checkpoint import load_draft, save_draft
from headrace.draft.model import DraftCache, Eagle3Draft
from headrace.draft.rotary import Rotary
from headrace.draft.shape import DraftConfig, RopeConfig
from headrace.draft.vocab import choose_vocab, count_tokens
from headrace.draft.warm import copy_layer, initialize
from headrace.errors import ConfigError, CorruptError, SpecMismatchError
from headrace.target import Target
from headrace.testing.models import make_tiny_model
from headrace.types import CaptureSpec, Row

from .conftest import World
from .toys import toy_config, toy_draft

SPEC = CaptureSpec(
    target="t", config_hash="c", num_layers=7, hidden_size=16, dtype="bfloat16", taps=(1, 2, 4, "final"), norm_kind="rms", norm_eps=1e-5
)  # fmt: skip


# --- rotary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 100000.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        {
            "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_theta": 50000.0, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
    ],
    ids=lambda r: r["rope_type"],
)  # fmt: skip
def test_rotary_equals_transformers(rope: dict[str, Any]) -> None:
    import transformers
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    before = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
    }
    said = before if transformers.__version__.startswith("4.") else {"rope_parameters": rope}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=131072, **said
    )  # type: ignore[arg-type]
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 17, 5000, 100000]])
    cos, sin = theirs(torch.zeros(1), positions)
    read = RopeConfig.from_hf({"rope_parameters": rope, "max_position_embeddings": 131072})
    mine = Rotary(read, 64)(positions)
    torch.testing.assert_close(mine[0], cos, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine[1], sin, rtol=1e-6, atol=1e-6)
    assert RopeConfig.from_hf({"rope_parameters": read.to_hf()}) == read
    assert RopeConfig.from_hf(before | {"max_position_embeddings": 131072}) == read, (
        "as transformers 4 writes it"
    )


def test_rope_of_older_configs_and_refusals() -> None:
    old = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "max_position_embeddings": 64,
    }
    assert RopeConfig.from_hf(old) == RopeConfig(theta=5e5, type="linear", factor=2.0)
    assert (
        RopeConfig.from_hf(
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}
        ).type
        == "default"
    )
    with pytest.raises(ConfigError, match="longrope"):
        RopeConfig.from_hf({"rope_scaling": {"rope_type": "longrope"}})


def test_frequencies_stay_float32_in_a_bf16_drafter() -> None:
    model = Eagle3Draft(toy_config())
    before = model.rotary.inverse.clone()
    assert torch.equal(model.to(torch.bfloat16).rotary.inverse, before)
    assert model.fc.weight.dtype == torch.bfloat16


# --- shape -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_neox"]
)
def test_a_drafter_for_every_family(tmp_path: Path, family: str) -> None:
    """Llama-style whatever the target is: MLA, experts, 1+w norms, LayerNorm; its first weights are the target's head and norm."""
    target = Target.open(str(make_tiny_model(tmp_path / family, family, vocab=128)))
    config = DraftConfig.for_target(target, (1, 2, 3), 64)
    assert config.num_heads * config.head_dim > 0 and config.num_heads % config.num_kv_heads == 0
    model = Eagle3Draft(config)
    ids = torch.arange(0, 128, 2)
    initialize(model, target, ids, seed=0)
    head = target.head
    torch.testing.assert_close(model.lm_head.weight, head.weight[ids].float() * head.scale)
    final = torch.randn(3, target.hidden_size)
    if target.norm_kind != "layernorm":
        torch.testing.assert_close(model.norm(final), target.final_norm(final), rtol=1e-5, atol=1e-5)
    cache = DraftCache.allocate(model, 1, 4)
    out = model.step(
        torch.tensor([[5, 6]]),
        model.fuse(torch.randn(1, 2, 3 * target.hidden_size)),
        torch.tensor([[0, 1]]),
        cache,
    )
    assert model.logits(out).shape == (1, 2, 64) and torch.isfinite(out).all()


def test_latent_attention_targets_get_plain_heads() -> None:
    target = Target(Path(), "kimi", {
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "num_attention_heads": 64,
        "num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "intermediate_size": 18432,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 50000.0,
    })  # fmt: skip
    config = DraftConfig.for_target(target, (3, 31, 59), 32000)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (56, 8, 128)
    assert config.intermediate_size == 18432 and config.max_positions == 131072


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"draft_vocab_size": 31}, "exceeds"),
        ({"taps": (1, 1)}, "distinct"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        toy_config(**changes)


def test_copy_layer_is_the_targets_last_layer(world: World) -> None:
    """Fed the target's boundary N-1 as its last tap and with the embedding half at zero, the layer is the target's own."""
    target = world.target
    config = DraftConfig.for_target(target, (2, 3, 6), 96)
    model = Eagle3Draft(config)
    initialize(model, target, torch.arange(96), seed=0)
    copy_layer(model, target, 6)
    with torch.no_grad():
        hidden = config.hidden_size
        model.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(model.layer.self_attn, name).weight[:, :hidden].zero_()
    from headrace.draft.rederive import rederive
    from headrace.store import Store

    store = Store.open(world.store)
    capture = store.get(store.keys()[0], (2, 3, 4, "final"))
    found = rederive(target, [capture])
    assert found is not None
    everything = found.everything[0]
    rows = len(capture.ids)
    taps = torch.cat([everything[b] for b in (2, 3, 6)], dim=-1)[None]
    cache = DraftCache.allocate(model, 1, rows)
    ids = torch.from_numpy(capture.ids.astype(np.int64))[None]
    out = model.step(ids, model.fuse(taps), torch.arange(rows)[None], cache)
    torch.testing.assert_close(out[0], everything[7], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.norm(out[0]), everything[8], rtol=1e-4, atol=1e-4)


def test_copy_layer_refuses_another_shape(world: World) -> None:
    config = DraftConfig.for_target(world.target, (2, 3, 4), 96, intermediate_size=48)
    with pytest.raises(ConfigError, match="gate_proj has shape"):
        copy_layer(Eagle3Draft(config), world.target, 6)


# --- vocabulary ------------------------------------------------------------------------------------------------


def test_vocabulary_by_frequency_of_supervised_tokens() -> None:
    rows = [Row.make([3, 5, 5, 9, 12, 7, 7, 7], [0, 1, 1, 1, 1, 0, 0, 1]), Row.make([9, 9, 3], [1, 0, 1])]
    counts = count_tokens(rows, 16)
    assert counts.tolist() == [0, 0, 0, 1, 0, 2, 0, 1, 0, 2, 0, 0, 1, 0, 0, 0]
    vocab = choose_vocab(4, 16, counts)
    assert vocab.ids.tolist() == [3, 5, 7, 9]
    assert vocab.coverage == pytest.approx(6 / 7)
    assert vocab.d2t.tolist() == [3, 4, 5, 6] and vocab.d2t.dtype == torch.int64
    assert vocab.t2d.nonzero()[:, 0].tolist() == [3, 5, 7, 9]


def test_xp01_offsets() -> None:
    """Draft vocabulary [3, 5, 9, 12] of 16: d2t [3, 4, 7, 9], t2d true at those four."""
    counts = np.zeros(16, dtype=np.int64)
    counts[[3, 5, 9, 12]] = 1
    vocab = choose_vocab(4, 16, counts)
    assert vocab.d2t.tolist() == [3, 4, 7, 9]
    assert vocab.t2d.nonzero()[:, 0].tolist() == [3, 5, 9, 12]


@pytest.mark.parametrize("counts", [None, np.zeros(16, dtype=np.int64)])
def test_tr09_reduced_vocabulary_needs_frequencies(counts: np.ndarray | None) -> None:
    with pytest.raises(ConfigError, match="needs token frequencies"):
        choose_vocab(4, 16, counts)
    assert choose_vocab(0, 16, counts).d2t.tolist() == [0] * 16


def test_foreign_token_ids_are_named() -> None:
    row = Row.make([1, 99, 2], [0, 1, 1])
    with pytest.raises(ConfigError, match=f"{row.key} has token id 99"):
        count_tokens([row], 16)


# --- folder ----------------------------------------------------------------------------------------------------


def test_folder_round_trip_is_bitwise(tmp_path: Path) -> None:
    model = toy_draft(toy_config(own_embedding=True, fc_norm="each"), dtype=torch.float32)
    save_draft(tmp_path / "d", model, SPEC, {"step": 7})
    target_less = json.loads((tmp_path / "d" / "config.json").read_text())
    assert target_less["spec"]["taps"] == [1, 2, 4, "final"]
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    again = Eagle3Draft(model.config)
    from headrace.draft.checkpoint import assign, load_tensors

    assign(again, load_tensors(tmp_path / "d" / "model.safetensors"), "x")
    assert all(torch.equal(again.state_dict()[n], t) for n, t in weights.items())


def test_embedding_comes_from_the_target_and_a_wrong_target_is_refused(world: World, tmp_path: Path) -> None:
    target = world.target
    model = Eagle3Draft(DraftConfig.for_target(target, (2, 3, 4), 96))
    initialize(model, target, torch.arange(96), 0)
    save_draft(tmp_path / "d", model, target.spec("eagle3"), {})
    loaded = load_draft(tmp_path / "d", dtype=torch.float32)
    assert torch.equal(loaded.model.embed_tokens.weight, target.embedding)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    other = Target.open(str(make_tiny_model(tmp_path / "other", layers=7, hidden=32, vocab=96, seed=8)))
    with pytest.raises(SpecMismatchError, match="another target"):
        load_draft(tmp_path / "d", other)


@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "no config", "no weights", "other tensors", "not ours"]
)
def test_damaged_folders_are_named(world: World, tmp_path: Path, damage: str) -> None:
    target = world.target
    model = Eagle3Draft(DraftConfig.for_target(target, (2, 3, 4), 96))
    initialize(model, target, torch.arange(96), 0)
    save_draft(tmp_path / "d", model, target.spec("eagle3"), {})
    weights, config = tmp_path / "d" / "model.safetensors", tmp_path / "d" / "config.json"
    data = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(data[:-5] + bytes([data[-5] ^ 4]) + data[-4:])
    elif damage == "truncate":
        weights.write_bytes(data[:-100])
    elif damage == "no config":
        config.unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "other tensors":
        document = json.loads(config.read_text())
        document["draft"]["intermediate_size"] = 48
        config.write_text(json.dumps(document))
    else:
        config.write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises((CorruptError, ConfigError), match=r"\bd\b.*(again|import-draft)"):
        load_draft(tmp_path / "d", target)


# --- serving step ----------------------------------------------------------------------------------------------


def test_step_in_one_call_or_row_by_row() -> None:
    model = toy_draft(toy_config()).requires_grad_(False)
    ids, states = torch.randint(0, 30, (2, 9)), torch.randn(2, 9, 16)
    positions = torch.arange(9).expand(2, 9)
    whole = model.step(ids, states, positions, DraftCache.allocate(model, 2, 12))
    cache = DraftCache.allocate(model, 2, 12)
    rows = [
        model.step(ids[:, i : i + 1], states[:, i : i + 1], positions[:, i : i + 1], cache) for i in range(9)
    ]
    torch.testing.assert_close(torch.cat(rows, 1), whole)


def test_rerun_rows_overwrite_drafted_ones() -> None:
    """After a draft run past row 4, extending with the target's own taps gives what a cache that never drafted gives."""
    model = toy_draft(toy_config()).requires_grad_(False)
    ids, states = torch.randint(0, 30, (1, 8)), torch.randn(1, 8, 16)
    positions = torch.arange(8)[None]
    drafted, fresh = DraftCache.allocate(model, 1, 16), DraftCache.allocate(model, 1, 16)
    for cache in (drafted, fresh):
        out = model.step(ids[:, :5], states[:, :5], positions[:, :5], cache)
    state = model.feedback(out[:, -1:])
    for s in range(1, 5):
        state = model.feedback(model.step(torch.tensor([[s]]), state, torch.tensor([[4 + s]]), drafted))
    more = [model.step(ids[:, 5:], states[:, 5:], positions[:, 5:], cache) for cache in (drafted, fresh)]
    assert torch.equal(more[0], more[1])


def test_tree_mask_equals_chains() -> None:
    """Two children of one node in one call: each sees the path to itself only."""
    model = toy_draft(toy_config()).requires_grad_(False)
    ids, states = torch.randint(0, 30, (1, 3)), torch.randn(1, 3, 16)
    positions = torch.arange(3)[None]
    tree = DraftCache.allocate(model, 1, 8)
    out = model.step(ids, states, positions, tree)
    state = model.feedback(out[:, -1:])
    mask = torch.zeros(1, 2, 5, dtype=torch.bool)
    mask[:, :, :3] = True
    mask[:, 0, 3] = mask[:, 1, 4] = True
    both = model.step(
        torch.tensor([[7, 9]]),
        state.expand(1, 2, -1),
        torch.tensor([[3, 3]]),
        tree,
        slots=torch.tensor([[3, 4]]),
        mask=mask,
    )
    for column, token in enumerate((7, 9)):
        chain = DraftCache.allocate(model, 1, 8)
        model.step(ids, states, positions, chain)
        alone = model.step(torch.tensor([[token]]), state, torch.tensor([[3]]), chain)
        torch.testing.assert_close(both[:, column], alone[:, 0])


def test_xp06_positions_beyond_those_trained_are_like_any() -> None:
    """Rotary positions are relative: a chain far beyond ``max_positions`` and the trained length proposes what it does at 0."""
    model = toy_draft(toy_config(max_positions=64), dtype=torch.float64).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 30, (1, 12), generator=generator)
    states = torch.randn(1, 12, 16, generator=generator, dtype=torch.float64)
    slots = torch.arange(12)[None]
    outputs = [
        model.step(ids, states, slots + shift, DraftCache.allocate(model, 1, 12), slots=slots)
        for shift in (0, 5000)
    ]
    # Angles are float32, as in the engines: near position 5000 they are good to about 3e-4.
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)
    clamped = model.step(
        ids, states, (slots + 5000).clamp(max=63), DraftCache.allocate(model, 1, 12), slots=slots
    )
    assert float((clamped - outputs[0]).abs().max()) > 1e-2, (
        "the comparison would notice positions that stop growing"
    )
