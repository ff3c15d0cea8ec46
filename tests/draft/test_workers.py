"""Several workers: the same update as one, clipped once, counted once (TR-11, TR-26)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.draft.data import Document, MemoryPacks, Placing
from headrace.draft.metrics import Accuracy
from headrace.draft.options import TrainOptions
from headrace.draft.teacher import Teacher
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.ttt import Pack
from headrace.draft.workers import Workers, join
from headrace.errors import ConfigError, TrainingError
from headrace.target import Head

from .toys import draft_ids, toy_config, toy_draft

pytestmark = pytest.mark.slow

STEPS, PACKS = 3, 4


def free_port() -> int:
    """A port that nothing listens on, by asking the kernel for one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Share:
    """Every ``count``-th pack of one order, as a store's loader deals them out."""

    def __init__(self, workers: Workers, packs: list[Pack]) -> None:
        self.packs, self.mine = packs, packs[workers.rank :: workers.count]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.mine)

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass

    def per_epoch(self) -> int:
        return len(self.packs)


class Notes:
    def __init__(self) -> None:
        self.seen: list[tuple[Accuracy, dict[str, float]]] = []

    def trained(self, step: int, accuracy: Accuracy, extra: dict[str, float]) -> None:
        self.seen.append((accuracy, extra))

    def validate(self, step: int) -> None:
        pass

    def checkpoint(self, step: int, last: bool) -> None:
        pass


def train_toy(workers: Workers) -> tuple[dict[str, torch.Tensor], Notes]:
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    documents = [
        Document(
            generator.integers(0, 30, 12).astype(np.int32), np.arange(12) > i % 3, torch.randn(4, 12, 16)
        )
        for i in range(STEPS * PACKS)
    ]
    packs = list(MemoryPacks(documents, Placing(torch.device("cpu")), token_budget=12, epochs=1))
    model = toy_draft(toy_config())
    teacher = Teacher(Head(torch.randn(30, 16)), draft_ids(model))
    options = TrainOptions.model_validate(
        {
            "ttt_steps": 2,
            "packs_per_step": PACKS,
            "max_steps": STEPS,
            "log_every": 1,
            "optim": {"kind": "adamw", "clip": 0.05},
        }
    )
    machine = Machine(torch.device("cpu"), False, "eager", False)
    notes = Notes()
    Trainer(model, teacher, Share(workers, packs), options, machine, workers).run(notes)
    return dict(model.state_dict()), notes


def as_worker(out: Path) -> None:
    """What each process of the test below runs."""
    torch.set_num_threads(1)
    workers = join(TrainOptions().machine.model_copy(update={"device": "cpu"}))
    weights, notes = train_toy(workers)
    save_file({n: t.contiguous() for n, t in weights.items()}, out / f"{workers.rank}.safetensors")
    norms = [extra["gradient_norm"] for _, extra in notes.seen]
    counts = np.stack([accuracy.counts for accuracy, _ in notes.seen])
    tokens = [extra["tokens"] for _, extra in notes.seen]
    np.savez(out / f"{workers.rank}.npz", norms=norms, counts=counts, tokens=tokens)


def test_four_workers_equal_one(tmp_path: Path) -> None:
    weights, notes = train_toy(Workers())
    count = 4  # two are compared, in every way of dividing the work, in test_scale
    out = tmp_path / str(count)
    out.mkdir()
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from tests.draft import test_workers; import pathlib; test_workers.as_worker(pathlib.Path({str(out)!r}))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env={**environment, "RANK": str(rank)})
        for rank in range(count)
    ]
    assert [p.wait(timeout=240) for p in processes] == [0] * count
    for rank in range(count):
        theirs = load_file(out / f"{rank}.safetensors")
        for name, tensor in weights.items():
            torch.testing.assert_close(
                theirs[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        facts = np.load(out / f"{rank}.npz")
        assert (facts["counts"] == np.stack([a.counts for a, _ in notes.seen])).all(), "counts are added once"
        np.testing.assert_allclose(facts["norms"], [e["gradient_norm"] for _, e in notes.seen], rtol=1e-4)
        assert facts["tokens"].tolist() == [e["tokens"] for _, e in notes.seen]
    assert all(0 <= a <= 1 for accuracy, _ in notes.seen for a in accuracy.conditional)


def test_packs_must_be_shareable() -> None:
    with pytest.raises(ConfigError, match="cannot be shared by 3 workers"):
        train_toy(Workers(0, 3))


def test_data_that_ends_early_is_said() -> None:
    class Short(Share):
        def __init__(self, workers: Workers, packs: list[Pack]) -> None:
            super().__init__(workers, packs[:5])

    original = globals()["Share"]
    globals()["Share"] = Short
    try:
        with pytest.raises(TrainingError, match="ended before the last step"):
            train_toy(Workers())
    finally:
        globals()["Share"] = original


def test_unknown_and_absent_devices() -> None:
    machine = TrainOptions().machine
    with pytest.raises(ConfigError, match="not known"):
        join(machine.model_copy(update={"device": "warp"}))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="is not there"):
            join(machine.model_copy(update={"device": "cuda"}))


@pytest.mark.parametrize(
    ("wish", "rank", "index"), [("auto", None, 0), ("cuda", None, 0), ("cuda", "1", 1), ("cuda:1", "0", 1)]
)
def test_a_cuda_device_has_a_number(
    monkeypatch: pytest.MonkeyPatch, wish: str, rank: str | None, index: int
) -> None:
    """torch refuses to be set to "cuda" without one, with a single device too: `headrace train` did not start on a GPU."""
    chosen: list[int | None] = []

    def set_device(device: torch.device) -> None:
        chosen.append(torch.cuda._utils._get_device_index(device))  # the refusal is torch's own

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    workers = join(TrainOptions().machine.model_copy(update={"device": wish}))
    assert chosen == [index]
    assert workers.device == torch.device("cuda", index)


@pytest.mark.gpu
def test_the_only_worker_takes_a_cuda_device() -> None:
    assert join(TrainOptions().machine).device == torch.device("cuda", 0)
