"""Every benchmark runs in its quick mode and writes what every benchmark writes. No timing is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
ENGINES = {"parity", "engine_cpu", "gpu"}  # need the environments of real engines
# train, quality: tests/draft/test_bench.py; planted: its faults are those of tests/verify; scale_out: two minutes, see tests/extract/test_ray.py; gpu_trace, client_server, common: what others use
OWN_TESTS = {
    "train",
    "quality",
    "quality_quick",
    "planted",
    "scale_out",
    "common",
    "gpu_trace",
    "client_server",
}
SMALLER = {
    "scale": ["--rows", "3000"],
    "faults": ["--only", "answer"],
    "parity": ["--engines", "hf,sglang", "--model", "tiny Qwen3"],
}


def quick(name: str, folder: Path) -> dict[str, object]:
    """Run ``bench/NAME.py --quick``; its JSON."""
    file = folder / "result.json"
    command = [
        sys.executable,
        str(BENCH / f"{name}.py"),
        "--quick",
        "--json",
        str(file),
        *SMALLER.get(name, []),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=550
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    result: dict[str, object] = json.loads(file.read_text())
    assert set(result) == {"benchmark", "machine", "date", "commit", "quick", "rows", "targets"}
    assert result["benchmark"] == name and result["quick"] and result["rows"]
    return result


def test_none_is_forgotten() -> None:
    there = {file.stem for file in BENCH.glob("*.py")}
    assert there == {*PLAIN, *ENGINES, *OWN_TESTS}


PLAIN = ["store", "threads", "prepare", "scale", "faults", "s3", "loader", "train_many", "gpu_hf", "client"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_quick_mode(name: str, tmp_path: Path, smollm2: Path) -> None:
    result = quick(name, tmp_path)
    if name in ("faults", "gpu_hf"):  # what they find is no matter of speed
        assert all(target["ok"] for target in result["targets"])  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.sglang
def test_quick_gpu_suite_on_a_cpu(tmp_path: Path) -> None:
    """The whole GPU suite with a tiny model: values against transformers, both servers, all ways, the ratios."""
    result = quick("gpu", tmp_path)
    paths = {row["path"] for row in result["rows"] if "path" in row}  # type: ignore[attr-defined]
    assert {"plain SGLang", "capture to verified states", "extract to durable shards"} <= paths
