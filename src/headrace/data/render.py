"""Conversations → token ids and loss masks, by successive renderings of the model's own template.

For the assistant turn at index i the *prompt* is the rendering of the messages before it with the generation prompt,
the *turn* the rendering up to and including it. What the model generates is what the turn has beyond the prompt, up to
and including the end-of-turn token: those tokens are supervised, nothing else. Whatever the template supplies (headers,
an empty think block, the newline behind the turn) lies outside or is taken out.

A row can supervise a turn only when the ids of the turn's prompt, and of the turn to its end, are a prefix of the row's
ids: then the model saw exactly this context. Templates that show earlier turns otherwise than they were generated
(reasoning stripped, another end token) break that, and then a conversation needs several rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.data.control import REASONING_TAGS, has_marks, texts_of
from headrace.data.encoding import DirectPlaces, Places
from headrace.data.messages import Message
from headrace.data.reasons import Drop
from headrace.data.records import Conversation, Text, Tokens
from headrace.data.template import ChatTemplate

_FAILED = ("error", "content_filter")
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class RenderPolicy:
    """The choices that decide ids and masks."""

    content_tokens: Literal["plain", "reject", "as-served"] = "plain"
    rewritten_history: Literal["fan-out", "last-turn", "refuse"] = "fan-out"
    last_turn_only: bool = False
    cut_turns: Literal["keep", "drop"] = "keep"


@dataclass(slots=True)
class Draft:
    """A row before filters: int32 ids [tokens], bool mask [tokens]."""

    ids: np.ndarray
    mask: np.ndarray
    turns: int = 1
    finish: str = ""
    exact: bool = False


@dataclass(slots=True)
class Turn:
    """One assistant turn, rendered as generated."""

    index: int
    prompt: str
    text: str
    finish: str = ""

    @property
    def cut(self) -> bool:
        """Ended by the token limit: its end-of-turn is the template's invention."""
        return self.finish == "length"


@dataclass(slots=True)
class Plan:
    """One row to be: its text and the turns it may supervise, last one last."""

    text: str
    turns: list[Turn]


@dataclass(slots=True)
class Planned:
    """A conversation whose texts are ready to be encoded."""

    plans: list[Plan]
    encode: Encode | None = None
    """How its texts must be encoded when that is not the usual way."""
    exact: list[Draft] = field(default_factory=list)


