"""The commands end to end, as a user types them: exit codes, one JSON object, one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main

from .conftest import World

pytestmark = pytest.mark.slow


def command(world: World, out: Path, *more: str) -> list[str]:
    return [
        "train", str(world.store), "--rows", str(world.rows), "--model", str(world.model), "--out", str(out), "--ttt-steps", "2",
        "--tokens-per-pack", "256", "--max-steps", "4", "--shape.vocab", "64", "--machine.device", "cpu", *more,
    ]  # fmt: skip


def test_train_then_fine_tune_then_diagnose(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, tmp_path / "d", "--json")) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] and value["steps"] == 4 and len(value["val_accuracy"]) == 5
    assert (tmp_path / "d" / "tensorboard").is_dir()
    fine = [
        a
        for a in command(world, tmp_path / "e", "--from", str(tmp_path / "d"))
        if a not in ("--shape.vocab", "64")
    ]
    assert main(fine) == 0
    shown = capsys.readouterr().out
    assert "Held-out accuracy by position" in shown and "draft vocabulary 64 of 96" in shown
    lineage = json.loads((tmp_path / "e" / "config.json").read_text())["lineage"]
    assert lineage["settings"]["start"] == str(tmp_path / "d")
    assert (
        main(
            [
                "diagnose",
                str(tmp_path / "d"),
                str(world.store),
                "--rows",
                str(world.rows),
                "--machine.device",
                "cpu",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["findings"]


@pytest.mark.gpu
def test_the_same_on_a_gpu(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the device left to the product, as users leave it: compiled, in bfloat16, each pack replayed as a graph."""
    on_gpu = [a for a in command(world, tmp_path / "d", "--json") if a not in ("--machine.device", "cpu")]
    assert main(on_gpu) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] and value["steps"] == 4 and len(value["val_accuracy"]) == 5
    assert main(["diagnose", str(tmp_path / "d"), str(world.store), "--rows", str(world.rows), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"]


def test_fine_tuning_keeps_the_shape(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, tmp_path / "d")) == 0
    assert main(command(world, tmp_path / "e", "--from", str(tmp_path / "d"))) == 2
    assert "keeps the shape" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("more", "words", "code"),
    [
        (["--rows", "/nonexistent"], "/nonexistent", 2),
        (["--model", "/nonexistent"], "/nonexistent does not exist", 2),
        (["--ttt-steps", "0"], "ttt_steps", 2),
        (["--loss.kind", "mse"], "loss", 2),
    ],
)
def test_mistakes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str, code: int
) -> None:
    assert main(command(world, tmp_path / "d", *more)) == code
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err
    assert not (tmp_path / "d").exists()


def test_diagnose_and_import_mistakes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tmp_path / "none"), str(world.store), "--machine.device", "cpu"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert (
        main(
            [
                "import-draft",
                str(tmp_path / "none"),
                "--model",
                str(world.model),
                "--out",
                str(tmp_path / "d"),
            ]
        )
        == 2
    )
    assert "no config.json" in capsys.readouterr().err


def test_tr24_every_switch_has_both_forms() -> None:
    """Booleans can be turned off on the command line, and the effective settings are stored."""
    from headrace.cli.parse import parse
    from headrace.draft.config import TrainConfig

    base = ["S", "--rows", "R", "--model", "M", "--out", "O"]
    on = parse(
        TrainConfig, "train", "", [*base, "--tensorboard", "--loss.everywhere", "--shape.train-lm-head"]
    )
    off = parse(
        TrainConfig,
        "train",
        "",
        [*base, "--no-tensorboard", "--no-loss.everywhere", "--no-shape.train-lm-head"],
    )
    assert (on.tensorboard, on.loss.everywhere, on.shape.train_lm_head) == (True, True, True)
    assert (off.tensorboard, off.loss.everywhere, off.shape.train_lm_head) == (False, False, False)
