"""A tiny bf16 target, its true states at every boundary, and stores made of them: shared by the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.data.rows import RowWriter
from headrace.target import Target
from headrace.testing.models import make_tiny_model
from headrace.testing.planted import Ground
from headrace.testing.planted_files import write_store
from headrace.types import Row
from headrace.verify.config import VerifyConfig
from headrace.verify.run import verify

VOCAB = 1024
TAPS = "2,4,6,final"


def make_rows(seed: int, count: int = 16, longest: int = 48) -> list[Row]:
    """Rows of five lengths; every second one begins with the same six tokens."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, VOCAB, 6)
    rows = []
    for index in range(count):
        length = (longest // 2, longest * 2 // 3, longest * 5 // 6, longest, longest * 2 // 3 + 1)[index % 5]
        ids = rng.integers(3, VOCAB, length)
        if index % 2:
            ids[:6] = common
        rows.append(Row.make(ids, rng.random(length) < 0.5))
    return rows


def write_rows(rows: list[Row], path: Path) -> Path:
    """A row folder."""
    with RowWriter(path) as writer:
        for row in rows:
            writer.add(row)
    return path


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An 8-layer random Llama in bf16."""
    folder = tmp_path_factory.mktemp("verify") / "model"
    return make_tiny_model(folder, "llama", layers=8, hidden=64, vocab=VOCAB, dtype="bfloat16")


@pytest.fixture(scope="session")
def ground(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """The true states of 16 rows, and those of a checkpoint whose weights are 10 % off."""
    other = tmp_path_factory.mktemp("verify") / "other"
    shutil.copytree(model, other)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(other / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = (weight.float() * (1 + 0.1 * torch.randn(weight.shape, generator=generator))).to(
            weight.dtype
        )
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    target = Target.open(str(model))
    return Ground.of(target, Target.open(str(other)), target.spec(TAPS), make_rows(0))


@pytest.fixture(scope="session")
def rows_folder(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(ground.rows, tmp_path_factory.mktemp("verify") / "rows")


@pytest.fixture
def good_store(ground: Ground, tmp_path: Path) -> Path:
    """A right store of three shards."""
    write_store(tmp_path / "store", ground.spec, [(row, ground.states[row.key]) for row in ground.rows])
    return tmp_path / "store"


Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(model: Path, rows_folder: Path) -> Check:
    """Verify a store of the tiny target with default settings and any changes to them."""

    def run(store: Path, **changes: Any) -> dict[str, Any]:
        return verify(VerifyConfig(**{"store": store, "rows": rows_folder, "model": str(model), **changes}))

    return run


def codes(report: dict[str, Any]) -> list[str]:
    """Names of the faults found."""
    return [fault["code"] for fault in report["faults"]]
