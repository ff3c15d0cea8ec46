"""The target's own chat template: rendered through its tokenizer, and asked at the start what it can say.

Nothing of a template is re-implemented here. What has to be known of it (which key holds reasoning, whether arguments
go in as objects, what it puts before an answer, whether it prints a date) is found by rendering small conversations
and comparing the results.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.data.control import REASONING_TAGS, ControlTokens, PlainEncoder, plain_encoder
from headrace.data.encoding import Anchors, Encoder, normalize_ids
from headrace.data.jinja import TemplateRenderer
from headrace.data.messages import REASONING_KEYS, Message, split_inline
from headrace.data.reasons import Drop
from headrace.errors import ConfigError, PreflightError

_USER: Message = {"role": "user", "content": "What is it?"}
_ANSWERS = ("Xq", "7z.")
_REASON = "Rk5"
_FUNCTION, _KEY, _VALUE = "probe_fn", "kq", "Vz"
_TOOL = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "d"}},
            "required": [_KEY],
        },
    },
}


@dataclass(frozen=True)
class TemplateFacts:
    """What the probes found; written into the manifest."""

    header: str = ""
    """What an answer begins with when the template ignores ``add_generation_prompt``."""
    injected: str = ""
    """Empty think block the template puts before an answer without reasoning."""
    reasoning_key: str = ""
    """Message key whose text is rendered as reasoning; ``""`` when there is none."""
    inline_reasoning: str = "kept"
    """A think block inside content is ``parsed`` like the key, ``kept`` as content, or ``lost``."""
    renders_calls: bool = False
    """Tool calls appear in the rendering."""
    object_arguments: bool = True
    """Arguments go in as an object (else as JSON text)."""
    prints_date: bool = False
    """The rendering depends on the day."""


class ChatTemplate:
    """A tokenizer with its template. Raises ConfigError when it has none, or prints a date and none is given."""

    def __init__(
        self, tokenizer: Any, date: str = "", args: dict[str, Any] | None = None, stop_ids: Iterable[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.args = dict(args or {})
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise ConfigError(
                "the model's tokenizer has no chat template; add chat_template.jinja to the model folder"
            )
        self.text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        self._renderer = TemplateRenderer(tokenizer, self.args)
        self.facts = self._probe()
        if self.facts.prints_date and not date:
            raise ConfigError(
                "the model's template prints the date; give --date YYYY-MM-DD, the day that serving is to print"
            )
        self._date = datetime.date.fromisoformat(date) if date else None
        self.control = ControlTokens.of(tokenizer, self.text)
        self.encoder = Encoder(tokenizer)
        self.anchors = Anchors.of(tokenizer, self.encoder, self.control)
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids = frozenset(stop_ids) | ({int(eos)} if eos is not None else set())
        """Ids with which the model ends a turn."""
        self._plain: PlainEncoder | None = None
        self._plain_known = False

    @property
    def plain(self) -> PlainEncoder | None:
        """Encoder for hidden control tokens, built when first asked for; None when no way proves right."""
        if not self._plain_known:
            self._plain = plain_encoder(self.tokenizer, self.control, self.encoder.one)
            self._plain_known = True
        return self._plain

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, prompt: bool = False
    ) -> str:
        """Text of ``messages``, with the generation prompt behind it when ``prompt``. Raises Drop when the template refuses."""
        try:
            return self._renderer(messages, tools, prompt, self._date)
        except self._renderer.refusals as exc:
            raise Drop("template_refuses", _first_line(exc)) from exc

    def check(self) -> None:
        """Raise PreflightError unless rendering and encoding give the ids the tokenizer gives in one step."""
        conversation = [_USER, {"role": "assistant", "content": "It is 7."}, _USER]
        try:
            whole = normalize_ids(
                self.tokenizer.apply_chat_template(
                    conversation, tokenize=True, add_generation_prompt=True, **self.args
                )
            )
            text = self._renderer.by_tokenizer(conversation, prompt=True)
        except self._renderer.refusals:
            return  # the template refuses this conversation; rows tell about themselves
        if whole != self.encoder.one(text):
            raise PreflightError(
                "apply_chat_template gives other ids than encoding its own text; this tokenizer's ids cannot be trusted, "
                "install the transformers version the model names"
            )

    def fit(self, messages: list[Message]) -> list[Message]:
        """Messages spelled as this template reads them. Raises Drop for reasoning or calls it would not render."""
        if all(len(m) == 2 for m in messages) and not any("</think>" in m["content"] for m in messages):
            return messages
        return [self._fit_one(m) for m in messages]

    def _fit_one(self, message: Message) -> Message:
        facts = self.facts
        message = {k: v for k, v in message.items() if k != "weight"}
        if message["role"] != "assistant":
            return message
        if facts.inline_reasoning != "parsed":
            inline, rest = split_inline(message["content"])
            if inline is not None and facts.reasoning_key:
                message.update(content=rest, **({"reasoning": inline} if inline.strip() else {}))
            elif inline is not None and facts.inline_reasoning == "lost" and inline.strip():
                raise Drop("reasoning_not_rendered", "the template removes think blocks")
        if (reasoning := message.pop("reasoning", None)) is not None:
            if not facts.reasoning_key:
                raise Drop("reasoning_not_rendered", "the template reads no reasoning")
            message[facts.reasoning_key] = reasoning
        if message.get("tool_calls"):
            if not facts.renders_calls:
                raise Drop("tool_calls_not_rendered")
            if not facts.object_arguments:
                message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return message

    # --- probes -----------------------------------------------------------------------------------------------

    def _try(
        self, *answers: Message, tools: Any = None, prompt: bool = False, date: datetime.date | None = None
    ) -> str | None:
        """Rendering of a question and these messages, None when the template refuses."""
        try:
            return self._renderer([_USER, *answers], tools, prompt, date)
        except self._renderer.refusals:
            return None

    def _probe(self) -> TemplateFacts:
        asked, begun = self._try(), self._try(prompt=True)
        if asked is None or begun is None:
            raise ConfigError(
                "the model's template cannot render a user message; its chat_template is broken"
            )
        answers = [self._try({"role": "assistant", "content": text}) for text in _ANSWERS]
        header = injected = ""
        if None not in answers:
            lead = _common_start([text for text in answers if text is not None])
            if lead.startswith(begun):
                lead = lead[len(begun) :]
                if begun == asked:  # the flag was ignored: what every answer starts with is the header
                    header = lead
                elif _is_think_block(lead):
                    injected = lead
        key = next((k for k in REASONING_KEYS if self._renders_reasoning(k)), "")
        calls, objects = self._probe_calls()
        return TemplateFacts(
            header=header,
            injected=injected,
            reasoning_key=key,
            inline_reasoning=self._probe_inline(key),
            renders_calls=calls,
            object_arguments=objects,
            prints_date=self._probe_date(),
        )

    def _renders_reasoning(self, key: str) -> bool:
        text = self._try({"role": "assistant", "content": _ANSWERS[0], key: _REASON})
        return text is not None and _REASON.lower() in text.lower()

    def _probe_inline(self, key: str) -> str:
        inline = self._try({"role": "assistant", "content": f"<think>{_REASON}</think>{_ANSWERS[0]}"})
        if inline is None or _REASON.lower() not in inline.lower():
            return "lost"
        by_key = self._try({"role": "assistant", "content": _ANSWERS[0], key: _REASON}) if key else None
        return "parsed" if inline == by_key else "kept"

    def _probe_calls(self) -> tuple[bool, bool]:
        """(tool calls are rendered, arguments go in as objects)."""
        for arguments in ({_KEY: _VALUE}, json.dumps({_KEY: _VALUE})):
            call = {
                "id": "probe0000",
                "type": "function",
                "function": {"name": _FUNCTION, "arguments": arguments},
            }
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            for tools in ([_TOOL], None):
                text = self._try(answer, tools=tools)
                if text is None or f"'{_KEY}'" in text:  # the Python spelling of a dict is no JSON
                    continue
                without = self._try({"role": "assistant", "content": "x"}, tools=tools) or ""
                if _VALUE in text and _VALUE not in without:
                    return True, isinstance(arguments, dict)
        return False, True

    def _probe_date(self) -> bool:
        if "strftime_now" not in self.text and "date_string" not in self.text:
            return False
        texts = {self._try(date=day) for day in (datetime.date(2001, 2, 3), datetime.date(2019, 11, 28))}
        if None in texts:
            raise ConfigError(
                "the model's template prints the date in a way that cannot be given from outside"
            )
        return len(texts) > 1

    def describe(self) -> dict[str, Any]:
        """The probes' findings as JSON values."""
        return asdict(self.facts)


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def _common_start(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    for place, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return first[:place]
    return first if len(first) <= len(last) else last


def _is_think_block(text: str) -> bool:
    rest = text
    for tag in REASONING_TAGS:
        rest = rest.replace(tag, "")
    return rest != text and not rest.strip()


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [""])[0][:300] or type(exc).__name__
