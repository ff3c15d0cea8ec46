"""Exports in SGLang's own EAGLE-3: counts and output equal ours, and a wrong drafter is noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.offline import Part
from headrace.evaluate.run import evaluate
from headrace.testing.servers import ServerProcess

from .conftest import COUNT, STEPS

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize("variant", ["eagle3", "eagle31"])
def test_server_accepts_what_our_loop_accepts(
    variant: str,
    exported: Callable[..., Path],
    settings: Callable[..., EvaluateConfig],
    offline: Callable[[str], Part],
    sglang_server: Callable[[Path], ServerProcess],
) -> None:
    offline("eagle31")  # everything of our own is computed before there is a server to compute beside
    ours = offline(variant).acceptance(STEPS)
    server = sglang_server(exported(variant, "sglang"))
    try:
        report = evaluate(settings(variant, server=server.url), silent)
        with pytest.raises(ConfigError, match=f"drafts with steps {STEPS}.*--steps {STEPS}"):
            evaluate(settings(variant, server=server.url, steps=2, offline=False), silent)
        if variant == "eagle3":
            check_another_drafter_is_noticed(
                evaluate(settings("eagle31", server=server.url), silent)["served"]
            )
    finally:
        server.stop()
    served = report["served"]
    part = served["parts"][0]
    assert (part["verifications"], part["reached"]) == (ours.verifications, list(ours.reached))
    assert part["equal_to_offline"] == part["counts_equal_to_offline"] == f"{COUNT}/{COUNT}"
    assert report["drafts"][0]["parts"][0]["equal"] == COUNT
    assert (served["mismatch"], served["engine"], served["version"]) == (False, "sglang", "0.5.23")
    # The report names the weights that the server loaded.
    assert served["drafter"]["is_ours"] is True
    assert served["drafter"]["weights_hash"] == report["drafts"][0]["weights_hash"]


def check_another_drafter_is_noticed(served: dict[str, Any]) -> None:
    """Another drafter was evaluated than the server has: its answers are the same, its counts are not."""
    part = served["parts"][0]
    assert part["equal_to_offline"] == f"{COUNT}/{COUNT}"
    assert part["counts_equal_to_offline"] != f"{COUNT}/{COUNT}"
    assert served["drafter"]["is_ours"] is False
    assert part["mismatch"] is (abs(part["gap"]) > 0.10)


def silent(text: str) -> None: ...
