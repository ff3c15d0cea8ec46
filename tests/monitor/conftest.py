"""Runs to look at: finished, failed, crashed, and one that is running."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from headrace.engines.base import Engine
from headrace.engines.fake import FingerprintOptions
from headrace.extract.config import ExtractConfig
from headrace.testing.extraction import extraction_process, make_rows, write_rows
from headrace.testing.faults import FaultyEngine
from headrace.types import CaptureSpec

ROWS = make_rows(1200, low=10, high=80)
TOKENS = sum(map(len, ROWS))
POISON = {row.key for row in ROWS[::240]}

MakeConfig = Callable[..., ExtractConfig]


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory, config_only: Path) -> MakeConfig:
    """Configs of extractions of the same rows, each into a store of its own."""
    rows = write_rows(tmp_path_factory.mktemp("monitor-rows") / "rows", ROWS)

    def make(out: Path) -> ExtractConfig:
        values = {
            "rows": rows,
            "model": str(config_only),
            "out": out,
            "engine": "fake",
            "shard_bytes": 400_000,
        }
        return ExtractConfig.model_validate(values)

    return make


def engine_of(seconds: float, poison: set[str]) -> Callable[[CaptureSpec], Engine]:
    """An engine that takes about ``seconds`` for all rows and gives NaN for ``poison``."""

    def make(spec: CaptureSpec) -> Engine:
        rng = random.Random(3)
        options = FingerprintOptions(
            tokens_in_flight=4000, tokens_per_second=TOKENS / seconds if seconds else 0.0, seed=0
        )

        def script(key: str) -> str:
            return "nan" if key in poison else "fail" if rng.random() < 0.005 else ""

        return FaultyEngine(spec, script, options)

    return make


@pytest.fixture(scope="session")
def finished(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose extraction finished."""
    config = make_config(tmp_path_factory.mktemp("finished") / "store")
    process = extraction_process(config, engine_of(1.0, set()))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return config.out


@pytest.fixture(scope="session")
def failed(make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose extraction set five rows aside."""
    config = make_config(tmp_path_factory.mktemp("failed") / "store")
    process = extraction_process(config, engine_of(1.0, POISON))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    return config.out


@pytest.fixture
def running(make_config: MakeConfig, tmp_path: Path) -> Iterator[tuple[Path, ForkProcess]]:
    """A store that is being filled for about a minute, and the process that does it."""
    config = make_config(tmp_path / "store")
    process = extraction_process(config, engine_of(60.0, POISON))
    process.start()
    deadline = time.monotonic() + 20
    while not (config.out / "extract" / "events.jsonl").exists():
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.05)
    time.sleep(1.0)
    yield config.out, process
    process.kill()
    process.join()
