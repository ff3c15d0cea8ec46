"""A raw record of any known shape → one of three normal forms: a conversation, a text, or token ids.

Only keys that are written down here are understood; nothing is guessed. A record that cannot be understood raises
:class:`Bad`, one that is understood and of no use raises :class:`Drop`: the difference is whether the user should mend
the data or merely be told.

When a record holds keys of several shapes, the first of this order counts: token ids, messages (or conversations),
instruction, prompt, text. ``messages`` and ``conversations`` together must say the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.data.messages import Message, MessageReader
from headrace.data.reasons import Bad, Drop
from headrace.types import hash_json

SHAPES = ("tokens", "messages", "conversations", "alpaca", "prompt", "text")
_ID_KEYS = ("conversation_id", "id", "uuid", "prompt_id")
_TOKEN_KEYS = ("input_ids", "token_ids")
_MASK_KEYS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "labels")
_ANSWER_KEYS = ("response", "completion", "answer", "output")
_PROMPT_KEYS = ("prompt", "question", "query", "input")


@dataclass(slots=True)
class Conversation:
    """Messages as the template will get them."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    identity: str = ""
    finish: dict[int, str] = field(default_factory=dict)
    """Finish reason by index of the assistant message."""
    sampled: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Prompt ids and sampled ids by index of the assistant message, when a server gave them."""
    shape: str = "messages"


@dataclass(slots=True)
class Tokens:
    """A row that is tokenized already."""

    ids: np.ndarray
    mask: np.ndarray | None
    identity: str = ""
    shape: str = "tokens"


@dataclass(slots=True)
class Text:
    """Raw text, control tokens and all, as a completion endpoint would take it."""

    text: str
    identity: str = ""
    shape: str = "text"


Item = Conversation | Tokens | Text


class RecordReader:
    """Turns raw records into normal forms; ``notes`` counts what was changed on the way."""

    def __init__(
        self, shape: str = "auto", aliases: Mapping[str, str] | None = None, answers: bool = True
    ) -> None:
        self.shape = shape
        self.answers = answers
        """Whether conversations without an assistant turn are of use (to regenerate they are)."""
        self.notes: Counter[str] = Counter()
        self.messages = MessageReader(dict(aliases or {}), self.notes)

    def parse(self, text: bytes) -> Any:
        """JSON bytes → value, lone surrogates replaced. Raises Bad when the bytes are not UTF-8 or not JSON."""
        try:
            value = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as exc:
            raise Bad("bad_utf8", f"is not UTF-8 ({exc.reason} at byte {exc.start})") from exc
        except json.JSONDecodeError as exc:
            raise Bad("broken_json", f"is not JSON ({exc.msg} at character {exc.pos})") from exc
        except RecursionError as exc:
            raise Bad("broken_json", "is nested too deeply") from exc
        if b"\\u" in text and (b"\\ud" in text or b"\\uD" in text):
            fixed = replace_surrogates(value)
            if fixed != value:
                self.notes["surrogates_replaced"] += 1
            return fixed
        return value

    def read(self, record: Any) -> Item:
        """The record's normal form. Raises Bad or Drop."""
        if not isinstance(record, dict):
            raise Bad("not_an_object", f"is a JSON {type(record).__name__}, not an object")
        shape = self.shape if self.shape != "auto" else _shape_of(record)
        item: Item
        if shape == "tokens":
            item = _read_tokens(record)
        elif shape == "text":
            item = Text(_text_of(record, "text"))
        else:
            item = self._conversation(shape, record)
        item.shape = shape
        item.identity = _identity(record, item)
        return item

    def _conversation(self, shape: str, record: dict[str, Any]) -> Conversation:
        if shape in ("alpaca", "prompt"):
            messages = self.messages.read_all(
                _raw_alpaca(record) if shape == "alpaca" else _raw_prompt(record)
            )
        else:
            messages = self._messages(record)
        messages = self._with_system(messages, record)
        conversation = Conversation(messages, self.messages.tools(record))
        self._add_finish(conversation, record)
        _add_sampled(conversation, record)
        if self.answers:
            self._keep_trainable(conversation)
        return conversation

    def _messages(self, record: dict[str, Any]) -> list[Message]:
        lists = _message_lists(record)
        read = [self.messages.read_all(messages) for messages in lists.values()]
        if any(messages != read[0] for messages in read[1:]):
            raise Bad("conflicting_keys", f"has {' and '.join(lists)} with different content; keep one")
        return read[0]

    def _with_system(self, messages: list[Message], record: dict[str, Any]) -> list[Message]:
        """A system prompt kept beside the messages goes first, exactly once."""
        systems = {
            record[k]
            for k in ("system", "system_prompt")
            if isinstance(record.get(k), str) and record[k].strip()
        }
        if not systems:
            return messages
        if len(systems) > 1:
            raise Bad("conflicting_keys", "has system and system_prompt with different text")
        text = systems.pop()
        inside = [m["content"] for m in messages if m["role"] == "system"]
        if not inside:
            return [{"role": "system", "content": text}, *messages]
        if inside[0] != text:
            raise Bad("conflicting_keys", "has a system prompt beside its messages and another among them")
        return messages

    def _add_finish(self, conversation: Conversation, record: dict[str, Any]) -> None:
        turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        for index in turns:
            reason = conversation.messages[index].pop("finish_reason", None)
            if reason:
                conversation.finish[index] = str(reason)
        reasons = record.get("finish_reasons", record.get("finish_reason"))
        if reasons is None:
            return
        if isinstance(reasons, str):
            reasons = [None] * (len(turns) - 1) + [reasons]
        if not isinstance(reasons, list) or len(reasons) != len(turns):
            raise Bad(
                "bad_finish_reasons",
                f"has finish_reasons for another number of turns than its {len(turns)} assistant turns",
            )
        conversation.finish.update({i: str(r) for i, r in zip(turns, reasons, strict=True) if r})

    def _keep_trainable(self, conversation: Conversation) -> None:
        """Drop assistant turns before any prompt and whatever follows the last answer; refuse what then teaches nothing."""
        messages = conversation.messages
        roles = [m["role"] for m in messages]
        if "assistant" not in roles:
            raise Drop("no_assistant_turn")
        first = next((i for i, role in enumerate(roles) if role in ("user", "tool")), len(roles))
        last = len(roles) - 1 - roles[::-1].index("assistant")
        if first > last:
            raise Drop("no_prompt", "the assistant answers before anyone asked")
        for message in messages:
            if message["role"] == "assistant" and _is_empty(message):
                raise Drop("empty_assistant_turn")
        keep = [i for i in range(last + 1) if i >= first or roles[i] != "assistant"]
        if len(keep) == len(messages):
            return
        self.notes["leading_assistant_turns_removed"] += roles[:first].count("assistant")
        self.notes["messages_after_last_answer_removed"] += len(messages) - 1 - last
        place = {old: new for new, old in enumerate(keep)}
        conversation.messages = [messages[i] for i in keep]
        conversation.finish = {place[i]: r for i, r in conversation.finish.items() if i in place}
        conversation.sampled = {place[i]: s for i, s in conversation.sampled.items() if i in place}


