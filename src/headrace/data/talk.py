"""The course of one regenerated conversation: which turns are asked for, what is kept, where it ends."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.data.api import Answer
from headrace.data.records import Conversation


def wanted_turns(conversation: Conversation, which: Literal["all", "last", "first"]) -> list[int]:
    """Indices of the turns to ask for: where assistant messages stand, else behind the last message."""
    roles = [m["role"] for m in conversation.messages]
    first = first_prompt(conversation)
    turns = [i for i, role in enumerate(roles) if role == "assistant" and i > first]
    if roles[-1] != "assistant":
        turns.append(len(roles))
    return {"all": turns, "last": turns[-1:], "first": turns[:1]}[which]


def first_prompt(conversation: Conversation) -> int:
    """Index of the first message that asks."""
    return next(i for i, m in enumerate(conversation.messages) if m["role"] in ("user", "tool"))


@dataclass
class Talk:
    """What is kept of a conversation's answers."""

    finish: list[str | None] = field(default_factory=list)
    sampled: list[dict[str, Any]] = field(default_factory=list)
    providers: list[str] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    usage: Counter[str] = field(default_factory=Counter)

    def add(self, answer: Answer, turn: int) -> None:
        self.finish.append(answer.finish or None)
        if answer.ids is not None and answer.prompt_ids is not None:
            self.sampled.append(
                {"turn": turn, "prompt_token_ids": answer.prompt_ids, "token_ids": answer.ids}
            )
        if answer.provider:
            self.providers.append(answer.provider)
        self.models.add(answer.model)
        self.usage.update(answer.usage)  # fractions of a dollar add up as well

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"models": sorted(self.models - {""}), "usage": dict(self.usage)}
        if self.providers:
            facts["providers"] = self.providers
        return {
            "finish_reasons": self.finish,
            **({"sampled": self.sampled} if self.sampled else {}),
            "generation": facts,
        }


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the endpoint takes it: reasoning under the name servers read, arguments as JSON text."""
    message = dict(message)
    if (reasoning := message.pop("reasoning", None)) is not None:
        message["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message["tool_calls"]
        ]
    return message


def fits(history: list[dict[str, Any]], messages: list[dict[str, Any]], index: int) -> bool:
    """Whether what comes next still belongs: tool results need the calls they answer, which then get the new ids."""
    if (
        index + 1 >= len(messages)
        or messages[index + 1]["role"] != "tool"
        or messages[index]["role"] != "assistant"
    ):
        return True
    made, meant = history[-1].get("tool_calls") or [], plain(messages[index]).get("tool_calls") or []
    if [_call(c) for c in made] != [_call(c) for c in meant]:
        return False
    ids = {old.get("id"): new.get("id") for old, new in zip(meant, made, strict=True)}
    for message in messages[index + 1 :]:
        if message["role"] != "tool":
            break
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return True


def _call(call: dict[str, Any]) -> tuple[str, Any]:
    function = call.get("function") or {}
    try:
        return str(function.get("name")), json.loads(function.get("arguments") or "{}")
    except ValueError:
        return str(function.get("name")), function.get("arguments")