class Renderer:
    """Plans rows, then turns plans and their ids into rows; ``notes`` counts what a reader of the manifest should know."""

    def __init__(self, template: ChatTemplate, policy: RenderPolicy | None = None) -> None:
        self.template = template
        self.policy = policy or RenderPolicy()
        self.notes: Counter[str] = Counter()

    def rows(self, conversation: Conversation) -> list[Draft]:
        """Rows of one conversation. Raises Drop. (Many at once go through :meth:`plan` and :meth:`finish`.)"""
        planned = self.plan(conversation)
        encode = planned.encode or self.template.encoder.one
        return self.finish(planned, [encode(plan.text) for plan in planned.plans])

    # --- texts ------------------------------------------------------------------------------------------------

    def plan(self, conversation: Conversation) -> Planned:
        """Render what is needed and decide which turns share a row. Raises Drop."""
        silent = {i for i, m in enumerate(conversation.messages) if m.get("weight") == 0}
        turns = [
            i for i, m in enumerate(conversation.messages) if m["role"] == "assistant" and i not in silent
        ]
        turns = [
            i for i in turns if not self._unusable(conversation.messages[i], conversation.finish.get(i, ""))
        ]
        if self.policy.last_turn_only:
            turns = [i for i in turns if i == len(conversation.messages) - 1]
        if not turns:
            raise Drop(self._why_none(conversation, silent))
        if conversation.sampled:
            return Planned([], exact=self._sampled_rows(conversation, turns))
        messages = self.template.fit(conversation.messages)
        messages, tools, encode = self._apply_content_policy(messages, conversation.tools)
        shown = [self._render_turn(messages, tools, i, conversation.finish.get(i, "")) for i in turns]
        usable = [turn for turn in shown if turn is not None]
        if not usable:
            raise Drop("not_as_generated", "the generation prompt is no prefix of the rendered turn")
        self.notes["turns_cut_by_token_limit"] += sum(turn.cut for turn in usable)
        if len(usable) < len(shown):
            self.notes["turns_not_as_generated"] += len(shown) - len(usable)
        return Planned(self._share(usable), encode)

    def _unusable(self, message: Message, finish: str) -> bool:
        """Whether what the model generated cannot be told from the message."""
        if finish in _FAILED:
            return True
        if finish != "length":
            return False
        # Cut inside its reasoning or a call: the template would close what the model never closed.
        return (
            self.policy.cut_turns == "drop"
            or not message["content"].strip()
            or bool(message.get("tool_calls"))
        )

    def _why_none(self, conversation: Conversation, silent: set[int]) -> str:
        reasons = set(conversation.finish.values())
        if reasons & set(_FAILED):
            return "bad_finish"
        return "cut_turn" if "length" in reasons and not silent else "no_assistant_turn"

    def _apply_content_policy(
        self, messages: list[Message], tools: list[Message] | None
    ) -> tuple[list[Message], list[Message] | None, Encode | None]:
        """The messages with forged control tokens dealt with, and the encoder they then need. Raises Drop."""
        control = self.template.control
        forged = False
        for message in messages:
            by_assistant = message["role"] == "assistant"
            for text in _texts(message):
                forged = forged or control.forged(text, by_assistant)
        if not forged and (tools is None or not any(control.within(t) for t in texts_of(tools))):
            return messages, tools, None
        self.notes["conversations_with_control_tokens"] += 1
        if self.policy.content_tokens == "as-served":
            return messages, tools, None
        if self.policy.content_tokens == "reject":
            raise Drop("control_tokens")
        if any(has_marks(t) for m in messages for t in texts_of(m)) or self.template.plain is None:
            raise Drop("control_tokens", "they cannot be encoded as plain text with this tokenizer")
        return [control.hide(m) for m in messages], control.hide_value(tools), self.template.plain

    def _render_turn(
        self, messages: list[Message], tools: list[Message] | None, index: int, finish: str
    ) -> Turn | None:
        """The turn as generated, None when the template does not render it so."""
        prompt = self.template.render(messages[:index], tools, prompt=True)
        text = self.template.render(messages[: index + 1], tools)
        if not text.startswith(prompt):
            return None
        facts, message = self.template.facts, messages[index]
        if facts.header and text.startswith(facts.header, len(prompt)):
            prompt += facts.header
        thought, closed, _ = message["content"].partition("</think>")
        reasons = message.get(facts.reasoning_key) or (closed and thought.replace("<think>", "").strip())
        if facts.injected and not reasons and text.startswith(facts.injected, len(prompt)):
            prompt += facts.injected  # what a server that is told not to think puts into the prompt
        return Turn(index, prompt, text, finish)

    def _share(self, turns: list[Turn]) -> list[Plan]:
        """Put turns that one rendering holds into one row, from the last backwards. Raises Drop by policy."""
        plans = [Plan(turns[-1].text, [turns[-1]])]
        for turn in reversed(turns[:-1]):
            text = plans[0].text
            if text.startswith(turn.text[: self._end(turn)[1]]):
                plans[0].turns.insert(0, turn)
            else:
                self._rewritten()
                if self.policy.rewritten_history == "fan-out":
                    plans.insert(0, Plan(turn.text, [turn]))
        return plans

    def _rewritten(self) -> None:
        if self.policy.rewritten_history == "refuse":
            raise Drop("history_rewritten")
        self.notes["turns_in_rewritten_history"] += 1

    def _end(self, turn: Turn) -> tuple[int, int]:
        """Where the turn's own text ends and where its end-of-turn token ends; equal when the template has none."""
        text = turn.text.rstrip()
        closing = self.template.control.closing(text)
        start = len(text) - len(closing or "")
        if closing is None or closing in REASONING_TAGS or start < len(turn.prompt):
            end = max(len(text), len(turn.prompt))
            return end, end
        return start, len(text)

    # --- ids --------------------------------------------------------------------------------------------------

    def finish(self, planned: Planned, ids: Sequence[Sequence[int]]) -> list[Draft]:
        """Rows from the plans and the ids of their texts. Raises Drop."""
        drafts = list(enumerate(planned.exact))
        encode = planned.encode or self.template.encoder.one
        queue = [(plan, np.array(i, dtype=np.int32)) for plan, i in zip(planned.plans, ids, strict=True)]
        while queue:
            plan, row_ids = queue.pop(0)
            draft, left = self._fill(plan, row_ids, planned)
            if draft is not None:
                drafts.append((plan.turns[-1].index, draft))
            queue += [(more, np.array(encode(more.text), dtype=np.int32)) for more in left]
        if not drafts:
            raise Drop("not_as_generated", "the generation prompt's ids are no prefix of the turn's")
        if len(drafts) > 1:
            self.notes["conversations_fanned_out"] += 1
        return [draft for _, draft in sorted(drafts, key=lambda item: item[0])]

    def _fill(self, plan: Plan, ids: np.ndarray, planned: Planned) -> tuple[Draft | None, list[Plan]]:
        """The plan's row, and plans for those of its turns that are a prefix of it as text and not as ids."""
        places = self._places(plan.text, ids, planned)
        *earlier, last = plan.turns
        span = self._span(last, ids, places)
        if span is None:
            encode = planned.encode or self.template.encoder.one
            continued = self._continued(last, encode)
            if continued is None:
                self.notes["turns_not_as_generated"] += 1
                return None, [Plan(earlier[-1].text, earlier)] if earlier else []
            ids, span = continued
            places = DirectPlaces(ids, encode)
        found = [(turn, self._span(turn, ids, places)) for turn in earlier]
        draft = _draft(ids, [*((turn, s) for turn, s in found if s is not None), (last, span)])
        left = []
        for turn in (turn for turn, s in found if s is None):
            self._rewritten()
            if self.policy.rewritten_history == "fan-out":
                left.append(Plan(turn.text, [turn]))
        return draft, left

    def _places(self, text: str, ids: np.ndarray, planned: Planned) -> Places:
        anchors = self.template.anchors
        if (
            planned.encode is None
            and anchors is not None
            and (found := anchors.places(text, ids)) is not None
        ):
            return found
        return DirectPlaces(ids, planned.encode or self.template.encoder.one)

    def _span(self, turn: Turn, ids: np.ndarray, places: Places) -> tuple[int, int] | None:
        """First and one past the last supervised token of a turn, None when its ids are no prefix of the row's."""
        start = places.after(turn.prompt)
        if start is None:
            return None
        own, end = self._end(turn)
        stop = places.after(turn.text[:end])
        if stop is None:
            return None
        if turn.cut and own < end:
            stop -= 1  # the end-of-turn is one token, and the model did not produce it
        elif own == end and not turn.cut and stop < len(ids) and int(ids[stop]) in self.template.stop_ids:
            stop += 1  # a template without end-of-turn: the model stops by emitting the next header
        return start, stop

    def _continued(self, turn: Turn, encode: Encode) -> tuple[np.ndarray, tuple[int, int]] | None:
        """The prompt's ids with the rest encoded behind them, for text whose own ids merge across the border.

        So the model sees it: the prompt was encoded alone before it went on. None unless the text comes back whole.
        """
        control, decode = self.template.control, self.template.tokenizer.decode
        anchor = next(iter(control.ids), "")
        skip = 1 if anchor else 0
        own, end = self._end(turn)
        prompt = list(encode(turn.prompt))
        rest = list(encode(anchor + turn.text[len(turn.prompt) :]))[skip:]
        if decode(prompt + rest) != decode(list(encode(turn.text))):
            return None
        said = list(encode(anchor + turn.text[len(turn.prompt) : own if turn.cut else end]))[skip:]
        if rest[: len(said)] != said:
            return None
        return np.array(prompt + rest, dtype=np.int32), (len(prompt), len(prompt) + len(said))

    # --- ids that a server sampled ----------------------------------------------------------------------------

    def _sampled_rows(self, conversation: Conversation, turns: list[int]) -> list[Draft]:
        """Rows of ids as they were sampled: prompt ids as sent, answer ids up to the first end-of-turn."""
        known = [i for i in turns if i in conversation.sampled]
        if not known:
            raise Drop("not_as_generated", "no supervised turn has sampled ids")
        self.notes["turns_without_sampled_ids"] += len(turns) - len(known)
        drafts: list[Draft] = []
        for index in reversed(known):
            prompt, answer = conversation.sampled[index]
            answer = self._until_end(answer)
            span = (len(prompt), len(prompt) + len(answer))
            whole = prompt + answer
            if drafts and drafts[0].ids[: len(whole)].tolist() == whole:
                drafts[0].mask[span[0] : span[1]] = True
                drafts[0].turns += 1
                continue
            if drafts:
                self._rewritten()
                if self.policy.rewritten_history == "last-turn":
                    continue
            turn = Turn(index, "", "", conversation.finish.get(index, ""))
            drafts.insert(0, _draft(np.array(whole, dtype=np.int32), [(turn, span)], exact=True))
        return drafts

    def _until_end(self, ids: list[int]) -> list[int]:
        for place, number in enumerate(ids):
            if number in self.template.stop_ids:
                if place + 1 < len(ids):
                    self.notes["tokens_after_end_removed"] += len(ids) - place - 1
                return ids[: place + 1]
        return ids

    # --- other shapes -----------------------------------------------------------------------------------------

    def text_row(self, item: Text) -> Draft:
        """A row of raw text as a completion endpoint takes it; all but the first token are supervised. Raises Drop."""
        if self.policy.content_tokens == "reject" and self.template.control.within(item.text):
            raise Drop("control_tokens")
        ids = list(self.template.tokenizer.encode(item.text))
        bos = getattr(self.template.tokenizer, "bos_token_id", None)
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return self.token_row(Tokens(np.array(ids, dtype=np.int64), None))

    def token_row(self, item: Tokens) -> Draft:
        """A row that was tokenized before. Without a mask all but the first token are supervised. Raises Drop."""
        mask = np.ones(len(item.ids), dtype=bool) if item.mask is None else item.mask.copy()
        if item.mask is None:
            self.notes["rows_without_mask"] += 1
        elif len(mask) and mask[0]:
            self.notes["first_tokens_unsupervised"] += 1
        mask[:1] = False  # nothing precedes it, so nothing can predict it
        starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        if self.policy.last_turn_only and len(starts):
            mask[: starts[-1]] = False
            starts = starts[-1:]
        return Draft(item.ids.astype(np.int32), mask, turns=len(starts))


def _draft(ids: np.ndarray, spans: list[tuple[Turn, tuple[int, int]]], exact: bool = False) -> Draft:
    mask = np.zeros(len(ids), dtype=bool)
    for _, (start, stop) in spans:
        mask[start:stop] = True
    return Draft(ids, mask, len(spans), spans[-1][0].finish, exact)


def _texts(message: Message) -> list[str]:
    if len(message) == 2:
        return [message["content"]]
    return texts_of({k: v for k, v in message.items() if k != "role"})
