"""Exports in stock vLLM: the accepted counts are ours, prompt by prompt and position by position, and the output is greedy.

Equal output alone would prove nothing about a drafter: a wrong one is only slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.evaluate.acceptance import Acceptance
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.offline import Part
from headrace.evaluate.run import evaluate
from headrace.testing.servers import ServerProcess

from .conftest import COUNT, STEPS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def totals_of(value: dict[str, Any]) -> Acceptance:
    counts = Acceptance(value["drafts"], tuple(value["reached"]))
    assert counts.accepted == value["accepted"]
    return counts


def test_offline_engine_accepts_what_our_loop_accepts(
    exported: Callable[..., Path],
    offline: Callable[[str], Part],
    prompt_ids: list[list[int]],
    vllm_offline: Callable[..., dict[str, Any]],
) -> None:
    ours = offline("speculators")
    served = vllm_offline(exported("speculators", "vllm"), prompt_ids, one_by_one=True)
    assert "Using auxiliary layers from speculative config: (2, 15, 27)" in served["log"]
    assert served["tokens"] == [record["tokens"] for record in ours.records]
    totals = [Acceptance.count([], STEPS), *map(totals_of, served["totals"])]
    by_prompt = [after.minus(before) for before, after in itertools.pairwise(totals)]
    assert by_prompt == [Acceptance.count(record["accepted"], STEPS) for record in ours.records]


def test_evaluate_against_a_server_gives_the_offline_figure(
    exported: Callable[..., Path],
    settings: Callable[..., EvaluateConfig],
    offline: Callable[[str], Part],
    vllm_server: Callable[[Path], ServerProcess],
) -> None:
    ours = offline("eagle31").acceptance(STEPS)
    server = vllm_server(exported("eagle31", "vllm"))
    report = evaluate(settings("eagle31", server=server.url, concurrency=1), silent)
    part = report["served"]["parts"][0]
    assert "Using auxiliary layers from speculative config: (1, 9, 16, 27)" in server.log.read_text()
    assert (report["served"]["engine"], report["served"]["version"]) == ("vllm", "0.32.0")
    assert (part["verifications"], part["reached"]) == (ours.verifications, list(ours.reached))
    assert part["equal_to_offline"] == part["counts_equal_to_offline"] == f"{COUNT}/{COUNT}"
    assert (part["gap"], part["mismatch"], report["served"]["mismatch"]) == (0.0, False, False)

    # Many in flight: vLLM's totals alone, read before and after.
    again = evaluate(settings("eagle31", server=server.url, concurrency=4), silent)["served"]["parts"][0]
    assert again["reached"] == part["reached"]
    assert "counts_equal_to_offline" not in again

    with pytest.raises(ConfigError, match=f"drafts with steps {STEPS}.*--steps {STEPS}"):
        evaluate(settings("eagle31", server=server.url, steps=3, offline=False), silent)


def silent(text: str) -> None: ...
