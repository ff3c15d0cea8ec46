"""Planted faults: each known cause of low acceptance is made on purpose, and the diagnosis must name it first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.config import build
from headrace.data.rows import RowWriter
from headrace.draft.checkpoint import file_hash
from headrace.draft.config import DiagnoseConfig, TrainConfig
from headrace.draft.diagnose import diagnose
from headrace.draft.train import train
from headrace.store import Store, StoreWriter
from headrace.testing.models import make_tiny_model
from headrace.types import Row

from .conftest import World, capture_into, write_rows

pytestmark = pytest.mark.slow

TAPS = (1, 2, 3, 4, 5, "final")


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """A target, its greedy rows, a store with five boundaries, and a drafter of the middle three that knows the rows well."""
    folder = tmp_path_factory.mktemp("diagnose")
    model = make_tiny_model(folder / "model", layers=7, hidden=32, vocab=96, seed=3)
    rows = list({r.key: r for r in write_rows(model, 14, 40)}.values())
    with RowWriter(folder / "rows", {}) as writer:
        for number, row in enumerate(rows):
            writer.add(row, "validation" if number < 2 else "train")
    world = World(model, folder / "rows", folder / "store")
    capture_into(world, rows, TAPS)
    values: dict[str, Any] = {
        "store": world.store, "rows": world.rows, "model": str(model), "out": folder / "draft", "ttt_steps": 3,
        "tokens_per_pack": 1024, "epochs": 150, "log_every": 50, "tensorboard": False, "validate_every": 1000,
        "shape": {"taps": [2, 3, 4], "vocab": 0, "variant": "eagle3"}, "optim": {"kind": "adamw", "learning_rate": 5e-3}, "validation_steps": 3,
        "machine": {"device": "cpu"},
    }  # fmt: skip
    train(build(TrainConfig, values, "test"), quiet)
    return world, folder / "draft"


def look(draft: Path, store: Path, **options: Any) -> dict[str, Any]:
    values = {"draft": draft, "store": store, "steps": 3, "machine": {"device": "cpu"}, **options}
    return diagnose(build(DiagnoseConfig, values, "test"), quiet)


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {f["name"]: f["verdict"] for f in result["findings"]}


def edited(draft: Path, out: Path, edit: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a drafter with its config or weights changed."""
    shutil.copytree(draft, out)
    document, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    edit(document, weights)
    save_file(weights, out / "model.safetensors")
    document["weights"]["hash"] = file_hash(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(document))
    return out


def rewritten(store: Path, out: Path, edit: Callable[[Row, torch.Tensor], tuple[Row, torch.Tensor]]) -> Path:
    """A copy of a store whose rows or states are changed while its spec stays."""
    source = Store.open(store)
    with StoreWriter(out, source.spec) as writer:
        for key in source:
            capture = source.get(key)
            row, states = edit(Row.make(capture.ids, capture.mask), capture.states)
            writer.add(row, states)
    return out


def test_a_healthy_drafter_has_no_fault(healthy: tuple[World, Path]) -> None:
    world, draft = healthy
    result = look(draft, world.store)
    assert result["implied_length"] > 2.0, "the drafter must be good for faults to show"
    assert result["faults"] == 0, [f for f in result["findings"] if f["verdict"] == "fault"]
    assert verdicts(result)["training"] in ("suspect", "ok")


def test_store_shifted_by_one(healthy: tuple[World, Path], tmp_path: Path) -> None:
    """Taps 1..5 that hold boundaries 2..6: the store is named, with the boundaries it really has."""
    world, draft = healthy
    with_six = World(world.model, world.rows, tmp_path / "six")
    rows = [Row.make(c.ids, c.mask) for c in map(Store.open(world.store).get, Store.open(world.store))]
    capture_into(with_six, rows, (2, 3, 4, 5, 6, "final"))
    six = Store.open(with_six.store)
    shifted = rewritten(world.store, tmp_path / "shifted", lambda row, _: (row, six.get(row.key).states))
    result = look(draft, shifted)
    finding = next(f for f in result["findings"] if f["name"] == "store boundaries")
    assert finding["verdict"] == "fault" and finding["values"]["wrong"] == [(2, 3), (3, 4), (4, 5)]


def test_drafter_of_other_boundaries(healthy: tuple[World, Path], tmp_path: Path) -> None:
    """Trained on 2, 3, 4 and declared as 1, 2, 3: a shift of +1 accepts more, and the gain is measured."""
    world, draft = healthy
    result = look(edited(draft, tmp_path / "d", lambda c, _: c["draft"].update(taps=[1, 2, 3])), world.store)
    first = result["findings"][0]
    assert (first["name"], first["verdict"]) == ("drafter boundaries", "fault")
    assert first["gain"] > 0.1 and "[2, 3, 4]" in first["mend"]


