"""Why a record or row is left out: every reason has a name here, and nothing leaves without one."""

from __future__ import annotations


class Bad(Exception):
    """A record that cannot be read or understood: the data should be mended. Stops the run unless told to skip."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Drop(Exception):
    """A record that is understood and of no use; always counted, never an error."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


BAD = {
    "broken_json": "the line is not JSON",
    "bad_utf8": "the line is not UTF-8",
    "not_an_object": "the record is not a JSON object",
    "unknown_shape": "no known keys",
    "unknown_role": "a role that is in no alias table",
    "conflicting_keys": "two keys say different things",
    "bad_messages": "messages that are no list of objects",
    "bad_content": "content that is no text",
    "bad_reasoning": "reasoning that is no text, or twice and different",
    "bad_tools": "tools that are neither a list nor JSON of one",
    "bad_tool_calls": "tool calls without a name or with unreadable arguments",
    "bad_finish_reasons": "finish reasons that do not match the turns",
    "bad_token_ids": "token ids or masks that cannot be right",
}
"""Reasons of :class:`Bad`."""

RECORD = {
    "no_assistant_turn": "nobody answers",
    "no_prompt": "the assistant speaks before anyone asked",
    "empty_assistant_turn": "an answer without text or calls would teach an end-of-turn only",
    "not_text": "images, audio or other content that is not text",
    "template_refuses": "the model's template raised an error",
    "reasoning_not_rendered": "the template has no place for the reasoning",
    "tool_calls_not_rendered": "the template has no place for the tool calls",
    "control_tokens": "control tokens in the text, and the policy rejects them",
    "history_rewritten": "the template shows earlier turns otherwise than generated, and the policy refuses",
    "not_as_generated": "the template renders no turn in the way the model generates it",
    "cut_turn": "every turn was ended by the token limit, and the policy drops those",
    "bad_finish": "the turn ended by an error or a filter",
    "sampled_out": "left out by the weight of its source",
    "evaluation_overlap": "overlaps with an evaluation prompt",
}
"""Reasons for which a record gives no rows."""

ROW = {
    "too_few_supervised": "fewer supervised tokens than asked for",
    "too_long": "longer than the maximum, and the policy drops those",
    "duplicate": "the same ids and mask as another row",
    "near_duplicate": "nearly the same text as a conversation kept",
    "outlier": "unusual length or supervised share",
    "source_limit": "beyond the limit of its source",
    "limit": "beyond the limit of the run",
}
"""Reasons for which a row is left out."""
