"""The tokenizer that transformers loads is held to the model's own files before a row is made."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.data.tokenizer_checks import check_encoding, check_special_ids
from headrace.errors import PreflightError
from headrace.target import Target


def test_dp_16_shifted_special_ids_stop_the_run(tmp_path: Path) -> None:
    declared = {
        "added_tokens_decoder": {
            str(i): {"content": f"<{n}>"} for n, i in (("a", 100), ("b", 101), ("c", 103))
        }
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))

    def loaded(last: int) -> Any:
        return types.SimpleNamespace(added_tokens_decoder={100: "<a>", 101: "<b>", last: "<c>"})

    check_special_ids(loaded(103), tmp_path)
    with pytest.raises(PreflightError, match="gives '<c>' the id 103, the loaded tokenizer gives it 102"):
        check_special_ids(loaded(102), tmp_path)


def test_dp_16_the_real_tokenizer_passes(smollm2: Path) -> None:
    check_special_ids(Target.open(str(smollm2)).tokenizer, smollm2)


def with_class(smollm2: Path, folder: Path, name: str) -> Path:
    """The real tokenizer, said to be of another class."""
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(smollm2 / file, folder / file)
    told = json.loads((smollm2 / "tokenizer_config.json").read_text())
    told.pop("backend", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"tokenizer_class": name}))
    return folder


def test_a_class_with_rules_of_its_own_is_said(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen's splits white space before digits in another way than the file."""
    model = with_class(smollm2, tmp_path / "model", "Qwen2Tokenizer")
    if not check_encoding(Target.open(str(model)).tokenizer, model):
        pytest.skip("this release of transformers follows tokenizer.json")
    talk = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    (tmp_path / "talks.jsonl").write_text(json.dumps(talk) + "\n")
    assert main(["prepare", str(tmp_path / "talks.jsonl"), "--model", str(model), "--out", str(tmp_path / "rows")]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert (
        "warning:" in said
        and "tokenizer.json" in said
        and '"tokenizer_class": "PreTrainedTokenizerFast"' in said
    )


class Wrapped:
    """The real tokenizer with one method replaced."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_ids_that_do_not_give_the_text_back_stop_the_run(smollm2: Path, tmp_path: Path) -> None:
    """As transformers 5.17 does with DeepSeek's distilled models: byte-level files read by Llama's class."""
    real = Target.open(str(smollm2)).tokenizer
    assert check_encoding(real, smollm2) == ""
    wrong = Wrapped(real, encode=lambda text, **_: [5, 6], decode=lambda ids, **_: "It\u0120is")
    with pytest.raises(
        PreflightError, match=r"tokenizer\.json: transformers makes a Wrapped .*decodes that to 'It.is'; set"
    ):
        check_encoding(wrong, smollm2)
    odd = Wrapped(real, encode=lambda text, **_: [*real.encode(text, **_), 0], decode=lambda ids, **_: "x")
    (tmp_path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    with pytest.raises(PreflightError):
        check_encoding(odd, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert check_encoding(odd, tmp_path) == "", "nothing to hold it to"


def test_tokens_added_elsewhere_are_no_difference(smollm2: Path) -> None:
    """``<think>`` may be declared in tokenizer_config.json alone."""
    real = Target.open(str(smollm2)).tokenizer
    real.add_tokens(["<think>", "</think>"])
    assert real.encode("<think>") != Target.open(str(smollm2)).tokenizer.encode("<think>")
    assert check_encoding(real, smollm2) == ""
