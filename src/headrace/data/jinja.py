"""Messages → text through a tokenizer's own template, with the day it prints given from outside.

``apply_chat_template`` is the authority. It also copies and checks every message on every call, which costs more than
the rendering, and newer versions let no function in, so that the day cannot be set. So the template that transformers
itself compiled is rendered directly, after it has given the same text as ``apply_chat_template`` on conversations of
every kind; where it does not (or the tokenizer is not of transformers), ``apply_chat_template`` does the work.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from headrace.data.messages import Message
from headrace.errors import PreflightError

Date = datetime.date | None
_QUESTION: Message = {"role": "user", "content": "Which <b>one</b>?\n"}
_ANSWER: Message = {"role": "assistant", "content": "The 2nd."}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}
    ],
}
_RESULT: Message = {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "f"}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
_SAMPLES: tuple[tuple[list[Message], Any, bool], ...] = (
    ([_QUESTION], None, True),
    ([_QUESTION, _ANSWER], None, False),
    ([{"role": "system", "content": "Be brief."}, _QUESTION, _ANSWER, _QUESTION], None, True),
    # Both names at once: newer versions fill in the one that is missing, which is not a difference that matters here.
    ([_QUESTION, {**_ANSWER, "reasoning_content": "hm", "thinking": "hm"}], None, False),
    ([_QUESTION, {**_ANSWER, "content": "<think>\nhm\n</think>\n\nyes"}, _QUESTION, _ANSWER], None, False),
    ([_QUESTION, _CALL, _RESULT, _ANSWER], _TOOLS, False),
    ([_QUESTION, _CALL, _RESULT], _TOOLS, True),
)


class TemplateRenderer:
    """Renders one tokenizer's template."""

    def __init__(self, tokenizer: Any, args: dict[str, Any]) -> None:
        self._tokenizer, self._args = tokenizer, args
        self._text = tokenizer.chat_template
        self.refusals = _refusals()
        """What rendering may raise when the template refuses a conversation."""
        self._compiled = _compile(tokenizer)
        globals_ = {} if self._compiled is None else dict(self._compiled.globals)
        self._names = {**globals_, **getattr(tokenizer, "special_tokens_map", {}), **args}
        if self._compiled is not None and not self._agrees():
            self._compiled = None

    @property
    def direct(self) -> bool:
        """Whether the compiled template is rendered directly."""
        return self._compiled is not None

    def __call__(
        self, messages: Sequence[Message], tools: Any = None, prompt: bool = False, date: Date = None
    ) -> str:
        """Text of the messages, the generation prompt behind it when ``prompt``. Raises one of :attr:`refusals`."""
        if self._compiled is None:
            return self.by_tokenizer(messages, tools, prompt, date)
        own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        names = (
            {**self._names, **own}
            if date is None
            else {**self._names, **self._day(date), **self._args, **own}
        )
        # Sharing spares Jinja a copy of its globals, a third of a short rendering; rendering does not write to them.
        return "".join(self._compiled.root_render_func(self._compiled.new_context(names, shared=True)))

    def by_tokenizer(
        self, messages: Sequence[Message], tools: Any = None, prompt: bool = False, date: Date = None
    ) -> str:
        """The same through ``apply_chat_template``."""
        args = self._args if date is None else {**self._day(date), **self._args}
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **args
        )
        if not isinstance(text, str):
            raise PreflightError(f"apply_chat_template(tokenize=False) gave {type(text).__name__}, not text")
        return text

    def _day(self, date: datetime.date) -> dict[str, Any]:
        moment = datetime.datetime.combine(date, datetime.time(12))
        day: dict[str, Any] = {"strftime_now": moment.strftime}
        if "date_string" in str(self._text):
            day["date_string"] = date.strftime("%d %b %Y")
        return day

    def _agrees(self) -> bool:
        return all(
            self._outcome(self, sample) == self._outcome(self.by_tokenizer, sample) for sample in _SAMPLES
        )

    def _outcome(self, render: Callable[..., str], sample: tuple[list[Message], Any, bool]) -> str | None:
        try:
            return render(*sample)
        except self.refusals:
            return None


def _compile(tokenizer: Any) -> Any:
    """The template as transformers compiles it; None for other tokenizers and sets of templates."""
    if not isinstance(tokenizer.chat_template, str) or not hasattr(tokenizer, "get_chat_template"):
        return None
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    return _compile_jinja_template(tokenizer.chat_template)


def _refusals() -> tuple[type[Exception], ...]:
    """A template's own error, or Python's for data the template did not expect."""
    from jinja2.exceptions import TemplateError

    return (
        TemplateError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        AssertionError,
    )
