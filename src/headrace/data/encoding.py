"""Text → ids without adding specials, many texts at a time, and where a prefix of a text ends in the text's ids.

The second is what loss masks are made of. A prefix's place is the number of ids of the prefix when these are a prefix
of the text's ids, and None when they are not. :class:`DirectPlaces` finds it by encoding the prefix. That doubles the
work, so where it can be proved :class:`AnchoredPlaces` finds the same number from ids that exist: a tokenizer cuts text
at its control tokens before anything else, so the ids up to the last control token of a prefix are the ids of the text
up to there, and only the short rest (``assistant\\n``) has to be encoded, once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.data.control import ControlTokens
from headrace.errors import PreflightError

_PROBES = ("Hello, wörld!\n\n  two spaces", "a\tb 123 {}", "漢字 🙂 e\u0301", "")
_CACHED_TAIL = 128  # longer rests differ from row to row; remembering them would only fill memory
_CACHE_SIZE = 4096


def normalize_ids(value: Any) -> list[int]:
    """A flat list of ints from what ``apply_chat_template`` may give: mapping, list, nested list, 2-D array, tensor.

    Raises PreflightError for anything else, such as a batch of several.
    """
    if isinstance(value, Mapping):
        value = value.get("input_ids")
    elif hasattr(value, "input_ids"):
        value = value.input_ids
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (list, tuple)):
        value = value[0]
    if not isinstance(value, (list, tuple)) or not all(isinstance(i, (int, np.integer)) for i in value):
        raise PreflightError(
            f"the tokenizer gave {type(value).__name__} where token ids are due; this version of it is not understood"
        )
    return [int(i) for i in value]


class Encoder:
    """Encodes without adding specials. A fast tokenizer's backend is used directly where that gives the same ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Any = None
        if (
            backend is not None
            and hasattr(backend, "encode_batch_fast")
            and not (backend.truncation or backend.padding)
        ):
            self._backend = backend
            if any(self.batch([text])[0] != self.one(text) for text in _PROBES):
                self._backend = None

    @property
    def fast(self) -> bool:
        """Whether a Rust backend does the work."""
        return self._backend is not None

    @property
    def normalizes(self) -> bool:
        """Whether text is normalized before it is cut."""
        return self._backend is None or self._backend.normalizer is not None

    def one(self, text: str) -> list[int]:
        """Ids of one text."""
        return normalize_ids(self._tokenizer.encode(text, add_special_tokens=False))

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        if self._backend is None:
            return [self.one(text) for text in texts]
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]


class Places(Protocol):
    """Where prefixes of one text end in its ids."""

    def after(self, prefix: str) -> int | None:
        """Number of ids of ``prefix`` (a prefix of the text), or None when its ids are not a prefix of the text's."""


class DirectPlaces:
    """Encodes every prefix that is asked for."""

    def __init__(self, ids: np.ndarray, encode: Callable[[str], Sequence[int]]) -> None:
        self._ids, self._encode = ids, encode

    def after(self, prefix: str) -> int | None:
        ids = self._encode(prefix)
        return len(ids) if np.array_equal(self._ids[: len(ids)], ids) else None


class AnchoredPlaces:
    """Counts control tokens; made by :class:`Anchors`, which has checked that they match one to one."""

    def __init__(
        self, ids: np.ndarray, places: list[int], names: list[str], ends: list[int], anchors: Anchors
    ) -> None:
        self._ids, self._places, self._names, self._ends, self._anchors = ids, places, names, ends, anchors

    def after(self, prefix: str) -> int | None:
        count = bisect_right(self._ends, len(prefix))
        if not count:  # nothing before the first control token: the prefix stands for itself
            tail = self._anchors.tail("", prefix)
            start = 0
        else:
            end = self._ends[count - 1]
            start = self._places[count - 1] + 1
            if end == len(prefix):
                return start
            tail = self._anchors.tail(self._names[count - 1], prefix[end:])
        stop = start + len(tail)
        return stop if self._ids[start:stop].tolist() == tail else None


class Anchors:
    """Control tokens of a fast tokenizer as fixed points between a text and its ids."""

    def __init__(self, encoder: Encoder, control: ControlTokens) -> None:
        self._encoder, self._control = encoder, control
        self._tails: dict[tuple[str, str], list[int]] = {}
        self._lookup = np.zeros(max(control.ids.values(), default=0) + 2, dtype=bool)
        self._lookup[list(control.ids.values())] = True

    @classmethod
    def of(cls, tokenizer: Any, encoder: Encoder, control: ControlTokens) -> Anchors | None:
        """Anchors, where the tokenizer surely cuts at its control tokens first; None elsewhere."""
        if not encoder.fast or not control.ids:
            return None
        for token in tokenizer.added_tokens_decoder.values():
            if str(token.content) in control.ids and (
                token.single_word or (token.normalized and encoder.normalizes)
            ):
                return None
        return cls(encoder, control)

    def places(self, text: str, ids: np.ndarray) -> AnchoredPlaces | None:
        """Places in ``text``, int32 ``ids`` [tokens]; None when its control tokens and control ids do not pair up."""
        pattern = self._control.pattern
        assert pattern is not None  # of() refuses a tokenizer without control tokens
        names, ends = [], []
        for match in pattern.finditer(text):
            names.append(match.group())
            ends.append(match.end())
        places = np.flatnonzero(self._lookup.take(ids, mode="clip"))
        if ids[places].tolist() != [self._control.ids[name] for name in names]:
            return None
        return AnchoredPlaces(ids, places.tolist(), names, ends, self)

    def tail(self, anchor: str, tail: str) -> list[int]:
        """Ids of ``tail`` as they follow ``anchor``."""
        key = (anchor, tail)
        found = self._tails.get(key)
        if found is None:
            found = self._encoder.batch([anchor + tail])[0][1 if anchor else 0 :]
            if len(tail) <= _CACHED_TAIL:
                if len(self._tails) >= _CACHE_SIZE:
                    self._tails.clear()
                self._tails[key] = found
        return found
