"""One run on any number of workers, whole or sharded: the same losses, the same validation, and it goes on with another number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.draft import train as module
from headrace.draft.dealing import DealtLoader
from headrace.draft.train import train
from headrace.errors import ConfigError, SpecMismatchError
from headrace.store import Store

from .conftest import World
from .test_train import Killed, config, losses, quiet
from .test_workers import free_port

pytestmark = pytest.mark.slow

STOP = 3
# Seven packs an epoch and two to an update: the fourth update of an epoch has a pack of the next.
COMMON: dict[str, Any] = {
    "packs_per_step": 2,
    "epochs": 2,
    "log_every": 1,
    "validate_every": 4,
    "save_minutes": 1e-9,
}
MUON: dict[str, Any] = {"optim": {"kind": "muon", "average": 0.9, "weight_decay": 0.01}}
SHARD: dict[str, Any] = {"machine": {"device": "cpu", "parallel": "shard"}}


def run(world: World, out: Path, stop: int = 0, **changes: Any) -> None:
    """Train to the end, or die right after the checkpoint of step ``stop``."""
    real = module._Run.checkpoint
    changes.setdefault("optim", {"kind": "adamw"})

    def checkpoint(self: Any, step: int, last: bool) -> None:
        real(self, step, last)
        if step == stop:
            raise Killed

    module._Run.checkpoint = checkpoint  # type: ignore[method-assign]
    try:
        train(config(world, out, **COMMON, **changes), quiet)
    except Killed:
        assert stop
    finally:
        module._Run.checkpoint = real  # type: ignore[method-assign]


def as_worker(world: World, out: Path) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    run(world, out / "two")
    run(world, out / "two-sharded", **SHARD)
    run(world, out / "two-sharded-muon", **SHARD, **MUON)
    run(world, out / "two-then-one", stop=STOP)
    run(world, out / "sharded-then-one", stop=STOP, **SHARD, **MUON)
    run(world, out / "one-then-two", **MUON)
    run(world, out / "one-then-sharded", **SHARD, **MUON)


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs by one worker, by two, and by first the one and then the other."""
    out = tmp_path_factory.mktemp("runs")
    run(world, out / "one")
    run(world, out / "one-muon", **MUON)
    for name in ("one-then-two", "one-then-sharded"):
        run(world, out / name, stop=STOP, **MUON)
    environment = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    places = [str(p) for p in (world.model, world.rows, world.store, out)]
    code = (
        "import sys, pathlib; from tests.draft import test_scale as t; from tests.draft.conftest import World; "
        "a = [pathlib.Path(x) for x in sys.argv[1:]]; t.as_worker(World(*a[:3]), a[3])"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code, *places], env={**environment, "RANK": str(rank)})
        for rank in (0, 1)
    ]
    assert [w.wait(timeout=300) for w in workers] == [0, 0]
    run(world, out / "two-then-one")
    run(world, out / "sharded-then-one", **MUON)
    return out


def lines_of(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("two", "one"),
        ("two-sharded", "one"),
        ("two-sharded-muon", "one-muon"),
        ("two-then-one", "one"),
        ("sharded-then-one", "one-muon"),
        ("one-then-two", "one-muon"),
        ("one-then-sharded", "one-muon"),
    ],
)
def test_the_same_run_whoever_does_it(runs: Path, name: str, reference: str) -> None:
    """Losses of every update to 1e-5 in float32, gradient norms, the same counts of every validation, the same drafter kept."""
    ours, theirs = losses(runs / name), losses(runs / reference)
    assert [x[:2] for x in ours] == [x[:2] for x in theirs] and len(ours) >= 9
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one[2], two[2], rtol=1e-5, atol=1e-5, err_msg=f"{one[:2]}")
    # Neither AdamW nor Muon sees the size of a gradient, so losses alone would not tell a sum from a mean.
    norms, expected = (
        [line["gradient_norm"] for line in lines_of(runs / n, "train")] for n in (name, reference)
    )
    np.testing.assert_allclose(norms, expected, rtol=1e-3)
    for one_line, two_line in zip(
        lines_of(runs / name, "validation"), lines_of(runs / reference, "validation"), strict=True
    ):
        for key in ("accuracy", "accuracy_in_vocab", "simulated_length", "simulated_rounds", "labels"):
            assert one_line[key] == two_line[key], key
    one_weights, two_weights = (load_file(runs / n / "model.safetensors") for n in (name, reference))
    assert one_weights.keys() == two_weights.keys()
    for key, tensor in one_weights.items():
        torch.testing.assert_close(tensor, two_weights[key], rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")  # fmt: skip


def test_checkpoints_are_alike_whoever_wrote_them(runs: Path) -> None:
    """Whole tensors under the same names and shapes: nothing in them tells how many workers there were."""
    whole, sharded = (
        load_file(next((runs / n / "checkpoints").glob("step-*7")) / "state.safetensors")
        for n in ("one-muon", "two-sharded-muon")
    )
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in sharded.items()}


