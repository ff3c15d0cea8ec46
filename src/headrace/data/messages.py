"""Raw message objects of any known spelling → messages with one set of roles and keys.

A normal message has ``role`` (system, user, assistant, tool), ``content`` (text, or a list of parts that are all text),
and where there are any ``reasoning``, ``tool_calls`` and further keys of the template's own. How reasoning and calls
are spelled for a given template is decided later, by what that template reads (see ``template``).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from headrace.data.reasons import Bad, Drop

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",  # its value is the call, as JSON
}
"""Role names that are understood, in any case. Anything else is an error: a guessed role might be supervised."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
THINK, END_THINK = "<think>", "</think>"
_CALL_ROLE = "function_call"
_SIMPLE = {"role", "content"}


class MessageReader:
    """Reads message lists; ``notes`` counts what was changed."""

    def __init__(self, aliases: dict[str, str], notes: Counter[str]) -> None:
        self.aliases = {**ALIASES, **{k.strip().lower(): v for k, v in aliases.items()}}
        self.notes = notes

    def read_all(self, raw: list[Any]) -> list[Message]:
        """Normal messages. Raises Bad with the number of the message that is wrong."""
        return [self.read(message, number) for number, message in enumerate(raw, 1)]

    def read(self, raw: Any, number: int) -> Message:
        """One normal message. Raises Bad or Drop."""
        if not isinstance(raw, dict):
            raise Bad("bad_messages", f"message {number} is a {type(raw).__name__}, not an object")
        if raw.keys() == _SIMPLE and isinstance(raw["content"], str) and raw["role"] in ROLES:
            return {"role": raw["role"], "content": raw["content"]}
        name = _either(raw, "role", "from", number)
        role = self.aliases.get(name.strip().lower()) if isinstance(name, str) else None
        if role is None:
            raise Bad(
                "unknown_role",
                f"has role {name!r} in message {number}, which is not known; name it with --role-aliases {name or 'NAME'}=user",
            )
        known = {"role", "from", "content", "value", "tool_calls", "function_call", *REASONING_KEYS}
        message: Message = {"role": role, "content": ""}
        message.update({k: v for k, v in raw.items() if k not in known and v is not None})
        content = _either(raw, "content", "value", number)
        if name.strip().lower() == _CALL_ROLE:
            message["tool_calls"] = _calls(content, number)
        else:
            calls = raw.get("tool_calls") or raw.get("function_call")
            if calls:
                message["tool_calls"] = _calls(calls, number)
            message["content"] = _content(content, message, number)
        if role == "assistant":
            self._add_reasoning(message, raw, number)
        return message

    def _add_reasoning(self, message: Message, raw: Message, number: int) -> None:
        """``reasoning`` from whichever key holds it; written twice it must be the same text."""
        found = {k: raw[k] for k in REASONING_KEYS if raw.get(k)}
        if not found:
            return
        texts = list(found.values())
        if not all(isinstance(t, str) for t in texts):
            raise Bad("bad_reasoning", f"message {number} has {next(iter(found))} that is not text")
        if any(t != texts[0] for t in texts[1:]):
            raise Bad("bad_reasoning", f"message {number} has {' and '.join(found)} with different text")
        inline, rest = split_inline(message["content"])
        if inline is not None:
            if inline.strip() != texts[0].strip():
                raise Bad(
                    "bad_reasoning",
                    f"message {number} has {next(iter(found))} and another reasoning in its content",
                )
            message["content"] = rest
            self.notes["reasoning_written_twice"] += 1
        if texts[0].strip():
            message["reasoning"] = texts[0]

    def tools(self, record: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The tool definitions of a record, None for none. Raises Bad for what is neither a list nor JSON of one."""
        raw = record.get("tools")
        raw = record.get("functions") if raw is None else raw
        if isinstance(raw, str):
            raw = _json(raw, "bad_tools", "tools") if raw.strip() else None
        if raw is None or raw == [] or raw == {}:
            return None
        if not isinstance(raw, list):
            raise Bad("bad_tools", f"has tools that are a {type(raw).__name__}, not a list")
        tools = []
        for tool in raw:
            tool = _json(tool, "bad_tools", "a tool") if isinstance(tool, str) else tool
            if not isinstance(tool, dict):
                raise Bad("bad_tools", "has a tool that is not an object")
            if "function" not in tool and "name" in tool:
                tool = {"type": "function", "function": tool}
            tools.append(tool)
        return tools


def split_inline(content: Any) -> tuple[str | None, Any]:
    """(reasoning, rest) of content that opens with a think block; (None, content) otherwise."""
    if isinstance(content, str) and END_THINK in content:
        head, _, rest = content.partition(END_THINK)
        if head.lstrip().startswith(THINK):
            return head.lstrip().removeprefix(THINK).strip("\n"), rest.lstrip("\n")
    return None, content


def _either(raw: Message, key: str, other: str, number: int) -> Any:
    """The value under one of two spellings. Both at once must agree: an empty one never yields silently."""
    if key in raw and other in raw and raw[key] != raw[other] and None not in (raw[key], raw[other]):
        raise Bad(
            "conflicting_keys", f"message {number} has {key} and {other} with different values; keep one"
        )
    value = raw.get(key)
    return raw.get(other) if value is None else value


def _content(content: Any, message: Message, number: int) -> Any:
    """Text, or parts that are all text. Missing content is allowed beside tool calls and for an assistant (to be judged later)."""
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant":
            return ""
        raise Bad("bad_content", f"message {number} ({message['role']}) has no content")
    if not isinstance(content, list):
        raise Bad("bad_content", f"message {number} has content that is a {type(content).__name__}, not text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, dict):
            raise Bad("bad_content", f"message {number} has a content part that is a {type(part).__name__}")
        elif part.get("type", "text") not in ("text", "input_text", "output_text"):
            raise Drop("not_text", f"message {number} has {part.get('type')} content")
        elif not isinstance(part.get("text"), str):
            raise Bad("bad_content", f"message {number} has a text part without text")
        else:
            texts.append(part["text"])
    return "\n".join(texts)


def _calls(raw: Any, number: int) -> list[dict[str, Any]]:
    """Tool calls in the OpenAI shape, arguments as an object where they are one."""
    if isinstance(raw, str):
        raw = _json(raw, "bad_tool_calls", f"message {number}: tool calls")
    if isinstance(raw, dict):
        raw = [raw]
    if not isinstance(raw, list) or not raw:
        raise Bad("bad_tool_calls", f"message {number} has tool calls that are no list")
    calls = []
    for call in raw:
        function = call.get("function", call) if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise Bad("bad_tool_calls", f"message {number} has a tool call without a name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = (
                _json(arguments, "bad_tool_calls", f"message {number}: arguments")
                if arguments.strip()
                else {}
            )
        if arguments is None:
            arguments = {}
        rest = {k: v for k, v in call.items() if k in ("id", "index") and v is not None}
        calls.append(
            {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return calls


def _json(text: str, reason: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise Bad(reason, f"{what} is text that is not JSON") from exc
