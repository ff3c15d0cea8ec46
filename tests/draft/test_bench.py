"""The training benchmarks run, in their quick modes, and write what every benchmark writes. No timing is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("name", ["train", "quality"])
def test_quick_mode(name: str, tmp_path: Path, smollm2: Path) -> None:
    file = tmp_path / "result.json"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), "--quick", "--json", str(file)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(file.read_text())
    assert {"machine", "date", "commit", "rows", "targets"} <= set(result)
    assert result["rows"] and all(row["tokens_per_second"] > 0 for row in result["rows"])
    if name == "quality":
        assert {row["run"] for row in result["rows"]} == {"base", "muon"}
        assert all(row["equal"] == "2/2" and row["implied"] >= 1 for row in result["rows"]), "a chain, a tree"
        assert all(row["tiny tree 6"] >= 1 for row in result["rows"])


def test_quality_without_data_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "quality.py")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "needs --model" in done.stdout
