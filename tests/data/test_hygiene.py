"""Near duplicates, evaluation overlap, outliers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from headrace.config import build
from headrace.data.config import PrepareConfig
from headrace.data.hygiene import (
    NearDuplicates,
    PromptOverlap,
    histogram,
    length_edges,
    outlier_bounds,
    signature,
)
from headrace.data.prepare import prepare
from headrace.data.records import Conversation
from headrace.data.rows import RowFolder
from headrace.errors import InputError
from headrace.testing.conversations import assistant, user
from headrace.testing.toy import ToyTokenizer

ESSAY = "the quick brown fox jumps over the lazy dog while the small cat sleeps under a warm old lamp near the open window".split()


def talk(words: list[str], ask: str = "write") -> Conversation:
    return Conversation([user(ask), assistant(" ".join(words))])


def varied(number: int) -> list[str]:
    rng = np.random.default_rng(number)
    return [f"w{n}" for n in rng.integers(0, 5000, 120)]


def test_near_duplicates_keep_the_first_of_a_group() -> None:
    near = NearDuplicates(0.7)
    base = varied(0)
    changed = [*base[:60], "another", *base[61:]]
    sketches = {
        "a": talk(base),
        "b": talk(changed),
        "c": talk(varied(1)),
        "d": talk(base[:40] + varied(2)[:80]),
    }
    like = {name: near.like(name, signature(item)) for name, item in sketches.items()}
    assert like == {"a": None, "b": "a", "c": None, "d": None}
    assert near.like("b", signature(talk(varied(3)))) == "a"  # rows of one conversation share its fate
    assert near.like("a", signature(talk(varied(3)))) is None
    assert near.like("tokens", b"") is None


def test_candidates_below_the_threshold_stay() -> None:
    rng = np.random.default_rng(0)
    decided = {True: 0, False: 0}
    for number in range(150):
        first = varied(number)
        second = [word if rng.random() > 0.045 else "x" for word in first]
        near = NearDuplicates(0.7)
        sketches = [np.frombuffer(signature(talk(words)), "<u4") for words in (first, second)]
        near.like("a", sketches[0].tobytes())
        dropped = near.like("b", sketches[1].tobytes()) is not None
        assert not dropped or float((sketches[0] == sketches[1]).mean()) >= 0.7
        decided[dropped] += 1
    assert min(decided.values()) > 20


def test_system_prompts_make_nothing_alike() -> None:
    system = {"role": "system", "content": " ".join(varied(9) * 3)}
    near = NearDuplicates(0.5)
    items = [
        Conversation([system, user(" ".join(varied(n)[:20])), assistant(" ".join(varied(n)[20:40]))])
        for n in range(5)
    ]
    assert [near.like(str(n), signature(item)) for n, item in enumerate(items)] == [None] * 5


def test_near_duplicates_in_prepare_go_with_all_their_rows(tmp_path: Path, config_only: Path) -> None:
    records: list[dict[str, Any]] = [
        {"id": f"c{n}", "messages": [user(f"q{n}"), assistant(" ".join(varied(n)))]} for n in range(40)
    ]
    records += [
        {"id": f"n{n}", "messages": [user(f"q{n}"), assistant(" ".join([*varied(n)[:-1], "end"]))]}
        for n in range(10)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    values = {
        "files": [str(tmp_path / "a.jsonl")],
        "model": str(config_only),
        "out": tmp_path / "rows",
        "near_duplicates": 0.8,
    }
    result = prepare(build(PrepareConfig, values, "test"), tokenizer=ToyTokenizer())
    assert result["counts"]["dropped"] == {"near_duplicate": 10}
    kept = {r.origin.conversation[1:] for r in RowFolder.open(tmp_path / "rows").rows()}
    assert kept == {str(n) for n in range(40)}
    dropped = pq.read_table(tmp_path / "rows" / "dropped.parquet").to_pylist()
    assert all(
        d["detail"] in (f"like c{d['conversation'][1:]}", f"like n{d['conversation'][1:]}") for d in dropped
    )


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "P"},
        {"turns": ["first", "P"]},
        {"question": "P", "answer": "42"},
        {"messages": [user("P")]},
        {"text": "P"},
    ],
)
def test_prompt_sets_in_every_shape(tmp_path: Path, record: dict[str, Any]) -> None:
    prompt = " ".join(ESSAY)
    (tmp_path / "eval.jsonl").write_text(json.dumps(record).replace('"P"', json.dumps(prompt)) + "\n")
    overlap = PromptOverlap.load([f"set={tmp_path / 'eval.jsonl'}"], 13)
    assert overlap.find(Conversation([user("Now: " + prompt.title() + "!"), assistant("x")])) == "set"
    assert overlap.find(Conversation([user(" ".join(ESSAY[:12])), assistant(prompt)])) is None


def test_prompt_sets_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="hold no prompt"):
        PromptOverlap.load([str(tmp_path / "empty.jsonl")], 13)
    (tmp_path / "odd.jsonl").write_text('{"foo": 1}\n')
    with pytest.raises(InputError, match=r"odd\.jsonl line 1"):
        PromptOverlap.load([str(tmp_path / "odd.jsonl")], 13)


def test_outliers_are_listed_or_dropped(tmp_path: Path, config_only: Path) -> None:
    rng = np.random.default_rng(0)
    records = [
        {
            "messages": [
                user(f"q{n} " + "x" * int(rng.integers(40, 80))),
                assistant("y" * int(rng.integers(80, 120))),
            ]
        }
        for n in range(200)
    ]
    records.append({"messages": [user("q"), assistant("z" * 9000)]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    values = {
        "files": [str(tmp_path / "a.jsonl")],
        "model": str(config_only),
        "out": tmp_path / "rows",
        "max_length": 0,
    }
    result = prepare(build(PrepareConfig, values, "test"), tokenizer=ToyTokenizer())
    assert result["outliers"]["count"] >= 1
    assert 201 in [row["line"] for row in result["outliers"]["rows"]]
    dropping = prepare(build(PrepareConfig, {**values, "outliers": "drop"}, "test"), tokenizer=ToyTokenizer())
    assert dropping["rows"] == 201 - result["outliers"]["count"]
    assert dropping["counts"]["dropped"] == {"outlier": result["outliers"]["count"]}


def test_bounds_of_small_and_flat_sets_drop_nothing() -> None:
    assert outlier_bounds(np.arange(5.0)) == (-np.inf, np.inf)
    assert outlier_bounds(np.ones(100)) == (-np.inf, np.inf)
    low, high = outlier_bounds(np.random.default_rng(0).normal(10, 1, 1000))
    assert 4 < low < 6
    assert 14 < high < 16


def test_histogram_counts_every_value_once() -> None:
    values = np.array([1, 2, 3, 4, 7, 8, 100])
    counts = histogram(values, length_edges(100))
    assert counts == {"1": 1, "2": 2, "4": 2, "8": 1, "64": 1}
    assert sum(counts.values()) == len(values)