def share(world: World, rank: int, workers: int, **more: Any) -> DealtLoader:
    store = Store.open(world.store)
    options = {"taps": (2, "final"), "token_budget": 96, "seed": 5, "epochs": 3, **more}
    return DealtLoader(store, store.keys(), rank=rank, workers=workers, threads=1, **options)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_every_pack_is_dealt_once_and_none_is_dropped(world: World, workers: int) -> None:
    line = [b.keys for b in share(world, 0, 1)]
    epochs = [key for keys in line for key in keys]
    assert sorted(epochs) == sorted(share(world, 0, 1).keys * 3)
    dealt = [[b.keys for b in share(world, rank, workers)] for rank in range(workers)]
    assert [dealt[i % workers][i // workers] for i in range(len(line))] == line


def test_a_place_means_the_same_to_any_number_of_workers(world: World) -> None:
    """Wherever two workers stop after a round, one or three go on with the rest of the line, and back."""
    line = [b.keys for b in share(world, 0, 1)]
    for rounds in range(len(line) // 2 + 1):
        states = []
        for rank in (0, 1):
            loader = share(world, rank, 2)
            for _ in zip(range(rounds), loader, strict=False):
                pass
            states.append(loader.state_dict())
        assert states[0] == states[1], "each worker saves the place of all"
        for workers in (1, 3):
            rest: list[list[Any]] = []
            for rank in range(workers):
                loader = share(world, rank, workers)
                loader.load_state_dict(states[0])
                rest.append([b.keys for b in loader])
            left = len(line) - 2 * rounds
            assert [rest[i % workers][i // workers] for i in range(left)] == line[2 * rounds :]


def test_a_place_in_another_order_is_refused(world: World) -> None:
    with pytest.raises(SpecMismatchError, match="another seed"):
        share(world, 0, 2, seed=6).load_state_dict(share(world, 0, 1).state_dict())


def test_workers_that_see_different_checkpoints_are_told(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.draft.workers import Workers

    monkeypatch.setattr(Workers, "same", lambda self, value: False)
    with pytest.raises(ConfigError, match="storage that all hosts share"):
        train(config(world, tmp_path / "d", max_steps=1), quiet)


def test_torchrun_starts_it(world: World, tmp_path: Path) -> None:
    """The launcher, the module and the options as documented: two workers, one answer, one finished run."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port",
        str(free_port()), "-m", "headrace.draft", str(world.store), "--rows", str(world.rows), "--model", str(world.model),
        "--out", str(tmp_path / "d"), "--packs-per-step", "2", "--max-steps", "2", "--tokens-per-pack", "256", "--shape.vocab", "64",
        "--ttt-steps", "2", "--machine.device", "cpu", "--machine.parallel", "shard", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [line for line in done.stdout.splitlines() if line.strip().startswith("{")]
    assert json.loads((tmp_path / "d" / "manifest.json").read_text())["complete"]
    assert any('"steps": 2' in line for line in answers) or '"steps": 2' in done.stdout
    assert "2 worker(s), sharded" in done.stderr
