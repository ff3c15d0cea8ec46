"""Utilization by formula, curves in Weights & Biases without a network, and keys that are nowhere."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.draft import record
from headrace.draft.gauges import Gauge, busy_share, peak_flops, useful_flops
from headrace.draft.metrics import Accuracy
from headrace.draft.objective import Objective
from headrace.draft.record import Curves
from headrace.draft.teacher import Teacher
from headrace.draft.train import train
from headrace.draft.ttt import Unroll
from headrace.errors import ConfigError
from headrace.target import Head

from .conftest import World
from .test_train import config, quiet
from .toys import draft_ids, toy_config, toy_draft, toy_pack


@pytest.mark.parametrize("train_lm_head", [False, True])
def test_useful_flops_are_those_of_the_products(train_lm_head: bool) -> None:
    """Against torch's own counter over one whole update; it also sees the attention, which is small here and left out."""
    shape = toy_config(hidden_size=64, intermediate_size=256, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=300, draft_vocab_size=100)  # fmt: skip
    model = toy_draft(shape)
    model.lm_head.weight.requires_grad_(train_lm_head)
    pack = toy_pack(shape, [[i > 2 for i in range(20)], [i > 5 for i in range(12)]])
    objective = Objective(Teacher(Head(torch.randn(300, 64)), draft_ids(model)), "kl", (1.0,) * 3)
    with FlopCounterMode(display=False) as counter:
        states = Unroll(model)(pack, 3)
        objective(states, model.lm_head.weight, pack.labels_final(), pack.layout.room).loss.backward()
    gauge = Gauge(shape, 3, torch.device("cpu"), bfloat16=False, train_lm_head=train_lm_head)
    gauge.count(pack)
    counted = useful_flops(shape, pack.tokens, len(pack.layout.starts), 3, train_lm_head=train_lm_head)
    assert gauge._flops == counted
    # The taps get no gradient of their own: of fc the input's gradient is not made.
    unmade = 2.0 * pack.tokens * len(shape.taps) * 64 * 64
    assert counter.get_total_flops() == pytest.approx(counted - unmade, rel=0.02)


def test_busy_share_and_peaks() -> None:
    assert busy_share([250.0, 500.0], 1.0) == 0.75
    assert busy_share([1500.0], 1.0) == 1.0, "two clocks may differ by a little"
    assert busy_share([], 0.0) == 0.0
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("Some GPU") == 0.0


def test_a_cpu_has_neither() -> None:
    gauge = Gauge(toy_config(), 3, torch.device("cpu"), bfloat16=False, train_lm_head=False)
    with gauge.working():
        pass
    assert gauge.read(1.0) == {}


def test_without_the_package_a_project_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(ConfigError, match="needs the package wandb"):
        train(config(world, tmp_path / "d", wandb="headrace"), quiet)
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_wandb_offline_gets_every_curve_and_no_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real package, offline: what it recorded holds our curves; the key of the environment is in none of our files."""
    pytest.importorskip("wandb")
    secret = "0123456789abcdef" * 2 + "01234567"
    for name, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": secret, "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    train(config(world, tmp_path / "d", wandb="headrace", max_steps=4), quiet)
    (recorded,) = (tmp_path / "d").glob("wandb/offline-run-*/*.wandb")
    curves = (b"train/accuracy_1", b"train/tokens_per_second", b"validation/implied_length")
    # A process of its own writes the file, after finish() too on a busy machine.
    until = time.monotonic() + 30
    while time.monotonic() < until and not all(curve in recorded.read_bytes() for curve in curves):
        time.sleep(0.1)
    data = recorded.read_bytes()
    for curve in curves:
        assert curve in data, curve
    for path in (tmp_path / "d").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_other_workers_write_nothing(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "d", True, "headrace", on=False)
    curves.begin(0, {})
    curves.write("train", 1, {"loss": [1.0]})
    curves.close()
    assert not (tmp_path / "d").exists()


def test_time_left_goes_by_the_pace_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps compile, for a minute on a GPU; a resumed run begins in the middle."""
    now, said = [1000.0], list[str]()
    monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: now[0]))
    accuracy = Accuracy.zero(1)
    progress = record.Progress(1000, said.append)
    progress.begin(400)
    for step, seconds in ((420, 100.0), (440, 2.0), (460, 2.0), (480, 6.0)):
        now[0] += seconds
        progress.show(step, accuracy, {"tokens_per_second": 1.0})
    left = [line.rsplit(", ", 1)[1] for line in said]
    assert left == ["0:48:20 left", "0:00:56 left", "0:00:54 left", "0:01:44 left"]
