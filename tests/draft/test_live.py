"""Training straight from engines: the same losses as from a store, whatever the workers do, and nothing asked for too early."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.config import build
from headrace.data.rows import RowFolder
from headrace.draft.config import TrainConfig
from headrace.draft.train import train
from headrace.engines import open_engine
from headrace.engines.base import Engine
from headrace.errors import CaptureError, ConfigError
from headrace.extract import crew, crew_run
from headrace.store import Store, StoreWriter
from headrace.types import Capture, CaptureSpec, Failure, Row

from ..extract.crew_of_threads import ThreadCluster
from .conftest import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world32(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The world with its states in float32: in bfloat16 a state depends on what it was batched with."""
    made = World(world.model, world.rows, tmp_path_factory.mktemp("world32") / "store")
    spec = made.target.spec("eagle3", dtype="float32")
    rows = {row.key: row for row in RowFolder.open(made.rows).rows()}
    with engine_of(made, spec) as engine, StoreWriter(made.store, spec) as store:
        for capture in engine.capture(iter(rows.values())):
            assert isinstance(capture, Capture)
            store.add(rows[capture.key], capture.states)
    return made


def config(world: World, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "rows": world.rows,
        "model": str(world.model),
        "out": out,
        "ttt_steps": 3,
        "tokens_per_pack": 128,
        "epochs": 2,
        "log_every": 1,
        "tensorboard": False,
        "machine": {"device": "cpu"},
        "shape": {"vocab": 64},
        "validation_steps": 3,
        **changes,
    }
    return build(TrainConfig, values, "test")


def live(world: World, out: Path, **changes: Any) -> TrainConfig:
    spec = Store.open(world.store).spec
    source = {"taps": ",".join(map(str, spec.taps)), "dtype": spec.dtype, **changes.pop("live", {})}
    return config(world, out, from_engine="hf", live=source, **changes)


