"""``headrace compare``: error a tap between two stores, whatever two stores of one target may differ in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.cli import main
from headrace.errors import InputError, SpecMismatchError
from headrace.target import Target
from headrace.testing.planted import Ground
from headrace.testing.planted_files import write_store
from headrace.types import Row
from headrace.verify.compare import compare
from headrace.verify.config import CompareConfig


@pytest.fixture
def changed(ground: Ground, tmp_path: Path) -> Path:
    """The good store with tap 4 of one row 10 % off and one token of another 100 % off."""
    states = ground.copy()
    states[ground.rows[2].key][1] *= 1.1
    states[ground.rows[5].key][3, 4] = 0
    write_store(tmp_path / "changed", ground.spec, [(row, states[row.key]) for row in ground.rows])
    return tmp_path / "changed"


def test_equal_stores(good_store: Path, ground: Ground) -> None:
    report = compare(CompareConfig(store_a=good_store, store_b=good_store))
    assert report["captures"] == len(ground.rows) and report["tokens"] == sum(map(len, ground.rows))
    assert all(tap["max"] == 0 and tap["p99"] == 0 for tap in report["taps"])
    assert report["differences"] == [] and report["only_a"] == report["only_b"] == 0


def test_errors_and_worst_captures(good_store: Path, changed: Path, ground: Ground) -> None:
    report = compare(CompareConfig(store_a=changed, store_b=good_store, worst=2))
    taps = {tap["tap"]: tap for tap in report["taps"]}
    assert taps["2"]["max"] == taps["6"]["max"] == 0
    assert taps["4"]["max"] == pytest.approx(0.1, abs=0.01)
    assert taps["final"]["max"] == pytest.approx(1.0)
    assert taps["final"]["cosine_min"] == 0
    assert report["worst"][0]["key"] == ground.rows[2].key and report["worst"][0]["tap"] == "4"


def test_report_plot_and_exit_code(
    good_store: Path, changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", str(changed), str(good_store), "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (out / report["plot"]).read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "report.json").read_text())["taps"] == report["taps"]
    assert main(["compare", str(changed), str(good_store), "--tolerance", "0.5"]) == 0
    shifted = tmp_path / "twice"
    write_store(shifted, Target.open(report_model(good_store)).spec("2,4,6,final"), doubled(good_store))
    assert main(["compare", str(shifted), str(good_store), "--tolerance", "0.5"]) == 1
    assert "differs by 1.00e+00" in capsys.readouterr().err


def report_model(store: Path) -> str:
    from headrace.store import Store

    return Store.open(store).spec.target


def doubled(store: Path) -> list[tuple[Row, torch.Tensor]]:
    from headrace.store import Store

    opened = Store.open(store)
    return [(Row.make(*opened.tokens_of(key)), 2 * opened.get(key).states) for key in opened]


def test_common_taps_and_captures(good_store: Path, ground: Ground, tmp_path: Path) -> None:
    spec = dataclasses.replace(ground.spec, taps=("final", 4))
    write_store(tmp_path / "b", spec, [(row, ground.states[row.key][[3, 1]]) for row in ground.rows[3:]])
    report = compare(CompareConfig(store_a=good_store, store_b=tmp_path / "b"))
    assert [tap["tap"] for tap in report["taps"]] == ["4", "final"]
    assert all(tap["max"] == 0 for tap in report["taps"])
    assert (report["captures"], report["only_a"], report["only_b"]) == (len(ground.rows) - 3, 3, 0)


def test_a_normed_and_an_un_normed_store(
    good_store: Path, ground: Ground, model: Path, tmp_path: Path
) -> None:
    spec = dataclasses.replace(ground.spec, taps=("final",), final_normed=False)
    last = ground.spec.num_layers
    write_store(tmp_path / "b", spec, [(row, ground.boundary(row.key, last)[None]) for row in ground.rows])
    with pytest.raises(InputError, match="--model"):
        compare(CompareConfig(store_a=good_store, store_b=tmp_path / "b"))
    report = compare(CompareConfig(store_a=good_store, store_b=tmp_path / "b", model=str(model)))
    assert report["taps"][0]["median"] < 0.01 and report["taps"][0]["max"] < 0.05


def test_a_sample(good_store: Path, changed: Path) -> None:
    one = compare(CompareConfig(store_a=good_store, store_b=changed, max_captures=5, seed=1))
    two = compare(CompareConfig(store_a=good_store, store_b=changed, max_captures=5, seed=1))
    assert one["captures"] == 5
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


def test_what_cannot_be_compared(good_store: Path, ground: Ground, tmp_path: Path) -> None:
    pairs = [(row, ground.states[row.key]) for row in ground.rows]
    write_store(tmp_path / "other", dataclasses.replace(ground.spec, config_hash="x"), pairs)
    with pytest.raises(SpecMismatchError, match="config_hash"):
        compare(CompareConfig(store_a=good_store, store_b=tmp_path / "other"))
    ids = np.arange(3, 13)
    row = Row.make(ids, np.ones(10, dtype=bool))
    write_store(tmp_path / "rows", ground.spec, [(row, ground.stack(ground.compute(ids)))], shards=1)
    with pytest.raises(InputError, match="no capture in common"):
        compare(CompareConfig(store_a=good_store, store_b=tmp_path / "rows"))
