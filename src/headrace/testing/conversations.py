"""Conversations in one line, and their rows, for tests of data preparation."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.data.convert import Converter
from headrace.data.pool import WorkerSetup, teller
from headrace.data.reasons import Bad
from headrace.data.records import Conversation, RecordReader, Text
from headrace.data.render import Draft, Renderer, RenderPolicy
from headrace.data.template import ChatTemplate
from headrace.testing.toy import PLAIN, ToyTokenizer

Message = dict[str, Any]


def user(content: Any, **more: Any) -> Message:
    """A user message."""
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": content, **more}


def tool(content: Any, **more: Any) -> Message:
    """A tool result."""
    return {"role": "tool", "content": content, **more}


def call(name: str, arguments: Any, number: int = 0) -> Message:
    """A tool call; its id has the nine characters that some templates insist on."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


BASE: list[Message] = [user("hi"), assistant("yes")]
"""15 toy ids, supervised positions 10 to 13."""


class Bench:
    """A tokenizer with its template and policy: records in, rows out, and what was noted on the way."""

    def __init__(self, tokenizer: Any = None, date: str = "", **policy: Any) -> None:
        self.tokenizer: Any = ToyTokenizer(PLAIN) if tokenizer is None else tokenizer
        self.template = ChatTemplate(self.tokenizer, date)
        self.reader = RecordReader()
        self.renderer = Renderer(self.template, RenderPolicy(**policy))

    def rows(self, record: dict[str, Any] | list[Message]) -> list[Draft]:
        """Rows of one record (or of its messages alone). Raises Bad or Drop."""
        item = self.reader.read({"messages": record} if isinstance(record, list) else record)
        if isinstance(item, Conversation):
            return self.renderer.rows(item)
        return [self.renderer.text_row(item) if isinstance(item, Text) else self.renderer.token_row(item)]

    def row(self, record: dict[str, Any] | list[Message]) -> Draft:
        """The one row of a record. Raises ValueError when there are more."""
        (row,) = self.rows(record)
        return row

    def supervised(self, row: Draft) -> list[str]:
        """The text of each supervised stretch."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(np.int8), [0]])))
        return [
            self.tokenizer.decode(row.ids[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]

    def text(self, row: Draft) -> str:
        """The whole row as text."""
        return str(self.tokenizer.decode(row.ids.tolist()))


def positions(row: Draft) -> list[int]:
    """Supervised positions."""
    return np.flatnonzero(row.mask).tolist()


def toy_converter(setup: WorkerSetup, at: Any = None) -> Converter:
    """The toy tokenizer's converter, for worker processes that start in no time."""
    return Converter(ChatTemplate(ToyTokenizer(PLAIN)), setup.options, None if at is None else teller(at))


__all__ = ["BASE", "Bad", "Bench", "assistant", "call", "positions", "tool", "toy_converter", "user"]
