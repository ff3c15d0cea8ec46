"""Training from a bucket, and its copy in a bucket: the same numbers, and a run whose folder is gone goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("moto")
import obstore

from headrace.data.mirror import mirror_rows
from headrace.draft.checkpoint import load_draft
from headrace.draft.train import train
from headrace.errors import ConfigError
from headrace.remote import fetch_folder, open_bucket
from headrace.store import Store
from headrace.store.convert import convert_store
from headrace.testing.s3 import S3Server

from .conftest import World
from .test_train import config, losses, quiet

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


def paths(url: str) -> list[str]:
    return sorted(entry["path"] for page in obstore.list(open_bucket(url)) for entry in page)


class Killed(Exception):
    pass


def test_training_from_a_bucket_with_a_copy_in_one(
    world: World, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    store, rows, copy = server.url("store"), server.url("rows"), server.url("copy")
    convert_store(Store.open(world.store), store)
    mirror_rows(world.rows, rows)
    train(config(world, tmp_path / "local"), quiet)
    remote = {"store": store, "rows": rows, "mirror": copy, "cache_bytes": 64 << 20, "save_minutes": 1e-9}
    train(config(world, tmp_path / "out", **remote), quiet)
    assert losses(tmp_path / "out") == losses(tmp_path / "local")
    assert list((tmp_path / "cache" / "blocks").rglob("*-000000")), "the cache was not used"
    # the copy is the drafter and the newest checkpoint
    there = fetch_folder(copy, tmp_path / "fetched", last="manifest.json")
    assert there is not None and json.loads((there / "manifest.json").read_text())["complete"]
    one, two = load_file(there / "model.safetensors"), load_file(tmp_path / "local" / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert load_draft(there).lineage["validation"] == load_draft(tmp_path / "local").lineage["validation"]
    steps = {path.split("/")[1] for path in paths(copy) if path.startswith("checkpoints/")}
    assert steps == {sorted(p.name for p in (tmp_path / "out" / "checkpoints").glob("step-*"))[-1]}
    # another run may not take its place
    with pytest.raises(ConfigError, match="holds another run"):
        train(config(world, tmp_path / "other", seed=5, mirror=copy), quiet)
    assert not (tmp_path / "other").exists()
    # a finished run whose folder is gone is found finished
    shutil.rmtree(tmp_path / "out")
    said: list[str] = []
    train(config(world, tmp_path / "out", **remote), said.append)
    assert any("finished; nothing to do" in line for line in said)


def test_a_lost_machine_goes_on_from_the_copy(
    world: World, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import headrace.draft.train as module

    copy = server.url("lost")
    train(config(world, tmp_path / "whole"), quiet)
    saves = 0
    save = module.save_state

    def die_at_the_third(*args: object, **kwargs: object) -> Path:
        nonlocal saves
        saves += 1
        if saves == 3:
            raise Killed
        return save(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "save_state", die_at_the_third)
    with pytest.raises(Killed):
        train(config(world, tmp_path / "out", mirror=copy, save_minutes=1e-9), quiet)
    monkeypatch.undo()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    shutil.rmtree(tmp_path / "out")
    said: list[str] = []
    train(config(world, tmp_path / "out", mirror=copy, save_minutes=1e-9), said.append)
    assert any("going on from the one at" in line for line in said)
    assert any("resumed at step" in line for line in said)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(one[name], two[name]) for name in two)
