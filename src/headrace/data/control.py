"""Control tokens: which they are, where they stand in text, and how text is encoded so that content forges none.

A control token is an added token that is special, or that the chat template's text names, or a reasoning tag; added
tokens that are white space are ordinary text. Those that are not special, and reasoning tags, are *speakable*: servers
return them as text, so in an assistant's own words they stand for the token the model emitted.

Policy ``plain``: in the text of system, user and tool messages every control token, in an assistant's words every one
that is not speakable, is encoded as the characters it is made of. To do so the text is *hidden* (each occurrence becomes
a private-use mark) before the template sees it, and the marks become plain characters when the rendering is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.data.messages import Message

REASONING_TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]", "◁think▷", "◁/think▷")
# Plane 16 private use: no tokenizer gives these a meaning, no text of people holds them.
_HIDE, _SHOW, _END = "\U0010f8f0", "\U0010f8f1", "\U0010f8f2"
_MARKS = re.compile(f"[{_HIDE}{_SHOW}{_END}]")
_HIDDEN = re.compile(f"{_HIDE}([0-9]+){_END}")
_STRUCTURE = ("role", "type", "id", "tool_call_id", "weight")


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer under a template."""

    ids: dict[str, int]
    """Text → id, longest text first."""
    speakable: frozenset[str]
    """Those an assistant's text may hold as tokens."""
    pattern: re.Pattern[str] | None
    """Finds them, longest first; None when there are none."""
    firsts: tuple[str, ...]
    """Their first characters: text without any of these needs no search."""
    endings: tuple[str, ...]
    """All of them, as ``str.endswith`` takes them."""

    @classmethod
    def of(cls, tokenizer: Any, template: str) -> ControlTokens:
        """Read them off a tokenizer; ``template`` is the chat template's text."""
        found: dict[str, int] = {}
        special: set[str] = set()
        for number, token in tokenizer.added_tokens_decoder.items():
            text = str(getattr(token, "content", token))
            is_special = bool(getattr(token, "special", True))
            if text.strip() and (is_special or text in template or text in REASONING_TAGS):
                found[text] = int(number)
                if is_special and text not in REASONING_TAGS:
                    special.add(text)
        ids = dict(sorted(found.items(), key=lambda item: (-len(item[0]), item[0])))
        pattern = re.compile("|".join(map(re.escape, ids))) if ids else None
        return cls(ids, frozenset(found) - special, pattern, tuple(sorted({t[0] for t in ids})), tuple(ids))

    def within(self, text: str) -> bool:
        """Whether ``text`` holds any."""
        return self._suspect(text) and self.pattern is not None and self.pattern.search(text) is not None

    def _suspect(self, text: str) -> bool:
        """A first look at speed: without one of the first characters there is nothing to find."""
        for first in self.firsts:  # noqa: SIM110 - three times as fast as any() over a generator, for every message
            if first in text:
                return True
        return False

    def closing(self, text: str) -> str | None:
        """The control token that ``text`` ends with, if it does."""
        if not text.endswith(self.endings):
            return None
        return next(token for token in self.ids if text.endswith(token))

    def forged(self, text: str, by_assistant: bool) -> bool:
        """Whether ``text`` holds one that its author cannot have emitted as a token."""
        if self.pattern is None or not self._suspect(text):
            return False
        if not by_assistant:
            return self.pattern.search(text) is not None
        return any(m.group() not in self.speakable for m in self.pattern.finditer(text))

    def hide(self, message: Message) -> Message:
        """A copy whose texts hold marks in place of the control tokens that must stay plain."""
        by_assistant = message["role"] == "assistant"
        return {k: v if k in _STRUCTURE else self._hide(v, by_assistant) for k, v in message.items()}

    def hide_value(self, value: Any) -> Any:
        """The same for tool definitions."""
        return self._hide(value, by_assistant=False)

    def _hide(self, value: Any, by_assistant: bool) -> Any:
        if isinstance(value, str):
            return self._hide_text(value, by_assistant)
        if isinstance(value, list):
            return [self._hide(v, by_assistant) for v in value]
        if isinstance(value, dict):
            return {self._hide(k, by_assistant): self._hide(v, by_assistant) for k, v in value.items()}
        return value

    def _hide_text(self, text: str, by_assistant: bool) -> str:
        if self.pattern is None or not self.forged(text, by_assistant):
            return text
        numbers = {token: number for number, token in enumerate(self.ids)}

        def mark(match: re.Match[str]) -> str:
            token = match.group()
            return token if by_assistant and token in self.speakable else f"{_HIDE}{numbers[token]}{_END}"

        return self.pattern.sub(mark, text)

    def unhide(self, text: str) -> str:
        """The text with the marks spelled out again."""
        tokens = list(self.ids)
        return _HIDDEN.sub(lambda m: tokens[int(m.group(1))], text)


