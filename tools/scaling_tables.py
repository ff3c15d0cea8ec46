"""Fills the tables of docs/scaling.md with what the model behind ``headrace plan --nodes`` computes.

python tools/scaling_tables.py [--check]      with --check: fail when the page is stale
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.extract.config import Machine, PlanConfig
from headrace.extract.disk import gigabytes
from headrace.extract.plan import plan_nodes
from headrace.extract.scaling import ClusterPlan
from headrace.extract.view import duration

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
KIMI: dict[str, Any] = {
    "num_rows": 37_312,
    "num_tokens": 87_800_000,
    "max_tokens": 8192,
    "num_layers": 61,
    "hidden_size": 7168,
    "taps": "3,31,59,final",
    "ratio": 0.683,
}
EIGHT_B: dict[str, Any] = {
    **KIMI,
    "num_layers": 32,
    "hidden_size": 4096,
    "taps": "eagle3",
    "machine": {"prefill": 38578.0, "gpus_per_engine": 1},
}
NODES = (1, 8, 64)


def planned(values: dict[str, Any], **changes: Any) -> ClusterPlan:
    """The plan of a job on some hosts."""
    return plan_nodes(PlanConfig.model_validate({**values, **changes}))


def job_table(values: dict[str, Any]) -> str:
    """Hours and cost of a job and of ten times that job."""
    rows = []
    for times in (1, 10):
        for nodes in NODES:
            p = planned(values, nodes=nodes, num_tokens=times * values["num_tokens"])
            rows.append(
                [
                    f"{p.tokens / 1e6:,.1f}M",
                    f"{p.gpus:,}",
                    gigabytes(p.bytes_raw),
                    gigabytes(p.bytes_stored),
                    f"{p.tokens_per_second:,.0f}",
                    f"{gigabytes(p.bytes_stored / (p.hours * 3600))}/s",
                    duration(p.hours * 3600),
                    f"{p.cost:,.0f}",
                    f"{p.cost_storage_month:,.0f}",
                    p.first,
                ]
            )
    head = [
        "tokens",
        "GPUs",
        "raw",
        "stored",
        "tokens/s",
        "written",
        "time",
        "cost",
        "storage a month",
        "saturates first",
    ]
    return table(head, rows)


def limits_table(values: dict[str, Any]) -> str:
    """How much of each resource is used, by number of hosts."""
    plans = [planned(values, nodes=nodes) for nodes in NODES]
    names = [limit.resource for limit in plans[-1].limits]
    loads = [{limit.resource: limit for limit in plan.limits} for plan in plans]
    rows = [[name, *(f"{load[name].load:.1%}" for load in loads)] for name in names]
    return table(["used of", *(f"{plan.gpus} GPUs" for plan in plans)], rows)


def disk_table() -> str:
    """The small target, whose engines outrun a disk."""
    rows = []
    for destination in ("disk", "bucket"):
        machine = {**EIGHT_B["machine"], "destination": destination}
        for nodes in NODES:
            p = planned({**EIGHT_B, "machine": machine}, nodes=nodes)
            prefill = next(limit for limit in p.limits if limit.resource == "prefill")
            rows.append(
                [
                    destination,
                    f"{p.gpus:,}",
                    f"{p.tokens_per_second:,.0f}",
                    p.first,
                    f"{prefill.load:.1%}",
                    duration(p.hours * 3600),
                ]
            )
    return table(["shards go to", "GPUs", "tokens/s", "saturates first", "prefill used", "time"], rows)


def assumptions_table() -> str:
    """Every field of the model, its default and its source."""
    rows = [
        [
            f"`--machine.{name.replace('_', '-')}`",
            f"{info.default:,}" if not isinstance(info.default, str) else info.default,
            str(info.description),
        ]
        for name, info in Machine.model_fields.items()
    ]
    return table(
        ["option", "default", "what it is, and from where"], [[*r[:2], " ".join(r[2].split())] for r in rows]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str) -> str:
    """``text`` with every marked table made anew. Raises KeyError for a name that no function here makes."""
    tables = {
        "job": lambda: job_table(KIMI),
        "limits": lambda: limits_table(KIMI),
        "small": disk_table,
        "assumptions": assumptions_table,
    }
    pattern = re.compile(r"(<!-- table: (\w+) -->\n)(?:.*?\n)?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda m: m[1] + tables[m[2]]() + "\n" + m[3], text)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if parser.parse_args().check:
        sys.exit("docs/scaling.md is stale; run tools/scaling_tables.py" if new != old else 0)
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
