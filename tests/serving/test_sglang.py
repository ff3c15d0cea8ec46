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

from .conftest import COUNT, STEPS, served_settings

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def measured(
    fitted: Callable[[str], Path], variant: str, smollm2: Path, server: ServerProcess, **more: Any
) -> dict[str, Any]:
    config = EvaluateConfig(**{**served_settings(smollm2, fitted(variant), server.url), **more})
    return evaluate(config, lambda text: None)


@pytest.mark.parametrize("variant", ["eagle3", "eagle31"])
def test_server_accepts_what_our_loop_accepts(
    variant: str,
    exported: Callable[..., Path],
    fitted: Callable[[str], Path],
    offline: Callable[[str], Part],
    smollm2: Path,
    sglang_server: Callable[[Path], ServerProcess],
) -> None:
    server = sglang_server(exported(variant, "sglang"))
    try:
        report = measured(fitted, variant, smollm2, server)
        other = measured(fitted, "speculators", smollm2, server)["served"]
        with pytest.raises(ConfigError, match=f"drafts with steps {STEPS}.*--steps {STEPS}"):
            measured(fitted, variant, smollm2, server, steps=2, offline=False)
    finally:
        server.stop()
    served, ours = report["served"], offline(variant).acceptance(STEPS)
    part = served["parts"][0]
    assert min(ours.reached[:3]) > 0, "acceptance must be non-trivial"
    assert (part["verifications"], part["reached"]) == (ours.verifications, list(ours.reached))
    assert part["equal_to_offline"] == part["counts_equal_to_offline"] == f"{COUNT}/{COUNT}"
    assert report["drafts"][0]["parts"][0]["equal"] == COUNT
    assert (served["mismatch"], served["engine"], served["version"]) == (False, "sglang", "0.5.23")
    # The report names the weights that the server loaded.
    assert served["drafter"]["is_ours"] is True
    assert served["drafter"]["weights_hash"] == report["drafts"][0]["weights_hash"]

    # Evaluating another drafter against this server: the same answers, and yet it is noticed.
    part = other["parts"][0]
    assert part["equal_to_offline"] == f"{COUNT}/{COUNT}"
    assert part["counts_equal_to_offline"] != f"{COUNT}/{COUNT}"
    assert other["drafter"]["is_ours"] is False
    assert other["mismatch"] is (abs(part["gap"]) > 0.10)
