"""Record shapes: every known spelling is understood, nothing is guessed, nothing vanishes (section 1c of the cases)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.data.reasons import BAD, RECORD, Bad, Drop
from headrace.data.records import Conversation, RecordReader, Text, Tokens
from headrace.testing.conversations import BASE, Bench, assistant, call, positions, tool, user
from headrace.testing.toy import PLAIN, STRICT, THINKING, TOOLS, ToyTokenizer


def read(record: Any, **options: Any) -> Any:
    return RecordReader(**options).read(record)


def turns(record: Any, **options: Any) -> list[tuple[str, str]]:
    item = read(record, **options)
    assert isinstance(item, Conversation)
    return [(m["role"], m["content"]) for m in item.messages]


# --- roles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("Human", "user"),
        ("USER", "user"),
        ("gpt", "assistant"),
        ("developer", "system"),
        ("observation", "tool"),
        ("function", "tool"),
        ("ipython", "tool"),
    ],
)
def test_dp_26_known_names_of_roles(name: str, role: str) -> None:
    talk = [{"from": "human", "value": "q"}, {"from": name, "value": "x"}, {"from": "gpt", "value": "a"}]
    assert turns({"conversations": talk})[1] == (role, "x")


@pytest.mark.parametrize("name", ["my-model-7b", "", "narrator", None, 3])
def test_dp_26_any_other_role_is_an_error_and_never_supervised(name: Any) -> None:
    with pytest.raises(Bad, match="unknown_role") as caught:
        read({"conversations": [{"from": "human", "value": "q"}, {"from": name, "value": "x"}]})
    assert repr(name) in caught.value.detail
    assert "message 2" in caught.value.detail


def test_dp_26_a_user_may_name_further_roles() -> None:
    talk = {"messages": [user("q"), {"role": "My-Model-7b", "content": "a"}]}
    assert turns(talk, aliases={"my-model-7b": "assistant"}) == [("user", "q"), ("assistant", "a")]


def test_dp_26_a_function_call_turn_is_an_assistant_turn_with_the_call() -> None:
    talk = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "it is 42"},
    ]
    bench = Bench(ToyTokenizer(TOOLS))
    row = bench.row({"conversations": talk})
    assert bench.supervised(row) == ['[f({"a": 1})]<|e|>', "it is 42<|e|>"]
    talk[1] = {"from": "function_call", "value": "f(1)"}
    with pytest.raises(Bad, match="bad_tool_calls"):
        read({"conversations": talk})


# --- turns that must not count ------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [PLAIN, STRICT])
def test_dp_28_an_opening_assistant_turn_is_removed_for_every_template(template: str) -> None:
    bench = Bench(ToyTokenizer(template))
    row = bench.row([assistant("Sure"), user("Hello"), assistant("Hi")])
    assert bench.supervised(row) == ["Hi<|e|>"]
    assert "Sure" not in bench.text(row)
    assert bench.reader.notes["leading_assistant_turns_removed"] == 1


def test_dp_28_a_system_prompt_before_it_stays() -> None:
    talk = [{"role": "system", "content": "S"}, assistant("Sure"), user("Hello"), assistant("Hi")]
    assert turns({"messages": talk}) == [("system", "S"), ("user", "Hello"), ("assistant", "Hi")]
    with pytest.raises(Drop, match="no_prompt"):
        read({"messages": talk[:2]})


def test_messages_after_the_last_answer_are_removed() -> None:
    bench = Bench()
    row = bench.row([*BASE, user("and?")])
    assert len(row.ids) == 15
    assert bench.reader.notes["messages_after_last_answer_removed"] == 1


def test_dp_29_a_refusing_template_drops_one_record() -> None:
    bench = Bench(ToyTokenizer(STRICT))
    with pytest.raises(Drop, match="template_refuses") as caught:
        bench.rows([user("a"), user("b"), assistant("c")])
    assert "alternate" in caught.value.detail


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), RuntimeError("x"), AssertionError("x")])
def test_dp_29_whatever_error_a_template_raises(error: Exception) -> None:
    class Refusing(ToyTokenizer):
        def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
            if conversation[0]["content"] == "bad":
                raise error
            return super().apply_chat_template(conversation, *args, **kwargs)

    bench = Bench(Refusing())
    with pytest.raises(Drop, match="template_refuses"):
        bench.rows([user("bad"), assistant("c")])
    assert positions(bench.row(BASE)) == [10, 11, 12, 13]


# --- shapes and keys ----------------------------------------------------------------------------------------------

SIX = ["system", "human", "gpt", "human", "gpt", "human", "gpt"]


def test_dp_30_every_turn_in_order_and_the_system_prompt_once() -> None:
    talk = [{"from": role, "value": f"t{n}"} for n, role in enumerate(SIX)]
    expected = [
        ("system", "t0"),
        ("user", "t1"),
        ("assistant", "t2"),
        ("user", "t3"),
        ("assistant", "t4"),
        ("user", "t5"),
        ("assistant", "t6"),
    ]
    assert turns({"conversations": talk}) == expected
    assert turns({"system": "t0", "conversations": talk[1:]}) == expected
    assert turns({"system": "t0", "conversations": talk}) == expected
    with pytest.raises(Bad, match="conflicting_keys"):
        read({"system": "other", "conversations": talk})


def test_dp_31_both_spellings_and_conflicts() -> None:
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    for record in (
        {"messages": BASE},
        {"conversations": sharegpt},
        {"messages": sharegpt},
        {"conversations": BASE},
    ):
        assert turns(record) == [("user", "hi"), ("assistant", "yes")]
    assert turns({"messages": BASE, "conversations": sharegpt}) == [("user", "hi"), ("assistant", "yes")]
    with pytest.raises(Bad, match="conflicting_keys"):
        read({"messages": BASE, "conversations": [*sharegpt[:1], {"from": "gpt", "value": "no"}]})


@pytest.mark.parametrize(
    "message", [{"content": "x", "value": ""}, {"content": "", "value": "x"}, {"content": "x", "value": "y"}]
)
def test_dp_31_two_values_that_differ_are_an_error(message: dict[str, str]) -> None:
    with pytest.raises(Bad, match="conflicting_keys"):
        read({"messages": [user("q"), {"role": "assistant", **message}]})


def test_dp_32_null_content_beside_a_call_is_empty_text() -> None:
    bench = Bench(ToyTokenizer(TOOLS))
    for answer in (
        {"role": "assistant", "content": None, "tool_calls": [call("f", "{}")]},
        {"role": "assistant", "tool_calls": [call("f", {})]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    ):
        row = bench.row([user("q"), answer])
        assert bench.supervised(row) == ["[f({})]<|e|>"]
        assert "None" not in bench.text(row)


@pytest.mark.parametrize(
    "answer", [{"content": ""}, {"content": None}, {}, {"content": " \n"}, {"content": "", "tool_calls": []}]
)
def test_dp_32_an_empty_answer_without_a_call_is_dropped(answer: dict[str, Any]) -> None:
    with pytest.raises(Drop, match="empty_assistant_turn"):
        read({"messages": [user("q"), {"role": "assistant", **answer}]})


def test_dp_32_users_may_say_nothing_but_not_null() -> None:
    assert turns({"messages": [user(""), assistant("a")]}) == [("user", ""), ("assistant", "a")]
    with pytest.raises(Bad, match="bad_content"):
        read({"messages": [user(None), assistant("a")]})


def tools_of(record: dict[str, Any]) -> Any:
    return read({"messages": BASE, **record}).tools


def test_dp_35_tools_in_every_spelling() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for spelling in (tools, json.dumps(tools), [json.dumps(tools[0])], [{"name": "f"}]):
        assert tools_of({"tools": spelling}) == tools
    assert tools_of({"functions": [{"name": "f"}]}) == tools
    nothings: list[dict[str, Any]] = [
        {"tools": None},
        {"tools": []},
        {"tools": ""},
        {"tools": "[]"},
        {"tools": {}},
        {},
    ]
    for nothing in nothings:
        assert tools_of(nothing) is None
    for wrong in (7, "not json", ["not json"], {"name": "f"}, [7]):
        with pytest.raises(Bad, match="bad_tools"):
            tools_of({"tools": wrong})


def test_dp_35_tools_are_in_the_ids() -> None:
    bench = Bench(ToyTokenizer(TOOLS))
    row = bench.row({"messages": BASE, "tools": [{"name": "weather"}]})
    assert "weather" in bench.text(row)
    assert bench.supervised(row) == ["yes<|e|>"]


def test_dp_38_tool_results_are_context() -> None:
    bench = Bench(ToyTokenizer(TOOLS))
    row = bench.row(
        [user("q"), assistant(None, tool_calls=[call("f", {"x": 1})]), tool("42"), assistant("42!")]
    )
    assert bench.supervised(row) == ['[f({"x": 1})]<|e|>', "42!<|e|>"]
    assert "tool\n42<|e|>" in bench.text(row)


def test_tool_calls_a_template_does_not_render_drop_the_record() -> None:
    with pytest.raises(Drop, match="tool_calls_not_rendered"):
        Bench(ToyTokenizer(PLAIN)).rows(
            [user("q"), assistant("", tool_calls=[call("f", {})]), tool("1"), assistant("2")]
        )


def test_dp_40_alpaca_with_input_and_history() -> None:
    record = {"instruction": "Sort", "input": "3 1 2", "output": "1 2 3"}
    assert turns(record) == [("user", "Sort\n\n3 1 2"), ("assistant", "1 2 3")]
    assert turns({**record, "input": ""})[0] == ("user", "Sort")
    longer = turns({**record, "system": "S", "history": [["a", "b"]]})
    assert longer == [
        ("system", "S"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Sort\n\n3 1 2"),
        ("assistant", "1 2 3"),
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"question": "q", "answer": "a"},
        {"input": "q", "output": "a"},
        {"prompt": [user("q")], "completion": [assistant("a")]},
        {"prompt": "q", "response": "a", "completion": "a"},
    ],
)
def test_prompt_and_response(record: dict[str, Any]) -> None:
    assert turns(record) == [("user", "q"), ("assistant", "a")]


def test_prompt_with_two_different_answers_is_an_error() -> None:
    with pytest.raises(Bad, match="conflicting_keys"):
        read({"prompt": "q", "response": "a", "completion": "b"})


def test_prompt_and_response_with_reasoning() -> None:
    bench = Bench(ToyTokenizer(THINKING))
    assert bench.supervised(bench.row({"prompt": "q", "response": "c", "reasoning": "ab"})) == [
        "<think>ab</think>c<|e|>"
    ]


@pytest.mark.parametrize("talk", [[user("q")], [{"role": "system", "content": "S"}], [user("q"), tool("r")]])
def test_dp_41_records_without_an_answer_are_dropped(talk: list[Any]) -> None:
    with pytest.raises(Drop, match="no_assistant_turn"):
        read({"messages": talk})
    assert turns({"messages": talk}, answers=False)


def test_content_parts_are_joined_and_pictures_dropped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert turns({"messages": [user(parts), assistant([{"type": "text", "text": "d"}])]}) == [
        ("user", "a\nb\nc"),
        ("assistant", "d"),
    ]
    with pytest.raises(Drop, match="not_text"):
        read({"messages": [user([*parts, {"type": "image_url", "image_url": {}}]), assistant("d")]})
    for wrong in ([7], [{"type": "text"}], 7, {"text": "a"}):
        with pytest.raises(Bad, match="bad_content"):
            read({"messages": [user(wrong), assistant("d")]})


# --- tokens and text ----------------------------------------------------------------------------------------------


def test_tokens_with_every_spelling_of_the_mask() -> None:
    for more in (
        {"loss_mask": [0, 1, 1]},
        {"loss_mask": [False, True, True]},
        {"assistant_masks": [0, 1, 1]},
        {"labels": [-100, 8, 9]},
        {"labels": [-100, 8, 9], "loss_mask": [0, 1, 1], "attention_mask": [1, 1, 1]},
    ):
        item = read({"input_ids": [7, 8, 9], **more})
        assert isinstance(item, Tokens)
        assert item.mask is not None
        assert item.mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    "record",
    [
        {"input_ids": []},
        {"input_ids": [[1, 2]]},
        {"input_ids": [1, 2.5]},
        {"input_ids": "1 2"},
        {"input_ids": [1, [2]]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, 2], "loss_mask": [0, 2]},
        {"input_ids": [1, 2], "labels": [-100, 7]},
        {"input_ids": [1, 2], "attention_mask": [1, 0]},
    ],
)
def test_tokens_that_cannot_be_right(record: dict[str, Any]) -> None:
    with pytest.raises(Bad, match="bad_token_ids"):
        read(record)


def test_masks_that_disagree_are_an_error() -> None:
    with pytest.raises(Bad, match="conflicting_keys"):
        read({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "labels": [-100, -100, 3]})


def test_the_first_token_is_never_supervised() -> None:
    bench = Bench()
    assert positions(bench.row({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]})) == [1, 2]
    assert positions(bench.row({"input_ids": [1, 2, 3]})) == [1, 2]
    assert positions(bench.row({"text": "abc"})) == [1, 2, 3]
    assert bench.renderer.notes == {"first_tokens_unsupervised": 1, "rows_without_mask": 2}


# --- the record as a whole ----------------------------------------------------------------------------------------


def test_dp_43_surrogates_are_settled_when_read() -> None:
    reader = RecordReader()
    pair = reader.parse(b'{"text": "\\ud83d\\ude00"}')
    assert (pair["text"], reader.notes["surrogates_replaced"]) == ("\U0001f600", 0)
    lone = reader.parse(b'{"text": "ok \\ud83d end", "\\udc00": ["\\uDFFF"]}')
    assert lone == {"text": "ok \ufffd end", "\ufffd": ["\ufffd"]}
    assert reader.notes["surrogates_replaced"] == 1
    assert isinstance(reader.read({"text": lone["text"]}), Text)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "broken_json"),
        (b'{"a": 1} x', "broken_json"),
        (b'{"a": "\xff"}', "bad_utf8"),
        (b'{"a": "\xed\xa0\xbd"}', "bad_utf8"),
        (b"[" * 100000, "broken_json"),
    ],
)
def test_broken_lines(line: bytes, reason: str) -> None:
    with pytest.raises(Bad, match=reason):
        RecordReader().parse(line)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "not_an_object"),
        ("x", "not_an_object"),
        (None, "not_an_object"),
        ({}, "unknown_shape"),
        ({"foo": 1}, "unknown_shape"),
        ({"messages": []}, "bad_messages"),
        ({"messages": "x"}, "bad_messages"),
        ({"messages": ["x"]}, "bad_messages"),
        ({"messages": {}}, "bad_messages"),
        ({"messages": BASE, "finish_reasons": ["stop", "stop"]}, "bad_finish_reasons"),
        ({"messages": [user("q"), assistant("a", reasoning=["r"])]}, "bad_reasoning"),
        ({"messages": [user("q"), assistant("a", reasoning="r", thinking="s")]}, "bad_reasoning"),
        ({"messages": [user("q"), assistant("<think>r</think>a", reasoning="s")]}, "bad_reasoning"),
        (
            {"messages": [user("q"), assistant("a", tool_calls=[{"function": {"arguments": {}}}])]},
            "bad_tool_calls",
        ),
        ({"messages": [user("q"), assistant("a", tool_calls=[call("f", "{")])]}, "bad_tool_calls"),
        ({"text": 7}, "bad_content"),
        ({"instruction": "a", "input": 7}, "bad_content"),
        ({"instruction": "a", "history": ["b"]}, "bad_messages"),
    ],
)
def test_records_that_cannot_be_understood(record: Any, reason: str) -> None:
    with pytest.raises(Bad, match=reason):
        read(record)


def test_every_reason_has_one_name() -> None:
    assert not set(BAD) & set(RECORD)


def test_the_shape_can_be_forced() -> None:
    record = {"messages": BASE, "text": "t", "prompt": "p", "response": "r", "input_ids": [1, 2]}
    assert isinstance(read(record), Tokens)
    assert isinstance(read(record, shape="messages"), Conversation)
    assert read(record, shape="text").text == "t"
    assert turns(record, shape="prompt") == [("user", "p"), ("assistant", "r")]
    with pytest.raises(Bad, match="unknown_shape"):
        read({"text": "t"}, shape="messages")


def test_identity_is_the_records_own_or_what_it_says() -> None:
    assert read({"id": "a7", "messages": BASE}).identity == "a7"
    assert read({"id": 7, "messages": BASE}).identity == "7"
    assert read({"id": "", "messages": BASE}).identity == read({"messages": BASE}).identity
    assert read({"messages": [user("hi"), assistant("no")]}).identity != read({"messages": BASE}).identity
