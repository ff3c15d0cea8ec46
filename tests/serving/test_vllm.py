"""Exports in stock vLLM: the accepted counts are ours, prompt by prompt and position by position, and the output is greedy.

Equal output alone would prove nothing about a drafter: a wrong one is only slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.evaluate.acceptance import Acceptance
from headrace.evaluate.offline import Part

from .conftest import STEPS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def totals_of(value: dict[str, Any]) -> Acceptance:
    counts = Acceptance(value["drafts"], tuple(value["reached"]))
    assert counts.accepted == value["accepted"]
    return counts


@pytest.mark.parametrize("variant, ids", [("speculators", (2, 15, 27)), ("eagle31", (1, 9, 16, 27))])
def test_offline_engine_accepts_what_our_loop_accepts(
    variant: str,
    ids: tuple[int, ...],
    exported: Callable[..., Path],
    offline: Callable[[str], Part],
    prompt_ids: list[list[int]],
    vllm_offline: Callable[..., dict[str, Any]],
) -> None:
    ours = offline(variant)
    assert min(ours.acceptance(STEPS).reached[:3]) > 0, "acceptance must be non-trivial"
    served = vllm_offline(exported(variant, "vllm"), prompt_ids, one_by_one=True)
    assert f"Using auxiliary layers from speculative config: {ids}" in served["log"]
    assert served["tokens"] == [record["tokens"] for record in ours.records]
    totals = [Acceptance.count([], STEPS), *map(totals_of, served["totals"])]
    by_prompt = [after.minus(before) for before, after in itertools.pairwise(totals)]
    assert by_prompt == [Acceptance.count(record["accepted"], STEPS) for record in ours.records]
