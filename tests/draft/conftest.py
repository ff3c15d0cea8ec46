"""A small real world for training tests: a tiny target, rows it wrote itself, and their states in a real store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data.rows import RowWriter
from headrace.engines import open_engine
from headrace.store import Store, StoreWriter
from headrace.target import Target
from headrace.testing.models import make_tiny_model
from headrace.types import Capture, Row, Tap


@dataclass(frozen=True)
class World:
    """Folders of one tiny target and what it wrote."""

    model: Path
    rows: Path
    store: Path

    @property
    def target(self) -> Target:
        return Target.open(str(self.model))


def write_rows(model: Path, count: int, length: int, seed: int = 0) -> list[Row]:
    """Rows whose last part the target wrote greedily after a random prompt; the mask marks that part."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        prompt = torch.randint(0, network.config.vocab_size, (1, 4 + number % 5), generator=generator)
        with torch.no_grad():
            ids = network.generate(
                prompt, max_new_tokens=length + number % 7, do_sample=False, eos_token_id=None
            )[0]
        mask = np.arange(len(ids)) >= prompt.shape[1]
        rows.append(Row.make(ids.numpy(), mask))
    return rows


def make_world(folder: Path, rows: int = 24, held_out: int = 6, length: int = 24, **model: Any) -> World:
    values = {"layers": 7, "hidden": 32, "vocab": 96, "seed": 3, **model}
    family = values.pop("family", "llama")
    path = make_tiny_model(folder / "model", family, **values)
    written = write_rows(path, rows + held_out, length)
    unique = list({row.key: row for row in written}.values())
    with RowWriter(folder / "rows", {"made_by": "tests"}) as writer:
        for number, row in enumerate(unique):
            writer.add(row, "validation" if number < held_out else "train")
    world = World(path, folder / "rows", folder / "store")
    capture_into(world, unique)
    return world


def capture_into(world: World, rows: list[Row], taps: str | tuple[Tap, ...] = "eagle3", **spec: Any) -> None:
    """States of ``rows`` by the real reference engine into the world's store."""
    target = world.target
    wanted = target.spec(taps, dtype="bfloat16", **spec)
    by_key = {row.key: row for row in rows}
    with (
        open_engine("hf", target, wanted, {"device": "cpu"}) as engine,
        StoreWriter(world.store, wanted) as store,
    ):
        for capture in engine.capture(iter(rows)):
            assert isinstance(capture, Capture)
            store.add(by_key[capture.key], capture.states)
    assert len(Store.open(world.store)) == len(by_key)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))
