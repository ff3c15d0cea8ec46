"""The toy tokenizer and its templates: small enough that every mask can be counted by hand.

Specials, one token each: ``<s>`` ``<|h|>`` ``<|e|>`` ``<think>`` ``</think>``; the role word right after ``<|h|>`` is
one token; every other character is one token. A message renders as ``<|h|>ROLE\\nCONTENT<|e|>\\n`` (5 + content
tokens), the generation prompt is ``<|h|>assistant\\n`` (3 tokens). So that a header can be told from content that looks
like one, templates write an invisible separator (U+2063) before the role word; it is part of the role's token. The class is duck-typed like a transformers
tokenizer, down to ``added_tokens_decoder`` and the keyword arguments of ``apply_chat_template``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

SPECIALS = ("<s>", "<|h|>", "<|e|>", "<think>", "</think>")
ROLES = ("system", "user", "assistant", "tool", "developer", "ipython", "observation")
FIRST_CHARACTER = 16
SEPARATOR = "\u2063"

_HEAD = "<|h|>\u2063{{ m.role }}\n"
_GENERATE = "{% if add_generation_prompt %}<|h|>\u2063assistant\n{% endif %}"

PLAIN = "{% for m in messages %}" + _HEAD + "{{ m.content }}<|e|>\n{% endfor %}" + _GENERATE
"""Content as it is; no reasoning, no tools."""

WITH_BOS = "<s>" + PLAIN
"""PLAIN, and the text starts with the beginning-of-sequence token."""

NO_GENERATION_PROMPT = "{% for m in messages %}" + _HEAD + "{{ m.content }}<|e|>\n{% endfor %}"
"""Ignores ``add_generation_prompt``."""

_SPLIT_REASONING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set reasoning = m.reasoning_content if m.reasoning_content is defined and m.reasoning_content else '' -%}
{%- set content = m.content -%}
{%- if m.role == 'assistant' and not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
"""

THINKING = (
    _SPLIT_REASONING
    + "<|h|>\u2063{{ m.role }}{{ '\n' }}{%- if reasoning and loop.index0 > ns.last -%}<think>{{ reasoning }}</think>{%- endif -%}"
    + "{{ content }}<|e|>{{ '\n' }}{%- endfor -%}{%- if add_generation_prompt -%}<|h|>\u2063assistant{{ '\n' }}{%- endif -%}"
)
"""Reasoning from ``reasoning_content`` or inline; dropped from every turn before the last user turn."""

EMPTY_THINK = (
    _SPLIT_REASONING
    + "<|h|>\u2063{{ m.role }}{{ '\n' }}{%- if m.role == 'assistant' -%}<think>{{ reasoning }}</think>{%- endif -%}"
    + "{{ content }}<|e|>{{ '\n' }}{%- endfor -%}{%- if add_generation_prompt -%}<|h|>\u2063assistant{{ '\n' }}{%- endif -%}"
)
"""Puts an empty think block before an answer that has no reasoning."""

STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    + _HEAD
    + "{{ m.content }}<|e|>\n{% endfor %}"
    + _GENERATE
)
"""Raises unless user and assistant alternate, user first."""

TOOLS = (
    "{% if tools %}<|h|>\u2063system\n{{ tools | tojson }}<|e|>\n{% endif %}"
    "{% for m in messages %}"
    + _HEAD
    + "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}"
    "<|e|>\n{% endfor %}" + _GENERATE
)
"""Tool definitions first, calls after the content."""

DATED = "<|h|>\u2063system\n{{ strftime_now('%d %b %Y') }}<|e|>\n" + PLAIN
"""Prints today's date, as Llama-3 and Harmony templates do."""

SHOUTING = "{% for m in messages %}" + _HEAD + "{{ m.content | trim | upper }}<|e|>\n{% endfor %}" + _GENERATE
"""Changes content: nothing that is searched for verbatim is found."""


@dataclass(frozen=True)
class ToyToken:
    """Stands where transformers has ``AddedToken``."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class ToyTokenizer:
    """See the module. ``chat_template`` may be reassigned, as with a real tokenizer."""

    bos_token, eos_token, pad_token = "<s>", "<|e|>", "<|e|>"
    bos_token_id, eos_token_id, pad_token_id = 0, 2, 2
    is_fast = False

    def __init__(self, chat_template: str = PLAIN) -> None:
        self.chat_template = chat_template
        self.added_tokens_decoder = {i: ToyToken(text) for i, text in enumerate(SPECIALS)}
        self._pieces = re.compile("|".join(re.escape(s) for s in SPECIALS))
        self._role = re.compile(SEPARATOR + "(" + "|".join(ROLES) + r")(?=\n)")

    def __len__(self) -> int:
        return FIRST_CHARACTER + 0x110000

    @property
    def all_special_ids(self) -> list[int]:
        return list(self.added_tokens_decoder)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of ``text``. Raises UnicodeEncodeError for a lone surrogate, as real tokenizers do."""
        text.encode("utf-8")
        ids: list[int] = [self.bos_token_id] if add_special_tokens else []
        place = 0
        while place < len(text):
            special = None if split_special_tokens else self._pieces.match(text, place)
            role = self._role.match(text, place) if ids and ids[-1] == SPECIALS.index("<|h|>") else None
            if special:
                ids.append(SPECIALS.index(special.group()))
                place = special.end()
            elif role:
                ids.append(len(SPECIALS) + ROLES.index(role.group(1)))
                place = role.end()
            else:
                ids.append(FIRST_CHARACTER + ord(text[place]))
                place += 1
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``."""
        names = [*SPECIALS, *(SEPARATOR + role for role in ROLES)]
        parts = []
        for i in ids:
            if i < len(SPECIALS) and skip_special_tokens:
                continue
            parts.append(names[i] if i < len(names) else chr(i - FIRST_CHARACTER))
        return "".join(parts)

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(t, add_special_tokens) for t in text]}

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Rendered text, or its ids when ``tokenize``. Raises jinja2.TemplateError when the template refuses."""
        names = {**self.special_tokens_map, "add_generation_prompt": add_generation_prompt, **kwargs}
        text = _compiled(self.chat_template).render(messages=conversation, tools=tools, **names)
        return self.encode(text, add_special_tokens=False) if tokenize else text


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    """The template in Jinja as transformers sets it up."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
