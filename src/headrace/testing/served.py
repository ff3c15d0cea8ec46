"""Whole extractions through a real SGLang server that can be killed too: rows, a tiny model, the server, the comparison with transformers."""

from __future__ import annotations

import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np

from headrace.engines.config import ServeConfig
from headrace.extract.config import ExtractConfig
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.store import Store
from headrace.testing.engine import transformers_reference
from headrace.testing.envs import engine_env
from headrace.testing.extraction import Comparison, extraction_process, kill_after, write_rows
from headrace.testing.models import make_tiny_model
from headrace.testing.servers import SGLANG_ON_CPU, free_port, sglang_capture_server
from headrace.types import FINAL, Row

VOCAB = 400
TAPS = (2, 3, 5, FINAL)
TOLERANCE = 1e-5
"""Largest relative error of a state against transformers, in float32."""


class ServedGround:
    """A tiny Llama behind the real SGLang, and rows for it. A context manager: leaving it stops the server."""

    def __init__(self, folder: Path, count: int, *, seed: int = 0, staging_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model", vocab=VOCAB)
        rng = np.random.default_rng(seed)
        prefix = rng.integers(3, VOCAB, 400)
        rows: dict[str, Row] = {}
        while (
            len(rows) < count
        ):  # lengths below and above the chunk size, many equal, half of them with a shared beginning
            tokens = int(rng.choice([1, 40, 64, 65, 130, 200, 333]))
            ids = np.where(
                np.arange(tokens) < rng.integers(0, tokens + 1),
                prefix[:tokens],
                rng.integers(3, VOCAB, tokens),
            )
            row = Row.make(ids, np.arange(tokens) >= tokens // 2)
            rows[row.key] = row
        self.rows = list(rows.values())
        write_rows(folder / "rows", self.rows)
        self.serve = ServeConfig.model_validate(
            {
                "model": str(self.model),
                "taps": ",".join(map(str, TAPS)),
                "dtype": "float32",
                "port": free_port(),
                "staging": str(folder / "staging"),
                "staging_bytes": staging_bytes,
                "host_bytes": 32 << 20,
                "python": str(engine_env("sglang-0.5.23")),
                "sglang_args": [*SGLANG_ON_CPU],
            }
        )
        self.server = sglang_capture_server(self.serve, folder / "server.log")

    def __enter__(self) -> ServedGround:
        self.server.start().wait_healthy()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()

    def restart(self) -> None:
        """The server again, on the same port, as its owner would start it."""
        self.server = sglang_capture_server(self.serve, self.folder / "server.log")
        self.server.start().wait_healthy()

    def config(self, store: Path) -> ExtractConfig:
        """An extraction of the rows into ``store``. The client waits a minute for a server that is gone."""
        values = {
            "rows": self.folder / "rows",
            "model": str(self.model),
            "out": store,
            "taps": list(TAPS),
            "dtype": "float32",
            "engine": "sglang",
            "url": [self.server.url],
            "engine_options": {"tokens_in_flight": 2000, "reference": "none", "patience_s": 60.0},
            "shard_bytes": sum(map(len, self.rows)) * 1024 // 12,
            "skip_preflight": True,
            "min_free": 0,
        }
        return ExtractConfig.model_validate(values)

    def extraction(self, store: Path) -> ForkProcess:
        """A client process, not yet started."""
        return extraction_process(self.config(store))

    @staticmethod
    def wait_for_captures(store: Path, seconds: float = 120.0) -> None:
        """Return when the run's own log tells of the first captures."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            events = read_events(RunFiles(store).events)
            if any(event["event"] == "progress" and event["rows_done"] > 0 for event in events):
                return
            time.sleep(0.1)
        raise AssertionError(f"no capture within {seconds:g} s")

    def finish(self, store: Path, attempts: int = 5) -> None:
        """Run the client until it has finished."""
        for _ in range(attempts):
            if kill_after(self.extraction(store), 300.0) == 0:
                return
            time.sleep(0.5)
        log = store.with_name(store.name + ".log").read_text(encoding="utf-8")
        raise AssertionError(f"not finished after {attempts} runs:\n{log[-2000:]}")

    def compare(self, store: Path) -> Comparison:
        """Every stored state against transformers, at most :data:`TOLERANCE` away; ids and masks exactly."""
        reference = transformers_reference(self.model, TAPS)
        opened = Store.open(store)
        wanted = {row.key: row for row in self.rows}
        wrong = []
        for key in opened.key_set:
            if key not in wanted:
                continue
            capture, row = opened[key], wanted[key]
            true = reference(row)
            error = (capture.states - true).norm(dim=-1) / true.norm(dim=-1)
            assert capture.mask is not None, "a store always gives the mask"
            same = np.array_equal(capture.ids, row.ids) and np.array_equal(capture.mask, row.mask)
            if not same or float(error.max()) > TOLERANCE:
                wrong.append(key)
        stored = set(opened.keys())
        return Comparison(sorted(set(wanted) - stored), sorted(wrong), sorted(stored - set(wanted)))
