"""Worker processes: same rows in the same order, and a worker that hangs or dies is named with its record; flat memory."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.data.convert import ConvertOptions
from headrace.data.pool import Pool, WorkerSetup
from headrace.data.readers import Chunk
from headrace.errors import HeadraceError
from headrace.testing.conversations import assistant, toy_converter, user

pytestmark = pytest.mark.slow


def chunk(number: int, size: int = 5) -> Chunk:
    lines = list(range(number * size + 1, (number + 1) * size + 1))
    texts = [json.dumps({"messages": [user(f"q{n}"), assistant(f"a{n} " * 20)]}).encode() for n in lines]
    return Chunk(0, number * size, lines, texts)


def chunks(count: int) -> list[Chunk]:
    return [chunk(number) for number in range(count)]


@pytest.fixture
def setup() -> WorkerSetup:
    options = ConvertOptions(names=("a.jsonl",), weights=(1.0,))
    return WorkerSetup("", "", "", (), (), options, toy_converter)


def workers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]


def test_results_come_in_order_and_equal_those_of_one_process(setup: WorkerSetup) -> None:
    alone = toy_converter(setup)
    with Pool(2, setup, 120.0) as pool:
        found = list(pool.convert(iter(chunks(11))))
        again = list(pool.convert(iter(chunks(3))))
    assert [given.first for given, _ in found] == [c.first for c in chunks(11)]
    assert len(again) == 3
    for given, result in found:
        assert result.rows.equals(alone(given).rows)
    assert workers() == []


@pytest.mark.parametrize(
    ("blow", "message"), [(signal.SIGSTOP, "makes no progress since 2 s at"), (signal.SIGKILL, "died at")]
)
def test_dp_25_a_worker_that_hangs_or_dies_ends_the_run_with_its_record(
    setup: WorkerSetup, blow: signal.Signals, message: str
) -> None:
    def endless() -> Any:
        for number in itertools.count():
            if number == 3:
                os.kill(workers()[0].pid, blow)
            yield chunk(number)

    with Pool(1, setup, 120.0) as pool:
        assert len(list(pool.convert(iter(chunks(2))))) == 2
        pool._stall = 2.0
        with pytest.raises(HeadraceError, match=rf"{message} a\.jsonl line \d+"):
            list(pool.convert(endless()))
    assert workers() == []


def test_threads_of_the_tokenizer_are_off_and_nothing_is_forked(setup: WorkerSetup) -> None:
    with Pool(1, setup, 120.0) as pool:
        list(pool.convert(iter(chunks(1))))
        (worker,) = workers()
        assert worker.environ().get("TOKENIZERS_PARALLELISM", "false") == "false"
        assert "spawn_main" in " ".join(worker.cmdline())


MEASURED = """
import resource, sys
from pathlib import Path
from headrace.data import runs
from headrace.data.config import PrepareConfig
from headrace.data.prepare import prepare
from headrace.testing.toy import ToyTokenizer
runs.RUN_TOKENS = 400_000
runs.WINDOW_TOKENS = 400_000
file, model, out = sys.argv[1:]
prepare(PrepareConfig(files=[file], model=model, out=Path(out), max_length=0), tokenizer=ToyTokenizer())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_data(tmp_path: Path, config_only: Path) -> None:
    rng = np.random.default_rng(0)
    peaks = []
    for name, count in (("small", 500), ("large", 5000)):
        with open(tmp_path / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                file.write(json.dumps({"input_ids": rng.integers(0, 50_000, 2000).tolist()}) + "\n")
        command = [
            sys.executable,
            "-c",
            MEASURED,
            str(tmp_path / f"{name}.jsonl"),
            str(config_only),
            str(tmp_path / name),
        ]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 60, peaks  # MiB; the large file holds 10 million tokens in 60 MB of text
