"""Exports without an engine: exact maps, names, ids and flags for each engine, refusals, and folders that are whole or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace.cli import main
from headrace.draft.checkpoint import file_hash, load_draft, save_draft
from headrace.draft.config import DraftConfig, ImportConfig
from headrace.draft.export import check_tensors, expected_shapes, export, exported_tensors
from headrace.draft.foreign import import_draft
from headrace.draft.model import Eagle3Draft
from headrace.draft.serving import ExportConfig, tap_ids, version_key
from headrace.errors import ConfigError, CorruptError, SpecMismatchError
from headrace.target import Target
from headrace.testing.models import make_config_only, make_tiny_model

VOCAB, IDS = 16, [3, 5, 9, 12]


def silent(text: str) -> None: ...


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make_tiny_model(tmp_path_factory.mktemp("small") / "target", vocab=VOCAB, layers=6, hidden=32)
    return Target.open(str(folder))


@pytest.fixture
def made(small_target: Target, tmp_path: Path) -> Callable[..., Path]:
    """Makes a drafter folder with random bf16 weights; ``ids`` are the target tokens it knows."""

    def make(ids: list[int] | None = None, **changes: Any) -> Path:
        ids = IDS if ids is None else ids
        config = DraftConfig.for_target(small_target, changes.pop("taps", (2, 3, 4)), len(ids), **changes)
        torch.manual_seed(1)
        draft = Eagle3Draft(config)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_()
            draft.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
            draft.t2d.zero_()[ids] = True
        folder = tmp_path / "draft"
        save_draft(
            folder,
            draft.bfloat16(),
            small_target.spec([*config.taps]),
            {"rows": "1234abcd", "val_length": 2.5},
        )
        return folder

    return make


def exported(
    draft: Path, engine: str, out: Path, **more: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    manifest = export(ExportConfig(draft=draft, engine=engine, out=out, **more), silent)  # type: ignore[arg-type]
    return manifest, json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_map_is_in_the_weights(engine: str, made: Callable[..., Path], tmp_path: Path) -> None:
    _, config, tensors = exported(made(), engine, tmp_path / "out")
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].tolist() == [3, 4, 7, 9]
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero()[:, 0].tolist() == IDS
    assert config["draft_vocab_size"] == 4
    assert tensors["lm_head.weight"].shape == (4, 32)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_full_vocabulary_has_no_map(engine: str, made: Callable[..., Path], tmp_path: Path) -> None:
    _, config, tensors = exported(made(list(range(VOCAB))), engine, tmp_path / "out")
    assert not {"d2t", "t2d"} & tensors.keys()
    assert config["draft_vocab_size"] == VOCAB


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_needed_tensor_is_there_bit_by_bit(
    engine: str, made: Callable[..., Path], small_target: Target, tmp_path: Path
) -> None:
    folder = made()
    manifest, _, tensors = exported(folder, engine, tmp_path / "out")
    ours = load_draft(folder, small_target).model.state_dict()
    assert set(tensors) == set(ours) - {"embed_tokens.weight"}
    for name, tensor in tensors.items():
        assert tensor.dtype == ours[name].dtype and torch.equal(tensor, ours[name]), name
    assert manifest["weights_hash"] == file_hash(tmp_path / "out" / "model.safetensors")
    assert manifest["draft"]["weights_hash"] == file_hash(folder / "model.safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_names_and_flags_of_sglang(made: Callable[..., Path], tmp_path: Path) -> None:
    _, config, _ = exported(made(fc_norm="joint", normed_feedback=True), "sglang", tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    # Explicit always: without it SGLang falls back to taps of its own, silently.
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    assert (config["norm_before_fc"], config["fc_norm"], config["norm_output"]) == (True, False, True)
    assert config["tie_word_embeddings"] is False  # else the head would be the embedding
    assert config["num_hidden_layers"] == 1
    assert config["rope_parameters"]["rope_theta"] == 10000.0


def test_names_and_flags_of_vllm(made: Callable[..., Path], tmp_path: Path) -> None:
    draft = made(taps=(1, 2, 3, 4), fc_norm="each", norm_before_residual=True, attention_bias=True)
    _, config, tensors = exported(draft, "vllm", tmp_path / "out", served_model="org/target", steps=7)
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3, 4]
    # vLLM takes three taps for granted in this format unless told.
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    # Written even when false: vLLM's default is true.
    assert (config["norm_before_residual"], config["fc_norm"], config["norm_before_fc"]) == (
        True,
        True,
        False,
    )
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert "layers.0.self_attn.q_proj.bias" in tensors
    _, config, _ = exported(made(), "vllm", tmp_path / "out")
    assert config["norm_before_residual"] is False


def test_positions_are_the_targets_not_the_drafters(made: Callable[..., Path], tmp_path: Path) -> None:
    _, config, _ = exported(made(max_positions=128), "sglang", tmp_path / "out")
    assert config["max_position_embeddings"] == 4096
    _, config, _ = exported(made(max_positions=128), "vllm", tmp_path / "out", max_positions=65536)
    assert config["transformer_layer_config"]["max_position_embeddings"] == 65536


def test_unordered_taps_become_ascending_with_their_columns(
    made: Callable[..., Path], small_target: Target, tmp_path: Path
) -> None:
    """Engines fuse taps in the order of the target's layers, so the columns of fc must follow; the function stays."""
    for variant in ("none", "joint", "each"):
        folder = made(taps=(4, 1, 3), fc_norm=variant)
        draft = load_draft(folder, small_target, dtype=torch.float64)
        tensors, shape = exported_tensors(draft, torch.float64)
        assert shape.taps == (1, 3, 4)
        served = Eagle3Draft(shape).double()
        served.load_state_dict(tensors | {"embed_tokens.weight": draft.model.embed_tokens.weight})
        states = dict(zip((4, 1, 3), torch.randn(3, 5, 32, dtype=torch.float64), strict=True))
        ours = draft.model.fuse(torch.cat([states[t] for t in (4, 1, 3)], -1))
        theirs = served.fuse(torch.cat([states[t] for t in (1, 3, 4)], -1))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert exported(folder, "sglang", tmp_path / "out")[0]["engine_tap_ids"] == [0, 2, 3]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"norm_before_residual": True}, "no norm_before_residual"),
        ({"attention_bias": True}, "no attention biases"),
        ({"own_embedding": True}, "replaces the drafter's own embedding"),
        ({"taps": (3,)}, "fuses taps only when there are several"),
        ({"taps": (2, 3, 6)}, "output of the last layer, boundary 6"),
        ({"taps": (0, 3, 4)}, "no number for the embedding output"),
    ],
)
def test_what_sglang_would_misread_is_refused_and_nothing_is_written(
    changes: dict[str, Any], message: str, made: Callable[..., Path], tmp_path: Path
) -> None:
    draft = made(**changes)
    with pytest.raises(ConfigError, match=message):
        exported(draft, "sglang", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    exported(draft, "vllm", tmp_path / "out")  # vLLM represents all of these


@pytest.mark.parametrize(
    "changes, version, message",
    [
        ({}, "0.5.10", "eagle3 needs sglang 0.5.11"),
        ({"fc_norm": "joint"}, "0.5.16", "fc_norm joint needs sglang 0.5.17"),
        ({"fc_norm": "each"}, "v0.5.13.post1", "fc_norm each needs sglang 0.5.14"),
        ({"normed_feedback": True}, "0.5.11", "normed_feedback needs sglang 0.5.14"),
        ({"taps": (1, 2, 3, 4)}, "0.5.11", "taps needs sglang 0.5.14"),
        ({}, "newest", "is not a version"),
    ],
)
def test_a_release_without_the_feature_is_refused(
    changes: dict[str, Any], version: str, message: str, made: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        exported(made(**changes), "sglang", tmp_path / "out", engine_version=version)
    assert version_key("0.5.9") < version_key("0.5.10") < version_key("0.5.10.1")


def test_tap_numbers_of_every_convention(tmp_path: Path) -> None:
    def target(kind: str) -> Target:
        folder = make_config_only(tmp_path / kind, layers=61)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        return Target.open(str(folder))

    usual, odd = (2, 30, 58), (5, 30, 58)
    assert tap_ids(usual, target("llama"), "vllm") == [2, 30, 58]
    assert tap_ids(usual, target("llama"), "sglang") == [1, 29, 57]
    # DeepSeek and Kimi: a list that starts with 1 is shifted by SGLang like everyone's, any other is taken as inputs.
    assert tap_ids(usual, target("deepseek_v3"), "sglang") == [1, 29, 57]
    assert tap_ids(odd, target("deepseek_v3"), "sglang") == [5, 30, 58]
    assert tap_ids(odd, target("llama"), "sglang") == [4, 29, 57]
    assert tap_ids(odd, target("deepseek_v3"), "vllm") == [5, 30, 58]


def test_the_first_tap_that_deepseek_in_sglang_cannot_have(
    made: Callable[..., Path], small_target: Target
) -> None:
    from headrace.draft.serving import check

    kimi = Target(small_target.path, "kimi", {**small_target.raw_config, "model_type": "kimi_k2"})
    config = load_draft(made(taps=(1, 3, 4)), small_target).model.config
    with pytest.raises(ConfigError, match="one layer later"):
        check(config, kimi, "sglang", "0.5.23")
    check(config, small_target, "sglang", "0.5.23")


def test_incomplete_or_broken_weights_are_refused(made: Callable[..., Path], small_target: Target) -> None:
    draft = load_draft(made(), small_target)
    tensors, shape = exported_tensors(draft, torch.bfloat16)
    check_tensors(shape, tensors, "here")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected_shapes(shape)

    def broken(**changes: Any) -> dict[str, torch.Tensor]:
        return {name: t for name, t in (tensors | changes).items() if t is not None}

    with pytest.raises(CorruptError, match=r"lm_head\.weight"):
        check_tensors(shape, broken(**{"lm_head.weight": None}), "here")
    with pytest.raises(CorruptError, match="NaN"):
        check_tensors(shape, broken(**{"norm.weight": tensors["norm.weight"] * float("nan")}), "here")
    with pytest.raises(CorruptError, match="one ascending set"):
        check_tensors(shape, broken(d2t=tensors["d2t"] + 1), "here")
    with pytest.raises(
        CorruptError, match="one ascending set"
    ):  # a map of zeros means the first four target ids
        check_tensors(shape, broken(d2t=torch.zeros(4, dtype=torch.int64)), "here")


def test_dtype_conversion_and_the_card(made: Callable[..., Path], tmp_path: Path) -> None:
    manifest, config, tensors = exported(
        made(), "sglang", tmp_path / "out", dtype="float32", served_model="org/target"
    )
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.float32}
    assert config["dtype"] == config["torch_dtype"] == "float32"
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith('---\nbase_model: "org/target"\n')
    for fact in (
        "[2, 3, 4] of 6 layers (engine ids [1, 2, 3])",
        "1234abcd",
        manifest["weights_hash"],
        "val_length",
    ):
        assert fact in card
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6" in card


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("changes", [{}, {"fc_norm": "each", "normed_feedback": True}, {"fc_norm": "joint"}])
def test_an_export_imports_back_as_the_same_drafter(
    engine: str, changes: dict[str, Any], made: Callable[..., Path], small_target: Target, tmp_path: Path
) -> None:
    folder = made(**changes)
    exported(folder, engine, tmp_path / "out")
    config = ImportConfig(draft=tmp_path / "out", model=str(small_target.path), out=tmp_path / "back")
    import_draft(config, silent)
    ours, back = load_draft(folder, small_target).model, load_draft(tmp_path / "back", small_target).model
    assert back.config == ours.config
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_only_an_export_is_replaced(made: Callable[..., Path], tmp_path: Path) -> None:
    draft, out = made(), tmp_path / "out"
    first, _, _ = exported(draft, "sglang", out)
    second, _, _ = exported(draft, "vllm", out)
    assert (first["engine"], second["engine"]) == ("sglang", "vllm")
    (out / "manifest.json").unlink()  # killed before the end
    exported(draft, "vllm", out)
    other = tmp_path / "work"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not an export"):
        exported(draft, "vllm", other)
    assert [p.name for p in other.iterdir()] == ["notes.txt"]


def test_a_drafter_of_another_target_is_refused(
    made: Callable[..., Path], tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecMismatchError, match="another target"):
        exported(made(), "vllm", tmp_path / "out", model=str(tiny_llama))


def test_damaged_weights_are_not_exported(made: Callable[..., Path], tmp_path: Path) -> None:
    draft = made()
    tensors = load_file(draft / "model.safetensors")
    tensors["norm.weight"] += 1
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(CorruptError, match="is not the file"):
        exported(draft, "vllm", tmp_path / "out")


def test_the_command(made: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", str(made()), "--engine", "sglang", "--out", str(tmp_path / "out")]
    assert main([*command, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] and value["engine_tap_ids"] == [1, 2, 3] and value["out"] == str(tmp_path / "out")
    assert main(command) == 0
    assert "equal, bit by bit" in capsys.readouterr().out
    assert main(["export", "nowhere", "--engine", "vllm", "--out", str(tmp_path / "x")]) == 2
    assert main(["export", str(made()), "--engine", "trtllm", "--out", str(tmp_path / "x")]) == 2
