"""Chunks of raw records → rows: truncation, drops, sampling, the account."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.convert import Converted, Converter, ConvertOptions
from headrace.data.hygiene import PromptOverlap
from headrace.data.readers import Chunk
from headrace.data.render import RenderPolicy
from headrace.data.template import ChatTemplate
from headrace.testing.conversations import BASE, assistant, user
from headrace.testing.toy import STRICT, ToyTokenizer


def convert(records: list[Any], template: str | None = None, **options: Any) -> Converted:
    tokenizer = ToyTokenizer(template) if template else ToyTokenizer()
    options = {"names": ("a.jsonl",), "weights": (1.0,), "stop_at_bad": False, **options}
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    chunk = Chunk(0, 0, list(range(1, len(lines) + 1)), lines)
    return Converter(ChatTemplate(tokenizer), ConvertOptions(**options))(chunk)


def rows(converted: Converted) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = converted.rows.to_pylist()
    return found


def base(number: int = 0) -> dict[str, Any]:
    return {"id": f"c{number}", "messages": [user(f"hi{number}"), assistant("yes")]}


@pytest.mark.parametrize(("length", "supervised"), [(12, 2), (13, 3), (14, 4), (15, 4), (0, 4)])
def test_dp_03_dp_04_a_cut_row_keeps_the_mask_of_what_is_left(length: int, supervised: int) -> None:
    (row,) = rows(convert([{"messages": BASE}], max_length=length))
    assert row["tokens"] == (length or 15)
    assert row["supervised"] == supervised == sum(row["loss_mask"])
    assert row["truncated"] == (0 < length < 15)


def test_dp_04_rows_that_would_teach_nothing_are_dropped_and_counted() -> None:
    result = convert([{"messages": BASE}, {"messages": [user("x" * 5000), assistant("y")]}], max_length=10)
    assert rows(result) == []
    assert result.counts["row:too_few_supervised"] == 2
    assert [d["line"] for d in result.dropped.to_pylist()] == [1, 2]
    assert "0 of 15 tokens, cut at 10" in result.dropped.to_pylist()[0]["detail"]
    assert len(rows(convert([{"messages": BASE}], max_length=13, min_supervised=3))) == 1
    assert rows(convert([{"messages": BASE}], max_length=12, min_supervised=3)) == []


def test_dp_04_the_minimum_cannot_be_set_below_one() -> None:
    from headrace.config import build
    from headrace.data.config import PrepareConfig
    from headrace.errors import ConfigError

    with pytest.raises(ConfigError, match="min_supervised"):
        build(PrepareConfig, {"files": ["a"], "model": "m", "out": "o", "min_supervised": 0}, "test")


@pytest.mark.parametrize("length", [11, 12, 14, 15])
def test_dp_05_every_path_cuts_ids_and_mask_alike(length: int) -> None:
    (whole,) = rows(convert([{"messages": BASE}], max_length=0))
    tokenized = {"input_ids": whole["input_ids"], "loss_mask": [int(m) for m in whole["loss_mask"]]}
    sampled = {"prompt_token_ids": whole["input_ids"][:10], "token_ids": whole["input_ids"][10:14], "turn": 0}
    results = [
        convert([r], max_length=length)
        for r in ({"messages": BASE}, tokenized, {"messages": BASE, "sampled": [sampled]})
    ]
    for (row,) in map(rows, results):
        assert len(row["input_ids"]) == len(row["loss_mask"]) <= length
        assert row["input_ids"][:14] == whole["input_ids"][: min(14, length)]
        assert row["loss_mask"][:14] == whole["loss_mask"][: min(14, length)]


def test_too_long_rows_may_be_dropped_instead() -> None:
    result = convert([{"messages": BASE}], max_length=14, drop_long=True)
    assert (rows(result), result.counts["row:too_long"]) == ([], 1)


def test_dp_29_one_refused_record_costs_one_record() -> None:
    bad = {"messages": [user("a"), user("b"), assistant("c")]}
    result = convert([base(1), bad, base(2)], template=STRICT)
    assert [r["line"] for r in rows(result)] == [1, 3]
    (dropped,) = result.dropped.to_pylist()
    assert (dropped["line"], dropped["reason"]) == (2, "template_refuses")
    assert result.bad is None


def test_a_bad_record_stops_at_its_line_unless_told_to_skip() -> None:
    records = [base(1), b"{broken", base(2), {"messages": [{"role": "boss", "content": "x"}]}]
    stopped = convert(records, stop_at_bad=True)
    assert stopped.bad is not None
    assert stopped.bad[:2] == ("a.jsonl", 2)
    skipped = convert(records)
    assert [d["reason"] for d in skipped.dropped.to_pylist()] == ["broken_json", "unknown_role"]
    assert (skipped.records, skipped.kept, skipped.made) == (4, 2, 2)


def test_dp_34_as_many_rows_as_records() -> None:
    records = [{"text": f"<|h|>user\nhi{n}<|e|>\n"} for n in range(1000)]
    result = convert(records)
    assert (result.records, result.kept, result.made, result.rows.num_rows) == (1000, 1000, 1000, 1000)


def test_dp_34_columnar_records_with_short_tool_lists_lose_nothing() -> None:
    table = pa.table({"messages": [BASE] * 256, "tools": [[]] * 256, "tool_calls": [None] * 256})
    chunk = Chunk(0, 0, list(range(1, 257)), arrow=table)
    options = ConvertOptions(names=("a.parquet",), weights=(1.0,))
    result = Converter(ChatTemplate(ToyTokenizer()), options)(chunk)
    assert result.rows.num_rows == 256


def test_columnar_null_fill_is_not_data() -> None:
    messages = [
        {"role": "user", "content": "hi", "tool_calls": None, "reasoning": None},
        {"role": "assistant", "content": "yes", "tool_calls": [], "reasoning": ""},
    ]
    table = pa.table({"messages": [messages], "conversations": pa.array([None], pa.list_(pa.string()))})
    result = Converter(ChatTemplate(ToyTokenizer()), ConvertOptions(names=("a",), weights=(1.0,)))(
        Chunk(0, 0, [1], arrow=table)
    )
    assert rows(result)[0]["supervised"] == 4


@pytest.mark.parametrize("ids", [[1, 16 + 0x110000], [1, -1], [1, 2**40], [1, 2**63], [1, 2**70]])
def test_ids_outside_the_vocabulary_are_bad(ids: list[int]) -> None:
    result = convert([{"input_ids": ids}], vocab_size=16 + 0x110000)
    assert result.counts["record:bad_token_ids"] == 1


def test_weights_keep_a_share_that_grows_stably() -> None:
    records = [base(n) for n in range(400)]
    half = {r["conversation"] for r in rows(convert(records, weights=(0.5,)))}
    most = {r["conversation"] for r in rows(convert(records, weights=(0.9,)))}
    assert 150 < len(half) < 250
    assert half < most
    result = convert(records, weights=(0.5,))
    assert result.records == result.kept + result.counts["record:sampled_out"] == 400


def test_the_split_is_by_conversation_and_seed() -> None:
    records = [base(n) for n in range(400)]
    held = {r["conversation"]: r["held_out"] for r in rows(convert(records, validation=0.2))}
    assert 50 < sum(held.values()) < 110
    again = {
        r["conversation"]: r["held_out"] for r in rows(convert([*records[::-1], base(999)], validation=0.2))
    }
    assert all(again[c] == h for c, h in held.items())
    other = {r["conversation"]: r["held_out"] for r in rows(convert(records, validation=0.2, seed=1))}
    assert other != held


def test_evaluation_prompts_are_kept_out() -> None:
    prompt = "Natalia sold clips to 48 of her friends in April, and then half as many clips in May."
    overlap = PromptOverlap(8)
    overlap.add("gsm8k", [prompt])
    overlap.add("short", ["What is love?"])
    records = [
        {"messages": [user("Please solve: " + prompt.upper() + " How many?"), assistant("72")]},
        {"messages": [user("what is LOVE"), assistant("baby")]},
        {"messages": [user("What is love? Tell me more."), assistant("no")]},
        {"messages": [user("Natalia sold clips to nobody."), assistant(prompt)]},
        {"text": "x " + prompt},
    ]
    result = convert(records, overlap=overlap)
    assert [(d["line"], d["detail"]) for d in result.dropped.to_pylist()] == [
        (1, "gsm8k"),
        (2, "short"),
        (5, "gsm8k"),
    ]
    assert result.counts["record:evaluation_overlap"] == 3


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(["good", "twice", "broken", "empty", "long", "forged", "tokens", "prompt-only"]),
        max_size=12,
    )
)
def test_every_record_is_accounted_for(kinds: list[str]) -> None:
    made = {
        "good": base(),
        "twice": base(),
        "broken": b"{",
        "empty": {"messages": [user("q"), assistant("")]},
        "long": {"messages": [user("q" * 40), assistant("a")]},
        "forged": {"messages": [user("<|e|>"), assistant("a")]},
        "tokens": {"input_ids": [1, 2, 3]},
        "prompt-only": {"messages": [user("q")]},
    }
    policy = RenderPolicy(content_tokens="reject")
    result = convert([made[k] for k in kinds], max_length=30, policy=policy)
    dropped = result.dropped.to_pylist()
    assert result.records == len(kinds) == result.kept + sum(d["unit"] == "record" for d in dropped)
    assert result.made == result.rows.num_rows + sum(d["unit"] == "row" for d in dropped)
    lengths = [len(r["input_ids"]) for r in rows(result)]
    assert lengths == [len(r["loss_mask"]) for r in rows(result)]
    assert np.all(np.array(lengths) <= 30)
