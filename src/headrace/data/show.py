"""Rows as a person reads them: every token in its place, the supervised ones marked, with colours and without."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.data.config import ShowConfig
from headrace.data.rows import RowFolder
from headrace.errors import ConfigError, InputError, SpecMismatchError
from headrace.modelfiles import tokenizer_fingerprint
from headrace.target import Target
from headrace.types import Row

OPEN, CLOSE, NEWLINE = "⟦", "⟧", "⏎"
_GREEN, _MAGENTA, _DIM, _RESET = "\x1b[1;32m", "\x1b[35m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one kind."""

    text: str
    supervised: bool
    control: bool


class RowView:
    """Turns rows into text. ``tokenizer`` is checked against the folder's fingerprint by :meth:`open`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._control = {
            int(i) for i, t in tokenizer.added_tokens_decoder.items() if str(getattr(t, "content", t)).strip()
        }

    @classmethod
    def open(cls, folder: RowFolder, model: str = "", tokenizer: Any = None) -> RowView:
        """A view with the folder's tokenizer. Raises SpecMismatchError when it is not the one the rows were made with."""
        name = model or folder.manifest.get("model", "")
        if tokenizer is None:
            if not name:
                raise ConfigError(f"{folder.path} does not say which model it is for; give --model")
            tokenizer = Target.open(name, folder.manifest.get("revision", "")).tokenizer
        made_with = folder.manifest.get("tokenizer_hash")
        if made_with and tokenizer_fingerprint(tokenizer) != made_with:
            raise SpecMismatchError(
                f"{folder.path} was made with another tokenizer than {name} has; give that model with --model"
            )
        return cls(tokenizer)

    def stretches(self, row: Row) -> Iterator[Stretch]:
        """The row's tokens, cut where supervision or being a control token changes: partial characters stay together."""
        control = np.isin(row.ids, list(self._control))
        edges = (
            np.flatnonzero((np.diff(row.mask.astype(np.int8)) != 0) | (np.diff(control.astype(np.int8)) != 0))
            + 1
        )
        bounds = [0, *edges.tolist(), len(row.ids)]
        for start, stop in itertools.pairwise(bounds):
            text = self.tokenizer.decode(row.ids[start:stop].tolist(), skip_special_tokens=False)
            yield Stretch(text, bool(row.mask[start]), bool(control[start]))

    def text(self, row: Row, color: bool) -> str:
        """The whole row. Supervised text is green, or between ⟦ and ⟧ without colours; control tokens stand out."""
        parts: list[str] = []
        inside = False
        for piece in self.stretches(row):
            if piece.supervised != inside and not color:
                parts.append(OPEN if piece.supervised else CLOSE)
            inside = piece.supervised
            parts.append(_painted(piece) if color else piece.text)
        if inside and not color:
            parts.append(CLOSE)
        return "".join(parts)

    def tokens(self, row: Row) -> list[tuple[int, int, str, str]]:
        """(position, id, mark, text) of each token; the mark is ``*`` where supervised."""
        ids = row.ids.tolist()
        texts = [self.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
        marks = ["*" if m else "" for m in row.mask.tolist()]
        return [
            (n, i, mark, repr(text)[1:-1])
            for n, (i, mark, text) in enumerate(zip(ids, marks, texts, strict=True))
        ]


def _painted(piece: Stretch) -> str:
    """A stretch in its colour; supervised line breaks are shown, a mask that ends one too late is seen at once."""
    if piece.supervised:
        paint = _GREEN + ("\x1b[4m" if piece.control else "")
        return paint + piece.text.replace("\n", f"{NEWLINE}\n") + _RESET
    return (_MAGENTA if piece.control else _DIM) + piece.text + _RESET


def choose(folder: RowFolder, config: ShowConfig) -> list[tuple[int, Row]]:
    """(number, row) for what the user named. Raises InputError for a number or key that is not there."""
    try:
        keys = folder.keys(config.split or None)
    except KeyError as exc:
        raise ConfigError(f"--split {config.split}: {config.rows} has {list(folder.splits)}") from exc
    chosen = []
    for word in config.which or ["0"]:
        if word.isdigit() and len(word) < 10:
            if int(word) >= len(keys):
                raise InputError(
                    f"{config.rows} has {len(keys)} rows, numbered from 0; there is no row {word}"
                )
            chosen.append(int(word))
            continue
        found = [n for n, key in enumerate(keys) if key.startswith(word)]
        if len(found) != 1:
            raise InputError(f"{config.rows} has {len(found) or 'no'} rows whose key begins with {word}")
        chosen.append(found[0])
    return [(number, folder.get(keys[number])) for number in chosen]