def _is_empty(message: Message) -> bool:
    return (
        not (message["content"] or "").strip()
        and not message.get("tool_calls")
        and not message.get("reasoning")
    )


def replace_surrogates(value: Any) -> Any:
    """The JSON value with every lone surrogate replaced by U+FFFD; pairs were joined by the parser already."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [replace_surrogates(v) for v in value]
    if isinstance(value, dict):
        return {replace_surrogates(k): replace_surrogates(v) for k, v in value.items()}
    return value


def prune_none(value: Any) -> Any:
    """Without the keys that columnar files fill with null because another record has them."""
    if isinstance(value, dict):
        return {k: prune_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [prune_none(v) for v in value]
    return value


# --- which shape, whose conversation ------------------------------------------------------------------------------


def _shape_of(record: dict[str, Any]) -> str:
    if any(record.get(k) is not None for k in _TOKEN_KEYS):
        return "tokens"
    if record.get("messages") is not None:
        return "messages"
    if record.get("conversations") is not None or isinstance(record.get("conversation"), list):
        return "conversations"
    if record.get("instruction") is not None:
        return "alpaca"
    if any(record.get(k) is not None for k in _PROMPT_KEYS):
        return "prompt"
    if record.get("text") is not None:
        return "text"
    raise Bad(
        "unknown_shape",
        f"has keys {sorted(record)[:8]} and none of messages, conversations, instruction, prompt, text, input_ids",
    )


def _identity(record: dict[str, Any], item: Item) -> str:
    """The record's own id, else a hash of what it says: it decides the split, so it must not depend on place."""
    for key in _ID_KEYS:
        value = record.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
            return str(value)
    if isinstance(item, Conversation):
        return hash_json([item.messages, item.tools])
    if isinstance(item, Text):
        return hash_json(item.text)
    return hash_json([item.ids.tolist(), None if item.mask is None else item.mask.tolist()])


# --- shapes -------------------------------------------------------------------------------------------------------


def _message_lists(record: dict[str, Any]) -> dict[str, list[Any]]:
    lists = {k: record[k] for k in ("messages", "conversations", "conversation") if record.get(k) is not None}
    if not lists:
        raise Bad("unknown_shape", "has no messages")
    return {key: _json_list(key, value) for key, value in lists.items()}


