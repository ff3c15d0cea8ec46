"""The figures that are read off a profiler's trace: what overlaps is not counted twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from gpu_trace import summary


def test_copies_beside_kernels_cost_nothing_and_those_alone_do() -> None:
    def event(kind: str, name: str, begin: float, took: float) -> dict[str, object]:
        return {"cat": kind, "name": name, "ts": begin, "dur": took}

    found = summary(
        [
            event("kernel", "a", 0, 4000),
            event("kernel", "b", 3000, 3000),  # on another stream: a second of both
            event("kernel", "a", 8000, 2000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1000, 2000),  # beside a
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5500, 1000),  # half of it alone
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 6000, 2000),
            event("cpu_op", "aten::mm", 0, 9000),
        ]
    )
    assert found["span_ms"] == 10 and found["busy"] == pytest.approx(0.8)
    assert found["copied_ms"] == 3 and found["exposed_ms"] == pytest.approx(0.5)
    assert found["longest_gap_ms"] == 2 and found["kernels"] == "a 6.0 ms; b 3.0 ms"


def test_a_trace_without_kernels_is_all_zeros() -> None:
    assert summary([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}])["busy"] == 0