def losses(out: Path) -> list[Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


def assert_same(world: World, tmp_path: Path, out: Path, **changes: Any) -> None:
    """The curve, and the best drafter, are those of training from the store."""
    train(config(world, tmp_path / "stored", store=world.store, **changes), lambda text: None)
    wanted, found = losses(tmp_path / "stored"), losses(out)
    assert [line[:2] for line in found] == [line[:2] for line in wanted] and len(wanted) > 6
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[2] == pytest.approx(theirs[2], abs=1e-6, rel=1e-6)
    weights = [load_file(folder / "model.safetensors") for folder in (out, tmp_path / "stored")]
    assert all(torch.allclose(weights[0][k], weights[1][k], atol=1e-5) for k in weights[1])


LOADING = threading.Lock()


def engine_of(world: World, spec: CaptureSpec) -> Engine:
    with LOADING:  # transformers loads one model at a time in a process
        return open_engine("hf", world.target, spec, {"device": "cpu"})


def test_the_curve_is_that_of_training_from_a_store(
    world32: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a worker that dies on the way; what passed is kept in a store when asked for."""
    monkeypatch.setattr(crew, "LOOK_AT_CLUSTER", 0.1)
    cluster = ThreadCluster(lambda spec, number: engine_of(world32, spec), 2)
    deaths = iter([time.monotonic() + 1.0])
    due = [next(deaths)]

    def reaper(cluster: ThreadCluster) -> None:
        if due and time.monotonic() > due[0] and cluster.alive:
            due.clear()
            cluster.alive[0].crash("killed by the test", host=True)

    cluster.on_wait = reaper
    monkeypatch.setattr(crew_run, "RayCluster", cluster.bind)
    result = train(live(world32, tmp_path / "live"), lambda text: None)
    assert result["steps"] > 4
    assert_same(world32, tmp_path, tmp_path / "live")


class Slow(Engine):
    """The real engine, counting what it was given and has not answered."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.spec, self.info = inner, inner.spec, inner.info
        self.rows: list[str] = []

    @classmethod
    def open(cls, target: Any, spec: CaptureSpec, options: Any) -> Slow:
        raise NotImplementedError

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        for row in rows:
            self.rows.append(row.key)
            yield from self.inner.capture([row])


def test_a_trainer_that_stands_still_holds_the_engine_back(
    world32: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only three packs are ever asked for ahead; and what passed can be kept."""
    from headrace.draft.setup import Data, train_packs
    from headrace.draft.trainer import Machine
    from headrace.draft.workers import join

    engines: list[Slow] = []

    def make(spec: CaptureSpec, number: int) -> Engine:
        engines.append(Slow(engine_of(world32, spec)))
        return engines[-1]

    monkeypatch.setattr(crew_run, "RayCluster", ThreadCluster(make, 1).bind)
    options = live(world32, tmp_path / "live", live={"keep": str(tmp_path / "kept")}, tokens_per_pack=48)
    data = Data.open(options, world32.target)
    try:
        workers = join(options.machine)
        packs = train_packs(
            options,
            data,
            world32.target,
            data.store.spec.taps[:-1],
            Machine.settle(options.machine, workers.device),
            workers,
        )
        reading = iter(packs)
        next(reading)
        time.sleep(1.5)
        # One pack was taken, two are on the device, one is being handed over and three are ahead in the loader.
        asked = sum(len(set(engine.rows)) for engine in engines)
        assert 0 < asked <= sum(len(rows) for rows in packs.loader.plan(0)[:7]) < len(data.train)
        captured = set(engines[0].rows)
        reading.close()
    finally:
        data.close()
    kept = Store.open(tmp_path / "kept")
    assert set(kept.keys()) >= captured and kept.provenance["engine"]["name"] == "hf"
    stored = Store.open(world32.store)
    for key in kept.keys():  # noqa: SIM118 - a Store is no dict
        assert torch.allclose(kept[key].states, stored[key].states, atol=1e-5)
    with pytest.raises(ConfigError, match="not empty"):
        Data.open(options, world32.target)


def test_a_row_that_gives_no_capture_ends_training_by_name(
    world32: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer must not silently learn from fewer rows."""
    bad: list[str] = []

    class Refusing(Slow):
        def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
            for row in rows:
                if not bad:
                    bad.append(row.key)
                if row.key == bad[0]:
                    yield Failure(row.key, "too_long", "cannot take it (on purpose)", retryable=False)
                else:
                    yield from self.inner.capture([row])

    cluster = ThreadCluster(lambda spec, number: Refusing(engine_of(world32, spec)), 1)
    monkeypatch.setattr(crew_run, "RayCluster", cluster.bind)
    with pytest.raises(CaptureError, match="too_long") as caught:
        train(live(world32, tmp_path / "live"), lambda text: None)
    assert bad[0] in str(caught.value)
    assert not [t for t in threading.enumerate() if t.name == "headrace-stream"]


def test_one_source_of_states(world32: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either a store, or from_engine"):
        config(world32, tmp_path / "out")
    with pytest.raises(ConfigError, match="either a store, or from_engine"):
        config(world32, tmp_path / "out", store=world32.store, from_engine="hf")


def test_the_curve_over_the_real_ray(world32: World, tmp_path: Path) -> None:
    """States through Ray's object store, a cluster started by the run itself."""
    pytest.importorskip("ray")
    source = {"ray": "local", "ray_workers": 1}
    train(live(world32, tmp_path / "live", live=source, epochs=1), lambda text: None)
    assert_same(world32, tmp_path, tmp_path / "live", epochs=1)


def test_the_curve_over_a_process_of_this_host(
    world32: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States through a pipe; Ray is not needed, and not asked for beside it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    train(live(world32, tmp_path / "live", live={"workers": 1}, epochs=1), lambda text: None)
    assert_same(world32, tmp_path, tmp_path / "live", epochs=1)
    with pytest.raises(ConfigError, match=r"--live\.workers 1 .*--live\.ray local"):
        train(live(world32, tmp_path / "both", live={"workers": 1, "ray": "local"}), lambda text: None)
