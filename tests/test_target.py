"""Reading a target's folder: hashes that see what matters, norms never guessed, clear refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from headrace.errors import ConfigError, InputError, SpecMismatchError
from headrace.modelfiles import tokenizer_fingerprint
from headrace.target import Head, Target
from headrace.testing.models import make_config_only, make_tiny_model


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_reads_the_real_model(smollm2: Path) -> None:
    target = Target.open(str(smollm2))
    spec = target.spec("eagle3")
    assert (spec.num_layers, spec.hidden_size, spec.dtype, spec.norm_kind, spec.norm_eps) == (
        30,
        576,
        "bfloat16",
        "rms",
        1e-5,
    )
    assert spec.taps == (2, 15, 27, "final")
    assert spec.tokenizer_hash and spec.template_hash and spec.weights_hash and spec.config_hash
    assert target.head.weight.shape == (49152, 576)
    assert target.head.weight.data_ptr() == target.embedding.data_ptr(), "SmolLM2 ties its head"


def test_final_norm_by_hand(tmp_path: Path) -> None:
    """h = [3,4,0,0], w = [2,1,1,1]: RMS 2.5 gives [2.4, 1.6, 0, 0]; with 1+w it is [3.6, 3.2, 0, 0] (EX-07)."""
    from safetensors.torch import save_file

    for kind, want in (("llama", [2.4, 1.6, 0, 0]), ("gemma", [3.6, 3.2, 0, 0])):
        folder = make_config_only(tmp_path / kind, hidden=4)
        edit(folder, model_type=kind, rms_norm_eps=0.0)
        save_file(
            {"model.norm.weight": torch.tensor([2.0, 1.0, 1.0, 1.0])}, str(folder / "model.safetensors")
        )
        out = Target.open(str(folder)).final_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]))
        torch.testing.assert_close(out, torch.tensor(want))


def test_config_hash_ignores_how_it_was_saved(tmp_path: Path) -> None:
    folder = make_config_only(tmp_path / "m")
    before = Target.open(str(folder)).config_hash
    edit(
        folder, transformers_version="9.9", _name_or_path="elsewhere", use_cache=False, torch_dtype="float32"
    )
    assert Target.open(str(folder)).config_hash == before
    edit(folder, rope_theta=5e5)
    assert Target.open(str(folder)).config_hash != before


def test_weights_hash_sees_one_changed_weight(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "a", vocab=300, layers=2, hidden=32)
    before = Target.open(str(folder)).weights_hash
    copied = Path(shutil.copytree(folder, tmp_path / "b"))
    assert Target.open(str(copied)).weights_hash == before, "the place does not matter"
    data = bytearray((copied / "model.safetensors").read_bytes())
    data[-20] ^= 1
    (copied / "model.safetensors").write_bytes(bytes(data))
    assert Target.open(str(copied)).weights_hash != before


def test_require_names_the_difference(tiny_llama: Path, config_only: Path) -> None:
    spec = Target.open(str(tiny_llama)).spec("last")
    with pytest.raises(
        SpecMismatchError, match=r"store runs/x was made for another target .*num_layers: 6 != 8"
    ):
        Target.open(str(config_only)).require(spec, "store runs/x")


def test_tokenizer_fingerprint_sees_shifted_specials(smollm2: Path) -> None:
    """An auto-converted tokenizer that closes a gap in the reserved ids (DP-16)."""

    class Token:
        def __init__(self, content: str) -> None:
            self.content = content

    class Tokenizer:
        def __init__(self, ids: list[int]) -> None:
            self.added_tokens_decoder = {
                i: Token(t) for i, t in zip(ids, ("<a>", "<think>", "</think>"), strict=True)
            }

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

        def __len__(self) -> int:
            return 104

    assert tokenizer_fingerprint(Tokenizer([100, 101, 103])) != tokenizer_fingerprint(
        Tokenizer([100, 101, 102])
    )
    real = Target.open(str(smollm2))
    assert real.tokenizer_hash == tokenizer_fingerprint(real.tokenizer)


def test_multimodal_wrapper_uses_its_text_part(tmp_path: Path) -> None:
    folder = make_config_only(tmp_path / "mm")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": text, "vision_config": {"hidden_size": 9}})
    )
    assert Target.open(str(folder)).hidden_size == 16


def test_refusals(tmp_path: Path, config_only: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Target.open(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="neither a local model folder nor a hub id"):
        Target.open("someone/some-model")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Target.open(str(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="not valid JSON"):
        Target.open(str(tmp_path))
    target = Target.open(str(config_only))
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        _ = target.tokenizer
    with pytest.raises(ConfigError, match="has no embedding"):
        _ = target.embedding
    with pytest.raises(ConfigError, match=r"boundary in 0\.\.8"):
        target.spec("9")
    edit(make_config_only(tmp_path / "odd"), model_type="strange", rms_norm_eps=None)
    odd = json.loads((tmp_path / "odd" / "config.json").read_text())
    del odd["rms_norm_eps"]
    (tmp_path / "odd" / "config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match="norm of model type 'strange' is not known"):
        _ = Target.open(str(tmp_path / "odd")).norm_kind


def test_head_scale_and_softcap() -> None:
    head = Head(
        torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]),
        bias=torch.tensor([0.0, 1.0, 0.0]),
        scale=0.5,
        softcap=2.0,
    )
    state = torch.tensor([[1.0, 2.0]])
    raw = torch.tensor([[1.0, 5.0, 9.0]]) * 0.5
    torch.testing.assert_close(head.logits(state), torch.tanh(raw / 2) * 2)
    torch.testing.assert_close(head.logits(state, torch.tensor([2, 0])), head.logits(state)[:, [2, 0]])