def test_final_state_before_its_norm(healthy: tuple[World, Path], tmp_path: Path) -> None:
    world, draft = healthy
    weight = load_file(world.model / "model.safetensors")["model.norm.weight"].float()

    def unnorm(row: Row, states: torch.Tensor) -> tuple[Row, torch.Tensor]:
        scale = torch.linspace(0.02, 0.05, states.shape[1])[:, None]  # any size: the norm takes it out again
        return row, torch.cat([states[:-1], (states[-1:].float() / weight * scale).to(states.dtype)])

    result = look(draft, rewritten(world.store, tmp_path / "s", unnorm))
    assert verdicts(result)["final norm"] == "fault"


def test_wrong_feedback_flag(healthy: tuple[World, Path], tmp_path: Path) -> None:
    world, draft = healthy
    result = look(
        edited(draft, tmp_path / "d", lambda c, _: c["draft"].update(normed_feedback=True)), world.store
    )
    assert result["findings"][0]["name"] == "feedback" and result["findings"][0]["gain"] > 0.02


def test_vocabulary_map_of_another_drafter(healthy: tuple[World, Path], tmp_path: Path) -> None:
    world, draft = healthy

    def reverse(_: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()

    result = look(edited(draft, tmp_path / "d", reverse), world.store)
    assert verdicts(result)["vocabulary map"] == "fault"


def test_small_vocabulary(healthy: tuple[World, Path], tmp_path: Path) -> None:
    """Half the vocabulary cut away: coverage is a fault, with what full coverage would give."""
    world, draft = healthy

    def shrink(document: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        kept = torch.arange(0, 96, 2)
        document["draft"]["draft_vocab_size"] = len(kept)
        weights["lm_head.weight"] = weights["lm_head.weight"][kept].contiguous()
        weights["d2t"] = kept - torch.arange(len(kept))
        weights["t2d"] = torch.zeros(96, dtype=torch.bool).index_fill(0, kept, True)

    result = look(edited(draft, tmp_path / "d", shrink), world.store)
    first = result["findings"][0]
    assert (first["name"], first["verdict"]) == ("vocabulary coverage", "fault") and first["gain"] > 0.1


def test_text_of_another_model(healthy: tuple[World, Path], tmp_path: Path) -> None:
    world, draft = healthy
    generator = np.random.default_rng(0)

    def scramble(row: Row, states: torch.Tensor) -> tuple[Row, torch.Tensor]:
        return Row.make(generator.integers(0, 96, len(row)), row.mask), states

    assert (
        verdicts(look(draft, rewritten(world.store, tmp_path / "s", scramble)))["on-policy data"] == "fault"
    )


@pytest.mark.parametrize("value", [True, False])
def test_mask_of_all_ones_or_zeros(healthy: tuple[World, Path], tmp_path: Path, value: bool) -> None:
    """DP-01 seen from here. (With nothing supervised there is nothing to judge, which is said in one sentence.)"""
    world, draft = healthy

    def fill(row: Row, states: torch.Tensor) -> tuple[Row, torch.Tensor]:
        return Row.make(row.ids, np.full(len(row), value)), states

    store = rewritten(world.store, tmp_path / "s", fill)
    found = look(draft, store)
    assert verdicts(found)["mask share"] == "fault"
    if not value:
        assert verdicts(found)["on-policy data"] == "suspect", "nothing was measured, so it is not ok"


def test_rows_longer_than_trained(healthy: tuple[World, Path], tmp_path: Path) -> None:
    world, draft = healthy
    short = edited(draft, tmp_path / "d", lambda c, _: c["lineage"]["data"].update(longest_row=10))
    assert verdicts(look(short, world.store))["length"] == "suspect"
    limited = edited(draft, tmp_path / "e", lambda c, _: c["draft"].update(max_positions=20))
    assert verdicts(look(limited, world.store))["length"] == "fault"


def test_training_cut_short(healthy: tuple[World, Path], tmp_path: Path) -> None:
    world, draft = healthy
    result = look(
        edited(draft, tmp_path / "d", lambda c, _: c["lineage"].update(tokens_seen=100)), world.store
    )
    assert verdicts(result)["training"] == "fault"


def test_a_rising_curve_is_undertraining(tmp_path: Path) -> None:
    from headrace.draft.history import undertraining

    lines = [{"kind": "validation", "step": s, "implied_length": 1.5 + 0.002 * s} for s in range(10, 200, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lineage = {"tokens_seen": 5_000_000, "data": {"train_tokens": 1_000_000}}
    assert undertraining(lineage, tmp_path)[0] == "fault"
    flat = [{**line, "implied_length": 2.0} for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in flat))
    assert undertraining(lineage, tmp_path)[0] == "ok"
    assert undertraining({}, None)[0] == "unknown"
