"""The train stage on a real (tiny) target, rows and store: learning, exactness of resuming, refusals, what it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.config import build
from headrace.data.rows import RowFolder
from headrace.draft.checkpoint import load_draft
from headrace.draft.config import TrainConfig
from headrace.draft.setup import Data, reader_processes
from headrace.draft.train import train
from headrace.draft.trainer import Machine
from headrace.errors import ConfigError, HeadraceError, SpecMismatchError
from headrace.store import Store

from .conftest import World, make_world

pytestmark = pytest.mark.slow


def config(world: World, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "store": world.store,
        "rows": world.rows,
        "model": str(world.model),
        "out": out,
        "ttt_steps": 3,
        "tokens_per_pack": 128,
        "epochs": 4,
        "log_every": 2,
        "tensorboard": False,
        "machine": {"device": "cpu"},
        "shape": {"vocab": 64},
        "validation_steps": 3,
        **changes,
    }
    return build(TrainConfig, values, "test")


def quiet(_: str) -> None:
    pass


def losses(out: Path) -> list[tuple[str, int, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


def test_it_learns_and_leaves_a_drafter(world: World, tmp_path: Path) -> None:
    said: list[str] = []
    result = train(config(world, tmp_path / "draft", epochs=30), said.append)
    found = losses(tmp_path / "draft")
    trained = [x[2] for x in found if x[0] == "train"]
    assert 0 < sum(trained[-1]) < 0.5 * sum(trained[0])
    assert result["val_acceptance_length"] > 1.0 and 0 <= result["val_accuracy"][0] <= 1
    assert any("covers" in line for line in said)
    draft = load_draft(tmp_path / "draft")
    assert draft.lineage["validation"]["implied_length"] == result["val_acceptance_length"]
    assert draft.lineage["data"]["train_rows"] == result["train_rows"]
    assert json.loads((tmp_path / "draft" / "manifest.json").read_text())["complete"]


def test_one_seed_gives_identical_losses_and_weights(world: World, tmp_path: Path) -> None:
    """Whoever reads: threads, or processes."""
    for name, readers in (("a", 0), ("b", 2)):
        train(config(world, tmp_path / name, readers=readers), quiet)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    weights = [load_file(tmp_path / n / "model.safetensors") for n in ("a", "b")]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    train(config(world, tmp_path / "c", seed=1), quiet)
    assert losses(tmp_path / "c") != losses(tmp_path / "a")


def test_readers_are_processes_where_a_gpu_is_fed_from_a_disk(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Machine(torch.device("cuda", 0), True, "flex", True, True)
    cpu = Machine(torch.device("cpu"), False, "eager", False, False)
    monkeypatch.setattr("headrace.draft.setup.available_cores", lambda: 16)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    mine = config(world, tmp_path / "d")
    assert [reader_processes(mine, machine) for machine in (gpu, cpu)] == [4, 0]
    assert [reader_processes(mine.model_copy(update={"readers": n}), cpu) for n in (7, 99)] == [7, 16]
    assert reader_processes(mine.model_copy(update={"store": "s3://b/s"}), gpu) == 0
    assert reader_processes(mine.model_copy(update={"from_engine": "hf", "readers": 7}), gpu) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert reader_processes(mine, gpu) == 2


def test_tr15_no_row_is_on_both_sides_and_none_is_lost(world: World, tmp_path: Path) -> None:
    """What trains and what validates, as the run itself takes them: disjoint, and together everything that is stored."""
    opened = Data.open(config(world, tmp_path / "d"), world.target)
    train_keys, held = set(opened.train), set(opened.validation)
    assert (
        not train_keys & held and len(train_keys) == len(opened.train) and len(held) == len(opened.validation)
    )
    assert train_keys | held == set(Store.open(world.store).keys()) == set(RowFolder.open(world.rows).keys())
    assert (opened.facts["train_rows"], opened.facts["validation_rows"]) == (len(train_keys), len(held))


class Killed(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Die right after the checkpoint of ``steps``, as a kill would: nothing is closed or finished."""
    from headrace.draft import train as module

    real = module._Run.checkpoint

    def checkpoint(self: Any, step: int, last: bool) -> None:
        real(self, step, last)
        if step == steps:
            raise Killed

    monkeypatch.setattr(module._Run, "checkpoint", checkpoint)


@pytest.mark.parametrize("optim", [{"kind": "adamw"}, {"kind": "muon", "average": 0.9}])
def test_tr17_resuming_is_exact(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: dict[str, Any]
) -> None:
    """Killed after 6 steps and run again: same batches, rates, losses and weights, bit for bit; window in the middle of a log interval."""
    settings: dict[str, Any] = {"optim": optim, "save_minutes": 1e-9, "max_steps": 14, "log_every": 3}
    train(config(world, tmp_path / "whole", **settings), quiet)
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Killed):
            train(config(world, tmp_path / "cut", **settings), quiet)
    said: list[str] = []
    train(config(world, tmp_path / "cut", **settings), said.append)
    assert any("resumed at step 6" in line for line in said)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, two = (
        load_file(tmp_path / n / "checkpoints/step-00000014/state.safetensors") for n in ("whole", "cut")
    )
    assert one.keys() == two.keys()
    assert [k for k in one if not torch.equal(one[k], two[k])] == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no facts", "leftover"])
