"""Prompt files: the `turns` JSONL of EAGLE's evaluations, OpenAI `messages`, plain `prompt` texts, or token ids.

A file is one set. Its prompts become conversations that grow by the model's own answers, turn by turn, as the
published evaluations do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from headrace.errors import InputError

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file. Exactly one of ``ids`` and ``messages`` is not empty."""

    index: int
    """0-based place in its set."""
    line: int
    """1-based line of the file."""
    messages: tuple[dict[str, Any], ...] = ()
    """What comes before the first answer."""
    follow_ups: tuple[str, ...] = ()
    """User turns after the first answer."""
    ids: tuple[int, ...] = ()
    """Token ids given by the file itself."""

    @property
    def turns(self) -> int:
        """How many answers the model writes."""
        return 1 + len(self.follow_ups)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one file."""

    name: str
    path: Path
    sha: str
    """16 hex digits over the prompts used."""
    prompts: tuple[Prompt, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.prompts)


def read_prompts(path: Path, limit: int = 0) -> PromptSet:
    """Read a prompt file, its first ``limit`` prompts if that is not 0.

    Raises InputError naming file and line for anything that is not a prompt, and for a file without any.
    """
    prompts: list[Prompt] = []
    for line, record in _records(path):
        if limit and len(prompts) == limit:
            break
        prompts.append(_prompt(record, len(prompts), f"{path}:{line}", line))
    if not prompts:
        raise InputError(
            f"{path} holds no prompts; give a JSONL file with `turns`, `messages`, `prompt` or `input_ids` a line"
        )
    text = json.dumps([[p.messages, p.follow_ups, p.ids] for p in prompts], ensure_ascii=False)
    return PromptSet(path.stem, path, xxhash.xxh3_64_hexdigest(text.encode()), tuple(prompts))


def read_sets(paths: list[Path], limit: int = 0) -> list[PromptSet]:
    """Read several files. Raises InputError when two would carry one name in the report."""
    sets = [read_prompts(path, limit) for path in paths]
    names = [s.name for s in sets]
    for prompt_set in sets:
        if names.count(prompt_set.name) > 1:
            raise InputError(
                f"two prompt files are called {prompt_set.name}; rename one, the report tells sets apart by name"
            )
    return sets


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        # Not splitlines(): JSON texts may hold U+2028 and other characters that it takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise InputError(f"prompt file {path} does not exist") from None
    except (UnicodeDecodeError, IsADirectoryError) as exc:
        raise InputError(f"{path} is not a UTF-8 text file ({exc}); give JSONL") from exc
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as exc:
            raise InputError(f"{path}:{number} is not JSON ({exc}); mend or delete the line") from exc
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number} is not a JSON object; each line must be one")
        yield number, record


def _prompt(record: dict[str, Any], index: int, where: str, line: int) -> Prompt:
    if "input_ids" in record:
        ids = record["input_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise InputError(f"{where}: input_ids must be a non-empty list of token ids")
        return Prompt(index, line, ids=tuple(ids))
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise InputError(f"{where}: turns must be a non-empty list of texts")
        return Prompt(index, line, ({"role": "user", "content": turns[0]},), tuple(turns[1:]))
    if "messages" in record:
        return Prompt(index, line, _messages(record["messages"], where))
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"]:
            raise InputError(f"{where}: prompt must be a text")
        return Prompt(index, line, ({"role": "user", "content": record["prompt"]},))
    raise InputError(f"{where} has none of `turns`, `messages`, `prompt`, `input_ids`")


def _messages(messages: Any, where: str) -> tuple[dict[str, Any], ...]:
    """The conversation up to the last message that the model would answer."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: messages must be a non-empty list")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "content" not in message:
            raise InputError(f"{where}: message {number} is not an object with role and content")
        if message.get("role") not in ROLES:
            raise InputError(
                f"{where}: message {number} has unknown role {message.get('role')!r}; known are {sorted(ROLES)}"
            )
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1  # the recorded answer is not a prompt; the model writes its own
    if not end:
        raise InputError(f"{where}: messages has nothing but assistant messages")
    return tuple(messages[:end])


class Conversation:
    """A prompt on its way through its turns: renders the next prompt, takes the answer."""

    def __init__(self, prompt: Prompt, tokenizer: Any, *, chat: bool = True) -> None:
        self.prompt = prompt
        self._tokenizer = tokenizer
        self._chat = chat
        self._messages = list(prompt.messages)
        self._answers = 0
        self._abandoned = False

    @property
    def done(self) -> bool:
        """Whether every turn has been answered, or no further one will be."""
        return self._abandoned or self._answers == self.prompt.turns

    def abandon(self) -> None:
        """Answer no further turn."""
        self._abandoned = True

    def ids(self) -> list[int]:
        """Token ids of the next prompt. Raises InputError when the target's template refuses the messages."""
        if self.prompt.ids:
            return list(self.prompt.ids)
        if self._chat and self._tokenizer.chat_template:
            return self._rendered()
        text = "\n".join(str(message["content"]) for message in self._messages)
        return [int(i) for i in self._tokenizer.encode(text)]

    def _rendered(self) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                self._messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as exc:
            raise InputError(
                f"line {self.prompt.line}: the target's chat template refuses the messages ({exc})"
            ) from exc
        # The template writes every special token itself, a BOS included.
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def answer(self, ids: list[int]) -> None:
        """Take the model's answer; the next user turn follows it."""
        self._answers += 1
        if self.done:
            return
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": text})
        self._messages.append({"role": "user", "content": self.prompt.follow_ups[self._answers - 1]})