def _json_list(key: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as exc:
            raise Bad("bad_messages", f"has {key} as text that is not JSON") from exc
    if not isinstance(value, list) or not value:
        raise Bad(
            "bad_messages",
            f"has {key} that is no list of messages" if value else f"has an empty list of {key}",
        )
    return value


def _raw_alpaca(record: dict[str, Any]) -> list[Any]:
    prompt = _text_of(record, "instruction")
    extra = record.get("input")
    if extra is not None and not isinstance(extra, str):
        raise Bad("bad_content", "has an input that is not text")
    if extra and extra.strip():
        prompt = f"{prompt}\n\n{extra}" if prompt.strip() else extra
    turns: list[Any] = []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Bad("bad_messages", "has a history that is no list of [question, answer] pairs")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns.append({"role": "user", "content": prompt})
    return turns + _answer(record, ("output", "response", "answer"))


def _raw_prompt(record: dict[str, Any]) -> list[Any]:
    key = next((k for k in _PROMPT_KEYS if record.get(k) is not None), None)
    if key is None:
        raise Bad("unknown_shape", f"has none of {list(_PROMPT_KEYS)}")
    prompt = record[key]
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return [*turns, *_answer(record, tuple(k for k in _ANSWER_KEYS if k != key))]


def _answer(record: dict[str, Any], keys: tuple[str, ...]) -> list[Any]:
    found = {k: record[k] for k in keys if record.get(k) is not None}
    if not found:
        return []
    values = list(found.values())
    if any(v != values[0] for v in values[1:]):
        raise Bad("conflicting_keys", f"has {' and '.join(found)} with different content; keep one")
    answer = values[0]
    if isinstance(answer, list):
        return answer
    turn = {"role": "assistant", "content": answer}
    for key in ("reasoning_content", "reasoning", "thinking"):
        if record.get(key):
            turn[key] = record[key]
    return [turn]


def _text_of(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise Bad("bad_content", f"has {key} that is not text")
    return value


def _read_tokens(record: dict[str, Any]) -> Tokens:
    ids = next((record[k] for k in _TOKEN_KEYS if record.get(k) is not None), None)
    array = _int_list("token ids", ids)
    if (attended := record.get("attention_mask")) is not None and not all(attended):
        raise Bad("bad_token_ids", "is padded (attention_mask has zeros); store the tokens without padding")
    masks = {}
    for key in _MASK_KEYS:
        if record.get(key) is None:
            continue
        values = _int_list(key, record[key])
        if len(values) != len(array):
            raise Bad(
                "bad_token_ids",
                f"has {len(array)} token ids and {len(values)} in {key}; they must be equally many",
            )
        if key == "labels":
            if bool(((values != -100) & (values != array)).any()):
                raise Bad("bad_token_ids", "has labels that are neither -100 nor the token itself")
            values = values != -100
        elif bool(((values != 0) & (values != 1)).any()):
            raise Bad("bad_token_ids", f"has values other than 0 and 1 in {key}")
        masks[key] = values.astype(bool)
    found = list(masks.values())
    if any(not np.array_equal(m, found[0]) for m in found[1:]):
        raise Bad("conflicting_keys", f"has {' and '.join(masks)} that disagree; keep one")
    return Tokens(array, found[0] if found else None)


def _int_list(what: str, value: Any) -> np.ndarray:
    """int64 [n] of a list of ints or booleans. Raises Bad for anything else, also nested lists and fractions."""
    try:
        array = np.asarray(value)
    except ValueError as exc:
        raise Bad("bad_token_ids", f"has {what} that are no flat list of whole numbers") from exc
    if array.ndim != 1 or array.dtype.kind not in "iub" or not len(array):
        raise Bad("bad_token_ids", f"has {what} that are no flat, non-empty list of whole numbers")
    if bool((array >= 2**31).any()) or bool((array < -(2**31)).any()):
        raise Bad("bad_token_ids", f"has {what} too large for a token id")
    return array.astype(np.int64)


def _add_sampled(conversation: Conversation, record: dict[str, Any]) -> None:
    """Ids that ``headrace regenerate`` kept: one entry a sampled turn, {turn, prompt_token_ids, token_ids}."""
    entries = record.get("sampled")
    if not entries:
        return
    turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    for entry in entries:
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("turn"), int)
            or not 0 <= entry["turn"] < len(turns)
        ):
            raise Bad("bad_token_ids", "has a sampled entry that names no assistant turn")
        prompt, answer = (_int_list(k, entry.get(k)).tolist() for k in ("prompt_token_ids", "token_ids"))
        conversation.sampled[turns[entry["turn"]]] = (prompt, answer)
