"""The command's own engine: transformers' states end up in the store, exactly, batched or not, killed or not."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.extract.config import ExtractConfig
from headrace.extract.run import extract
from headrace.store import Store
from headrace.testing.engine import transformers_reference
from headrace.testing.extraction import extraction_process, kill_after, run_until_finished, write_rows
from headrace.types import FINAL, Row


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rng = np.random.default_rng(4)
    lengths = [1, 2, 7, 7, 33, 64, 120, *rng.integers(3, 90, 33).tolist()]
    return [Row.make(rng.integers(0, 400, n), np.arange(n) >= n // 2) for n in lengths]


def config_for(rows: list[Row], model: Path, folder: Path) -> ExtractConfig:
    values = {
        "rows": write_rows(folder / "rows", rows),
        "model": str(model),
        "out": folder / "store",
        "engine_options": {"batch_tokens": 256, "window": 2},
        "shard_bytes": 300_000,
        "min_free": 0,
    }
    return ExtractConfig.model_validate(values)


def assert_exact(config: ExtractConfig, rows: list[Row]) -> None:
    store = Store.open(config.out)
    assert store.spec.taps == (2, 3, 4, FINAL)
    reference = transformers_reference(Path(config.model), store.spec.taps)
    assert set(store.keys()) == {row.key for row in rows}
    for row in rows:
        capture, true = store[row.key], reference(row)
        assert np.array_equal(capture.ids, row.ids)
        error = (capture.states - true).norm(dim=-1) / true.norm(dim=-1)
        assert float(error.max()) < 1e-5


@pytest.mark.slow
def test_states_of_transformers_in_the_store(rows: list[Row], tiny_llama: Path, tmp_path: Path) -> None:
    config = config_for(rows, tiny_llama, tmp_path).model_copy(update={"taps": "2,3,4,final"})
    result = extract(config, lambda text: None)
    assert result["captures"] == len(rows) and result["engine"] == "hf"
    assert_exact(config, rows)


@pytest.mark.slow
def test_killed_and_run_again_it_is_the_same_store(rows: list[Row], tiny_llama: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = config_for(rows, tiny_llama, tmp_path).model_copy(update={"taps": "2,3,4,final"})
    for seconds in (0.4, 0.6, 0.8):
        kill_after(extraction_process(config), seconds, signal.SIGKILL)
    run_until_finished(lambda: extraction_process(config))
    assert_exact(config, rows)