def texts_of(value: Any) -> list[str]:
    """Every text inside a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [t for v in value for t in texts_of(v)]
    if isinstance(value, dict):
        return [t for k, v in value.items() if k not in _STRUCTURE for t in (k, *texts_of(v))]
    return []


def has_marks(text: str) -> bool:
    """Whether text holds one of the private-use characters that hiding needs for itself."""
    return _MARKS.search(text) is not None


class PlainEncoder(Protocol):
    """Encodes renderings with hidden marks."""

    def __call__(self, text: str) -> list[int]:
        """Ids of ``text``, where hidden control tokens are plain characters and the others themselves."""


def plain_encoder(
    tokenizer: Any, control: ControlTokens, encode: Callable[[str], list[int]]
) -> PlainEncoder | None:
    """The first way of encoding plainly that proves right on this tokenizer; None when none does."""
    for build in (_RenamedEncoder.build, _SegmentEncoder.build):
        encoder = build(tokenizer, control)
        if encoder is not None and _proves(encoder, control, encode):
            return encoder
    return None


def _proves(encoder: PlainEncoder, control: ControlTokens, encode: Callable[[str], list[int]]) -> bool:
    """Equal to normal encoding where nothing is hidden, free of control ids where everything is, and loses no text."""
    tokens = list(control.ids)[:8] + list(control.ids)[-8:]
    for number, token in enumerate(tokens):
        for text in (
            f"{token}user\nHello, wörld!  2 spaces{token}\n",
            f"a{token} b{tokens[number - 1]}\n\nc",
            f" {token}",
        ):
            if encoder(text) != encode(text):
                return False
    for token in tokens:
        hidden = control.hide_value(f"say {token} twice{token}\n")
        ids = encoder(hidden)
        if not ids or set(ids) & set(control.ids.values()):
            return False
    return True


@dataclass(frozen=True)
class _RenamedEncoder:
    """The same fast tokenizer with its control tokens renamed to marks: one pass, every rule of the original kept."""

    backend: Any
    control: ControlTokens

    @classmethod
    def build(cls, tokenizer: Any, control: ControlTokens) -> _RenamedEncoder | None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            return None
        from tokenizers import Tokenizer

        names = {token: f"{_SHOW}{number}{_END}" for number, token in enumerate(control.ids)}
        document = json.loads(backend.to_str())
        for token in document["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = document["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(k, k): v for k, v in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[names.get(entry[0], entry[0]), *entry[1:]] for entry in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        document.update(post_processor=None, truncation=None, padding=None)
        try:
            return cls(Tokenizer.from_str(json.dumps(document)), control)
        except ValueError:  # a vocabulary that refers to a renamed piece; the other way may still do
            return None

    def __call__(self, text: str) -> list[int]:
        numbers = {token: number for number, token in enumerate(self.control.ids)}
        if self.control.pattern is not None:
            text = self.control.pattern.sub(lambda m: f"{_SHOW}{numbers[m.group()]}{_END}", text)
        ids: list[int] = self.backend.encode(self.control.unhide(text), add_special_tokens=False).ids
        return ids


@dataclass(frozen=True)
class _SegmentEncoder:
    """For tokenizers without a fast backend: the text between control tokens is encoded with special tokens split."""

    encode: Callable[..., Sequence[int]]
    control: ControlTokens

    @classmethod
    def build(cls, tokenizer: Any, control: ControlTokens) -> _SegmentEncoder | None:
        try:
            tokenizer.encode("a", add_special_tokens=False, split_special_tokens=True)
        except TypeError:
            return None
        return cls(tokenizer.encode, control)

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        before, place = "", 0
        matches = list(self.control.pattern.finditer(text)) if self.control.pattern else []
        for match in matches:
            ids += self._piece(before, text[place : match.start()])
            before, place = match.group(), match.end()
            ids.append(self.control.ids[before])
        return ids + self._piece(before, text[place:])

    def _piece(self, before: str, piece: str) -> list[int]:
        """Ids of the text after control token ``before``, up to the next one."""
        if not piece:
            return []
        head = piece.partition(_HIDE)[0]
        in_context = list(self.encode(before + head, add_special_tokens=False))[1 if before else 0 :]
        if head == piece:
            return in_context
        plain = list(
            self.encode(self.control.unhide(piece), add_special_tokens=False, split_special_tokens=True)
        )
        alone = list(self.encode(head, add_special_tokens=False, split_special_tokens=True))
        return in_context + plain[len(alone) :] if plain[: len(alone)] == alone else plain
