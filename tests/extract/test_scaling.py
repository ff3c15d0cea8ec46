"""The plan for many hosts: figures by hand, what saturates first, and a page that says what the model says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.cli import main
from headrace.errors import ConfigError
from headrace.extract.config import PlanConfig
from headrace.extract.plan import plan_nodes
from headrace.extract.scaling import ClusterPlan

ROOT = Path(__file__).parents[2]
KIMI: dict[str, Any] = {
    "num_rows": 37_312,
    "num_tokens": 87_800_000,
    "num_layers": 61,
    "hidden_size": 7168,
    "taps": "3,31,59,final",
    "ratio": 0.683,
}


def planned(nodes: int, machine: dict[str, Any] | None = None, **changes: Any) -> ClusterPlan:
    return plan_nodes(
        PlanConfig.model_validate({**KIMI, "nodes": nodes, "machine": machine or {}, **changes})
    )


def test_one_host_by_hand() -> None:
    plan = planned(1)
    assert plan.bytes_raw == 5_034_803_200_000 and plan.bytes_stored == 3_438_770_585_600
    assert plan.tokens_per_second == pytest.approx(
        7836 * 0.985
    )  # one engine: nothing is lost between workers
    assert plan.hours == pytest.approx(87.8e6 / (7836 * 0.985) / 3600)
    assert plan.cost_gpus == pytest.approx(8 * plan.hours * 2.5)
    assert plan.first == "prefill" and plan.limits[0].load == 1.0
    network = next(limit for limit in plan.limits if limit.resource == "network")
    assert network.tokens_per_second == pytest.approx(3.1e9 / (57_344 * 0.683))
    assert network.load == pytest.approx(7836 * 0.985 * 57_344 * 0.683 / 3.1e9)


def test_hosts_multiply_until_the_bucket_is_full() -> None:
    rates = [planned(n).tokens_per_second for n in (8, 64)]
    assert rates[1] == pytest.approx(8 * rates[0]) and rates[0] == pytest.approx(8 * 7836 * 0.985 * 0.95)
    narrow = planned(64, {"bucket_gb": 5.0})
    assert narrow.first == "object store, the bucket"
    assert narrow.tokens_per_second == pytest.approx(5e9 / (57_344 * 0.683))
    assert planned(1, {"destination": "disk", "disk_gb": 0.1}).first == "disk"
    assert planned(1, {"pcie_gb": 0.1}).first == "PCIe"


def test_engines_multiply_what_is_theirs_and_hosts_what_is_a_hosts() -> None:
    """Eight engines on one host: eight GPUs copy and sixteen cores encode, but one interface sends."""
    limits = {x.resource: x.tokens_per_second for x in planned(1, {"gpus_per_engine": 1}).limits}
    assert limits["PCIe"] == pytest.approx(8 * 55e9 / 57_344)
    assert limits["staging memory"] == pytest.approx(8 * 9.6e9 / 57_344)
    assert limits["encoding"] == pytest.approx(16 * 1.5e9 / 57_344)
    assert limits["network"] == pytest.approx(3.1e9 / (57_344 * 0.683))
    assert limits["object store, a host"] == pytest.approx(1.5e9 / (57_344 * 0.683))


def test_ten_times_the_tokens_take_ten_times_all() -> None:
    once, ten = planned(8), planned(8, num_tokens=878_000_000)
    for name in ("bytes_raw", "hours", "cost_gpus", "cost_storage_month", "cost_requests"):
        assert getattr(ten, name) == pytest.approx(10 * getattr(once, name), rel=1e-6)


def test_a_rate_given_is_that_of_one_engine_as_it_captures() -> None:
    assert planned(1, rate=10_000.0).tokens_per_second == 10_000.0
    assert planned(2, rate=10_000.0).tokens_per_second == pytest.approx(19_000.0)
    assert planned(1, gpus_per_node=16).workers == 2


def test_too_few_gpus_for_an_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not make one engine of 16"):
        planned(1, {"gpus_per_engine": 16})


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "--num-rows",
        "37312",
        "--num-tokens",
        "87800000",
        "--num-layers",
        "61",
        "--hidden-size",
        "7168",
        "--taps",
        "3,31,59,final",
    ]
    assert (
        main(
            ["plan", *args, "--nodes", "8", "--gpus-per-node", "8", "--machine.network-gb", "0.01", "--json"]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["saturates_first"] == "network" and result["workers"] == 8
    assert main(["plan", *args, "--nodes", "8"]) == 0
    assert "prefill saturates first" in capsys.readouterr().out


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_tables", ROOT / "tools" / "scaling_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_model_computes() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert page.count("<!-- table:") == 4
    assert tool().filled(page) == page, "run tools/scaling_tables.py"
