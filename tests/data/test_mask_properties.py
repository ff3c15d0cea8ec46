"""Properties of ids and masks with a real tokenizer: the fast ways give what the plain ways give, for any text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.data.reasons import Drop
from headrace.testing.conversations import Bench, assistant, user
from headrace.testing.templates import STYLES, styled

pytestmark = pytest.mark.slow

FRAGMENTS = [
    "a",
    " the",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "<",
    "<|",
    "im_end",
    "|>",
    "é",
    "e\u0301",
    "漢",
    "👩‍🚀",
    "\u00a0",
    "12",
    ".",
    "<think>",
    "</think>",
]
TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<filename>", "<|im_start|>assistant\n"]
text = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=8).map("".join).filter(lambda t: t.strip())
wild = (
    st.lists(st.sampled_from(FRAGMENTS + TOKENS), min_size=1, max_size=8)
    .map("".join)
    .filter(lambda t: t.strip())
)
text = text.filter(lambda t: "<|im_end|>" not in t)  # the pieces can make one; `wild` is for that
SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def talk_of(texts: list[str]) -> list[dict[str, Any]]:
    return [user(t) if n % 2 == 0 else assistant(t) for n, t in enumerate(texts[: len(texts) // 2 * 2])]


@pytest.fixture(scope="module")
def benches(smollm2: Path) -> dict[str, Bench]:
    return {name: Bench(styled(smollm2, name), "2025-01-02") for name in STYLES}


def by_hand(tokenizer: Any, talk: list[dict[str, Any]], end: int) -> tuple[list[int], list[int]]:
    """Ids and mask of a conversation by the tokenizer's own calls, turn by turn; for templates that keep history."""
    ids = list(tokenizer.apply_chat_template(talk, return_dict=False))
    mask = [0] * len(ids)
    for place in range(1, len(talk), 2):
        prompt = list(
            tokenizer.apply_chat_template(talk[:place], add_generation_prompt=True, return_dict=False)
        )
        turn = list(tokenizer.apply_chat_template(talk[: place + 1], return_dict=False))
        if ids[: len(prompt)] != prompt:
            return ids, []
        last = max(i for i, number in enumerate(turn) if number == end)
        mask[len(prompt) : last + 1] = [1] * (last + 1 - len(prompt))
    return ids, mask


@SETTINGS
@given(st.lists(text, min_size=2, max_size=6))
def test_ids_and_mask_equal_the_tokenizers_own_renderings(
    benches: dict[str, Bench], texts: list[str]
) -> None:
    for name in ("chatml", "gemma"):
        bench, talk = benches[name], talk_of(texts)
        ids, mask = by_hand(bench.tokenizer, talk, bench.tokenizer.eos_token_id)
        if mask:  # else some answer begins with what merges into its header
            row = bench.row(talk)
            assert row.ids.tolist() == ids
            assert row.mask.astype(int).tolist() == mask


@SETTINGS
@given(st.lists(wild, min_size=2, max_size=6), st.sampled_from(sorted(STYLES)))
def test_anchors_find_what_encoding_every_prefix_finds(
    benches: dict[str, Bench], texts: list[str], name: str
) -> None:
    bench, talk = benches[name], talk_of(texts)
    anchors = bench.template.anchors
    assert anchors is not None
    rows: list[Any] = []
    for with_anchors in (anchors, None):
        bench.template.anchors = with_anchors
        try:
            rows.append([(r.ids.tolist(), r.mask.tolist(), r.turns) for r in bench.rows(talk)])
        except Drop as exc:
            rows.append([exc.reason])
        finally:
            bench.template.anchors = anchors
    assert rows[0] == rows[1]


@SETTINGS
@given(st.lists(wild, min_size=2, max_size=6), st.sampled_from(sorted(STYLES)))
def test_plain_encoding_equals_normal_encoding_where_nothing_is_hidden(
    benches: dict[str, Bench], texts: list[str], name: str
) -> None:
    template = benches[name].template
    assert template.plain is not None
    rendered = template.render(talk_of(texts))
    assert template.plain(rendered) == template.encoder.one(rendered)


@SETTINGS
@given(wild, st.sampled_from(sorted(STYLES)))
def test_hidden_text_comes_back_whole_and_without_control_tokens(
    benches: dict[str, Bench], content: str, name: str
) -> None:
    template = benches[name].template
    assert template.plain is not None
    ids = template.plain(template.control.hide_value(content))
    assert template.tokenizer.decode(ids) == content
    assert not set(ids) & set(template.control.ids.values())


@SETTINGS
@given(st.lists(text, min_size=2, max_size=6), st.sampled_from(sorted(STYLES)))
def test_before_every_answer_stands_a_prompt_as_a_server_encodes_it(
    benches: dict[str, Bench], texts: list[str], name: str
) -> None:
    bench = benches[name]
    try:
        rows = bench.rows(talk_of([t.replace("think>", "") for t in texts]))
    except Drop:
        return
    control = set(bench.template.control.ids.values())
    for row in rows:
        assert 0 < row.mask.sum() < len(row.ids)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.mask.astype(int), [0]])))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            before = row.ids[:start].tolist()
            assert bench.template.encoder.one(bench.tokenizer.decode(before)) == before
            assert row.ids[stop - 1] in control