def test_st20_a_damaged_checkpoint_is_passed_over(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    settings: dict[str, Any] = {"save_minutes": 1e-9, "max_steps": 8}
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Killed):
            train(config(world, tmp_path / "d", **settings), quiet)
    folder = tmp_path / "d" / "checkpoints"
    newest = folder / "step-00000006"
    data = (newest / "state.safetensors").read_bytes()
    if damage == "truncated":
        (newest / "state.safetensors").write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        (newest / "state.safetensors").write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "no facts":
        (newest / "state.json").unlink()
    else:
        shutil.move(newest, folder / ".step-00000006.1.abcd.tmp")
    said: list[str] = []
    train(config(world, tmp_path / "d", **settings), said.append)
    assert any("resumed at step 4" in line for line in said)
    assert damage == "leftover" or any("step-00000006 is not whole" in line for line in said)
    assert not list(folder.glob(".*"))
    train(config(world, tmp_path / "whole", **settings), quiet)
    assert losses(tmp_path / "d") == losses(tmp_path / "whole")


def test_tr14_validation_changes_nothing(world: World, tmp_path: Path) -> None:
    """With and without validations in between: identical weights and training losses; the mode is restored."""
    settings: dict[str, Any] = {"max_steps": 6, "optim": {"average": 0.9}}
    train(config(world, tmp_path / "often", validate_every=1, **settings), quiet)
    train(config(world, tmp_path / "once", validate_every=1000, **settings), quiet)
    one, two = (
        load_file(tmp_path / n / "checkpoints/step-00000006/state.safetensors") for n in ("often", "once")
    )
    assert [k for k in one if not torch.equal(one[k], two[k])] == []
    trained = [[x for x in losses(tmp_path / n) if x[0] == "train"] for n in ("often", "once")]
    assert trained[0] == trained[1]


def test_tr21_the_best_by_held_out_length_is_kept(world: World, tmp_path: Path) -> None:
    """Both curves are logged, and the saved drafter is that of the best validation, not of the last step."""
    settings = {
        "max_steps": 40,
        "validate_every": 2,
        "optim": {"kind": "adamw", "learning_rate": 0.05, "decay": "constant"},
    }
    result = train(config(world, tmp_path / "d", **settings), quiet)
    lines = [json.loads(line) for line in (tmp_path / "d" / "metrics.jsonl").read_text().splitlines()]
    judged = {line["step"]: line["implied_length"] for line in lines if line["kind"] == "validation"}
    best = max(judged, key=lambda step: (judged[step], -step))
    assert result["best_step"] == best == load_draft(tmp_path / "d").lineage["step"]
    assert best < 40, "this run was meant to get worse at its end"
    assert all("simulated_length" in line for line in lines if line["kind"] == "validation")


def test_finished_run_is_not_repeated_and_another_is_refused(world: World, tmp_path: Path) -> None:
    first = train(config(world, tmp_path / "d", max_steps=2), quiet)
    before = (tmp_path / "d" / "model.safetensors").stat().st_mtime_ns
    assert train(config(world, tmp_path / "d", max_steps=2), quiet) == first
    assert (tmp_path / "d" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="differs in: ttt_steps"):
        train(config(world, tmp_path / "d", max_steps=2, ttt_steps=2), quiet)


def test_tr17_changed_data_is_refused(world: World, tmp_path: Path) -> None:
    train(config(world, tmp_path / "d", max_steps=2), quiet)
    other = make_world(tmp_path / "other", rows=10, held_out=3)
    with pytest.raises(ConfigError, match="differs in: data"):
        train(config(other, tmp_path / "d", max_steps=2), quiet)


def test_a_store_of_another_target_is_refused(world: World, tmp_path: Path) -> None:
    other = make_world(tmp_path / "other", rows=4, held_out=2, seed=9)
    with pytest.raises(SpecMismatchError, match="weights_hash"):
        train(config(world, tmp_path / "d", model=str(other.model)), quiet)
    with pytest.raises(SpecMismatchError, match="none of the"):
        train(config(world, tmp_path / "d", rows=other.rows), quiet)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": {"taps": [2, 5]}}, "needs boundary 5"),
        ({"tokens_per_pack": 16}, "more than the 16"),
        ({"machine": {"device": "cpu", "attention": "flex"}}, "no backward"),
        ({"machine": {"device": "warp"}}, "not known"),
        ({"store": Path("/nonexistent")}, "nonexistent"),
    ],
)
def test_bad_options_are_one_sentence_and_leave_nothing(
    world: World, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(HeadraceError, match=words):
        train(config(world, tmp_path / "d", **changes), quiet)
    assert not (tmp_path / "d").exists()
