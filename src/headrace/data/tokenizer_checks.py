"""Is the tokenizer that transformers loads the one that the model's files describe?

What is made of the same files depends on the release: some convert and shift ids, some rebuild a tokenizer of a known class with
that class's own rules and take no more than the vocabulary from ``tokenizer.json``.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

from headrace.errors import PreflightError
from headrace.modelfiles import PROBES

_TEXTS = (*PROBES, "two lines\n\n1 foot  = 12 inches, it's 3cm; x=[1, 22, 333]")


def check_special_ids(tokenizer: Any, folder: Path) -> None:
    """Raise PreflightError when a loaded tokenizer gives an added token another id than its files declare.

    A tokenizer without ``tokenizer.json`` is converted on loading, and conversions that close gaps in the reserved
    range shift ids by a few while every text still comes back whole.
    """
    by_id = {int(i): str(getattr(t, "content", t)) for i, t in tokenizer.added_tokens_decoder.items()}
    by_text = {text: number for number, text in by_id.items()}
    for file, number, text in _declared_ids(folder):
        if by_text.get(text, number) != number or by_id.get(number, text) != text:
            raise PreflightError(
                f"{file} gives {text!r} the id {number}, the loaded tokenizer gives it {by_text.get(text)}; the conversion "
                "shifted its special ids, install the transformers version the model names or load it with its own code"
            )


def _declared_ids(folder: Path) -> list[tuple[Path, int, str]]:
    found: list[tuple[Path, int, str]] = []
    for name in ("tokenizer_config.json", "tokenizer.json", "added_tokens.json"):
        file = folder / name
        if not file.is_file():
            continue
        document = json.loads(file.read_text(encoding="utf-8"))
        if name == "added_tokens.json":
            found += [(file, int(i), str(text)) for text, i in document.items()]
        for number, token in (document.get("added_tokens_decoder") or {}).items():
            found.append((file, int(number), str(token["content"] if isinstance(token, dict) else token)))
        if name == "tokenizer.json":
            found += [(file, int(t["id"]), str(t["content"])) for t in document.get("added_tokens") or []]
    return found


def check_encoding(tokenizer: Any, folder: Path) -> str:
    """A warning when ``tokenizer`` encodes text otherwise than ``tokenizer.json`` in ``folder`` says; "" when it does not.

    Raises PreflightError when its ids do not even give the text back, and the file's do.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return ""
    from tokenizers import Tokenizer

    told = Tokenizer.from_file(str(file))
    # Added tokens may be declared elsewhere; check_special_ids looks after them.
    added = [str(getattr(token, "content", token)) for token in tokenizer.added_tokens_decoder.values()]
    warning = ""
    for text in _TEXTS:
        if any(token in text for token in added):
            continue
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        wanted = told.encode(text, add_special_tokens=False).ids
        if ids == wanted:
            continue
        found = f"transformers makes a {type(tokenizer).__name__} of it that encodes {text!r} as {ids}, the file as {wanted}"
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if _plain(back) != _plain(text) and told.decode(wanted, skip_special_tokens=False) == text:
            raise PreflightError(f"{file}: {found}, and decodes that to {back!r}; {_MEND}")
        warning = warning or f"{file}: {found}. An engine that reads it otherwise gives other ids; {_MEND}"
    return warning


def _plain(text: str) -> str:
    """Some normalize what they read."""
    return unicodedata.normalize("NFC", text)


_MEND = (
    'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json, which follows the file, '
    "or install the release of transformers that the model names"
)
