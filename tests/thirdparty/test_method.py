"""docs/add-a-method.md: a draft method of another package, trained from a store and measured in the real decoding loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.store import Store
from headrace.target import Target

from ..draft.conftest import World, make_world
from .conftest import headrace

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), rows=40, length=40)


@pytest.fixture(scope="module")
def trained(site_folder: Path, world: World) -> Path:
    """A drafter of the added method."""
    out = world.store.parent / "linear"
    done = headrace(site_folder, *train_command(world, out), "--method-options", "heads=3", apart=True)
    assert done.code == 0, done.err
    return out


def train_command(world: World, out: Path) -> tuple[object, ...]:
    return (
        "train",
        world.store,
        "--rows",
        world.rows,
        "--model",
        world.model,
        "--out",
        out,
        "--method",
        "linear",
    )


def test_it_learns_the_map(site: Path, trained: Path, world: World) -> None:
    """Against the same regression written out with numpy's least squares."""
    from linear_method import LinearDrafter  # type: ignore[import-not-found]

    drafter = LinearDrafter.open(trained, Target.open(str(world.model)), "cpu", torch.float32)
    from headrace.data.rows import RowFolder

    store, keys = Store.open(world.store), RowFolder.open(world.rows).keys("train")
    pairs = [store.get(key, ["final"]).states[0].float().numpy() for key in keys]
    x, y = (np.concatenate([s[a:b] for s in pairs]) for a, b in ((None, -2), (2, None)))
    penalty = np.sqrt(1e-2 * np.mean((x**2).sum(0))) * np.eye(x.shape[1])
    want = np.linalg.lstsq(np.vstack([x, penalty]), np.vstack([y, 0 * penalty]), rcond=None)[0]
    np.testing.assert_allclose(drafter.maps[1].numpy(), want, atol=2e-3)


def test_evaluate_measures_it(site_folder: Path, trained: Path, world: World, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rng = np.random.default_rng(5)
    lines = [json.dumps({"input_ids": rng.integers(0, 96, 5 + i).tolist()}) for i in range(6)]
    prompts.write_text("\n".join(lines))
    command = (
        "evaluate",
        trained,
        "--model",
        world.model,
        "--prompts",
        prompts,
        "--max-new-tokens",
        40,
        "--json",
    )
    done = headrace(site_folder, *command, "--steps", 3, "--out", tmp_path / "report")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["output_ok"] and report["drafts"][0]["all"]["equal"] == 6
    assert report["drafts"][0]["taps"] == ["final"]
    assert 1.2 < report["acceptance_length"] <= 4.0
    done = headrace(site_folder, *command, "--topk", 2)
    assert done.code == 2 and "chains of its best tokens" in done.err


def test_what_is_not_its_own_is_refused(
    site_folder: Path, trained: Path, world: World, tmp_path: Path
) -> None:
    done = headrace(site_folder, *train_command(world, tmp_path / "a"), "--ttt-steps", 3)
    assert done.code == 2 and "does not know ttt_steps" in done.err
    done = headrace(site_folder, *train_command(world, tmp_path / "a"), "--method-options", "haeds=3")
    assert done.code == 2 and "haeds: is not a known key" in done.err
    done = headrace(None, *train_command(world, tmp_path / "a"))
    assert done.code == 2 and "no method named 'linear' is installed; there are ['eagle3']" in done.err
    done = headrace(site_folder, "export", trained, "--engine", "vllm", "--out", tmp_path / "b")
    assert done.code == 2 and "method 'linear'" in done.err
    assert not (tmp_path / "a").exists()


def test_again_is_nothing_to_do(site_folder: Path, trained: Path, world: World) -> None:
    before = (trained / "model.safetensors").stat().st_mtime_ns
    done = headrace(site_folder, *train_command(world, trained), "--method-options", "heads=3")
    assert done.code == 0 and "nothing to do" in done.err + done.out
    assert (trained / "model.safetensors").stat().st_mtime_ns == before
    done = headrace(site_folder, *train_command(world, trained), "--method-options", "heads=2")
    assert done.code == 2 and "differs in: method_options" in done.err
