"""Made-up rows, and whole extractions in child processes that can be killed: what the fault tests and benchmarks are made of."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import torch

from headrace.data.rows import RowWriter
from headrace.engines.base import Engine
from headrace.engines.fake import fingerprint
from headrace.errors import HeadraceError
from headrace.extract.config import ExtractConfig
from headrace.extract.run import run_extraction
from headrace.store import Store
from headrace.target import Target
from headrace.types import CaptureSpec, Origin, Row

VOCAB = 70000
"""Ids above 65,535 are among them, so that every field of a fingerprint is used."""


def make_rows(count: int, seed: int = 0, low: int = 4, high: int = 60) -> list[Row]:
    """Distinct random rows of ``low`` to ``high - 1`` tokens: shared prefixes, equal lengths among them, partial masks."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB, high)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        tokens = int(rng.integers(low, high))
        ids = rng.integers(0, VOCAB, tokens)
        shared = int(rng.integers(0, tokens)) if rng.random() < 0.5 else 0
        ids[:shared] = prefix[:shared]
        row = Row.make(
            ids, np.arange(tokens) >= tokens // 2, Origin("made-up.jsonl", len(rows) + 1, f"c{len(rows)}")
        )
        rows[row.key] = row
    return list(rows.values())


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """A row folder of ``rows``; one in ten goes to the validation split."""
    with RowWriter(path) as writer:
        for number, row in enumerate(rows):
            writer.add(row, "validation" if number % 10 == 9 else "train")
    return path


@dataclass(frozen=True, slots=True)
class Comparison:
    """A store of fingerprint states against the rows it should hold."""

    lost: list[str]
    """Keys of rows without a capture."""
    wrong: list[str]
    """Keys of captures that differ from their row's fingerprint, ids or mask in any value."""
    strange: list[str]
    """Keys of captures that belong to none of the rows."""

    @property
    def equal(self) -> bool:
        """Whether the store is exactly what an undisturbed run makes."""
        return not (self.lost or self.wrong or self.strange)


def compare_store(path: Path, rows: Iterable[Row]) -> Comparison:
    """Read every capture back, through every checksum, and compare it value by value."""
    store = Store.open(path)
    wanted = {row.key: row for row in rows}
    wrong = []
    for key in store.keys():  # noqa: SIM118 - a Store is no dict
        if key not in wanted:
            continue
        capture, row = store[key], wanted[key]
        assert capture.mask is not None, "a store always gives the mask"
        same = np.array_equal(capture.ids, row.ids) and np.array_equal(capture.mask, row.mask)
        if not same or not torch.equal(capture.states, fingerprint(row.ids, store.spec)):
            wrong.append(key)
    stored = set(store.keys())
    return Comparison(sorted(set(wanted) - stored), wrong, sorted(stored - set(wanted)))


MakeEngine = Callable[[CaptureSpec], Engine]


def extraction_process(
    config: ExtractConfig, make_engine: MakeEngine | None = None, log: Path | None = None
) -> ForkProcess:
    """A child process, not yet started, that extracts and exits with the command's exit code.

    What it says goes to ``log``, by default a file beside the store.
    """
    log = log or config.out.with_name(config.out.name + ".log")
    context = multiprocessing.get_context("fork")
    return context.Process(target=_extract_and_exit, args=(config, make_engine, log))


def _extract_and_exit(config: ExtractConfig, make_engine: MakeEngine | None, path: Path) -> None:
    log = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - the process ends with it
    code = 0

    def say(text: str) -> None:
        log.write(text + "\n")

    try:
        engine = None
        if make_engine is not None:
            spec = Target.open(config.model).spec(
                config.taps, dtype=config.dtype, final_normed=config.final_normed
            )
            engine = make_engine(spec)
        run_extraction(config, say, engine).done()
    except HeadraceError as exc:
        log.write(f"{type(exc).__name__}: {exc}\n")
        code = exc.exit_code
    except KeyboardInterrupt:  # before the run took the signals, or after
        code = 130
    os._exit(code)  # the parent's clean-up (pytest's, a benchmark's) is not this process's business


def kill_after(process: ForkProcess, seconds: float, number: int = signal.SIGKILL) -> int:
    """Start ``process``, send it signal ``number`` after ``seconds`` if it still runs, wait; its exit code."""
    process.start()
    process.join(seconds)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode is not None, "the child ignores its signal"
    return process.exitcode


def run_until_finished(make: Callable[[], ForkProcess], attempts: int = 20) -> int:
    """Run ``make()`` again and again, as a user would, until it exits with 0; how many runs it took."""
    for attempt in range(1, attempts + 1):
        if kill_after(make(), 120.0) == 0:
            return attempt
        time.sleep(0.01)
    raise AssertionError(f"not finished after {attempts} runs")
