"""``headrace verify`` from end to end: verdicts, exit codes, budgets, resumption, and what it says when it cannot run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.cli import main
from headrace.engines.fake import fingerprint
from headrace.errors import ConfigError, InputError, SpecMismatchError
from headrace.store import StoreWriter
from headrace.target import Target
from headrace.testing.planted import STATES, Ground, Plant
from headrace.testing.planted_files import FILES, FilePlant, write_planted, write_store
from headrace.types import Capture, Row
from headrace.verify.reference import Reference

from .conftest import Check, codes, make_rows, write_rows

pytestmark = pytest.mark.slow


def pairs(ground: Ground) -> list[tuple[Row, torch.Tensor]]:
    return [(row, ground.states[row.key]) for row in ground.rows]


def test_a_good_store_is_accepted(good_store: Path, check: Check, ground: Ground) -> None:
    report = check(good_store)
    assert codes(report) == []
    assert (report["verify_ok"], report["verdict"], report["complete"]) == (True, "accepted", True)
    assert report["sample"]["captures"] == report["sample"]["of"] == len(ground.rows)
    assert report["structure"]["tokens"] == sum(map(len, ground.rows))
    assert [tap["tap"] for tap in report["taps"]] == ["2", "4", "6", "final"]
    assert all(
        tap["bad_tokens"] == 0 and tap["max"] < 0.05 and tap["cosine_min"] > 0.99 for tap in report["taps"]
    )
    assert report["noise"]["captures"] > 0 and report["meaning"]["clear_agreement"] == 1.0
    assert json.loads((Path(f"{good_store}.verify") / "report.json").read_text()) == report


@pytest.mark.parametrize("plant", FILES, ids=lambda plant: plant.name)
def test_planted_files_are_named(plant: FilePlant, ground: Ground, tmp_path: Path, check: Check) -> None:
    write_planted(plant, ground, tmp_path / "store", seed=4)
    report = check(tmp_path / "store")
    assert codes(report)[:1] == [code for code in codes(report)[:1] if code in plant.codes] != []
    assert not report["verify_ok"]


@pytest.mark.parametrize(
    "name",
    [
        "tap 2 one boundary late",
        "two captures swapped",
        "one value NaN",
        "last tokens zero",
        "first tokens of another capture",
    ],
)
def test_planted_states_are_named(name: str, ground: Ground, tmp_path: Path, check: Check) -> None:
    plant: Plant = next(plant for plant in STATES if plant.name == name)
    write_planted(plant, ground, tmp_path / "store", seed=4)
    report = check(tmp_path / "store")
    assert codes(report)[0] in plant.codes, report["faults"]
    assert len(codes(report)) == len(set(codes(report))), "a fault is named once"


def test_exit_code_and_json(
    ground: Ground, model: Path, rows_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tmp_path / "good", ground.spec, pairs(ground))
    arguments = ["--rows", str(rows_folder), "--model", str(model), "--json"]
    assert main(["verify", str(tmp_path / "good"), *arguments]) == 0
    good = json.loads(capsys.readouterr().out)
    assert good["ok"] and good["verify_ok"]
    write_planted(STATES[0], ground, tmp_path / "bad", seed=0)
    assert main(["verify", str(tmp_path / "bad"), *arguments]) == 1
    out = capsys.readouterr()
    bad = json.loads(out.out)
    assert not bad["ok"] and bad["faults"][0]["code"] == "boundary-shifted"
    assert "boundary-shifted" in bad["error"]["message"]
    assert main(["verify", str(tmp_path / "bad"), *arguments[:-1]]) == 1
    assert "FAULT boundary-shifted" in capsys.readouterr().out


def test_without_rows_the_keys_are_the_proof(
    good_store: Path, check: Check, ground: Ground, tmp_path: Path
) -> None:
    assert codes(check(good_store, rows=None)) == []
    write_planted(next(p for p in FILES if p.name == "a token id changed"), ground, tmp_path / "bad", seed=0)
    assert "ids-differ" in codes(check(tmp_path / "bad", rows=None))


def test_budget_and_resumption_give_the_uninterrupted_report(
    good_store: Path, check: Check, tmp_path: Path
) -> None:
    whole = check(good_store, out=tmp_path / "whole")
    runs = 0
    while True:
        part = check(good_store, out=tmp_path / "parts", budget_tokens=150, noise_captures=2)
        runs += 1
        assert part["verify_ok"], "a budget that ends is no fault"
        if part["complete"]:
            break
        assert part["sample"]["captures"] < whole["sample"]["captures"]
        assert part["sample"]["rules_out_share"] > whole["sample"]["rules_out_share"]
    assert runs > 2
    for key in ("captures", "planned", "of", "tokens", "failed", "rules_out_share"):
        assert part["sample"][key] == whole["sample"][key]
    for now, then in zip(
        part["taps"], whole["taps"], strict=True
    ):  # batches of other sizes: equal up to the noise
        assert now["tap"] == then["tap"] and now["bad_tokens"] == then["bad_tokens"] == 0
        assert abs(now["max"] - then["max"]) < 0.03
    again = check(good_store, out=tmp_path / "parts", noise_captures=2)
    assert again["sample"] == part["sample"], "nothing is left to do"


def test_a_fault_found_in_parts_is_named_as_well(ground: Ground, check: Check, tmp_path: Path) -> None:
    """The captures that hold each other's states are judged in different runs."""
    plant = next(plant for plant in STATES if plant.name == "two captures swapped")
    write_planted(plant, ground, tmp_path / "store", seed=4)
    while not (report := check(tmp_path / "store", budget_tokens=100, noise_captures=1, scan=False))[
        "complete"
    ]:
        pass
    assert codes(report)[0] == "captures-swapped"


def test_rare_faults_are_found_by_the_scan(model: Path, check: Check, ground: Ground, tmp_path: Path) -> None:
    """One bad capture of many and a sample of a few: chance would miss it, the reading does not."""
    rows = make_rows(9, count=60)
    states = {row.key: ground.stack(ground.compute(row.ids)) for row in rows}
    for row in rows[17:18]:
        states[row.key][:, 20:24] = states[row.key][:, 8:12].clone()
    write_store(tmp_path / "store", ground.spec, [(row, states[row.key]) for row in rows])
    folder = write_rows(rows, tmp_path / "rows")
    few = {"rows": folder, "confidence": 0.5, "fault_share": 0.5}
    assert codes(check(tmp_path / "store", **few))[0] == "chunk-repeated"
    assert codes(check(tmp_path / "store", **few, scan=False, out=tmp_path / "unscanned")) == []


def test_a_reference_that_varies_does_not_reject(
    good_store: Path, ground: Ground, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that differs only in a batch of the reference is the reference's fault, not the store's."""
    key = ground.rows[7].key
    captures = Reference.captures

    def varying(self: Reference, rows: Iterable[Row]) -> Iterator[Capture]:
        rows = list(rows)
        for capture in captures(self, iter(rows)):
            if len(rows) > 1 and capture.key == key:
                capture.states[2, 5] *= 2
            yield capture

    monkeypatch.setattr(Reference, "captures", varying)
    report = check(good_store, noise_captures=1)
    assert codes(report) == []
    assert (report["sample"]["failed"], report["sample"]["excused"]) == (1, 1)


def test_missing_rows_within_the_share(ground: Ground, check: Check, tmp_path: Path) -> None:
    write_store(tmp_path / "store", ground.spec, pairs(ground)[:-1])
    assert codes(check(tmp_path / "store")) == ["rows-missing"]
    assert codes(check(tmp_path / "store", missing_share=0.1)) == []


def test_final_states_left_out_are_no_fault(ground: Ground, check: Check, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", ground.spec, final_positions="supervised") as writer:
        for row, states in pairs(ground):
            writer.add(row, states)
    report = check(tmp_path / "store")
    assert codes(report) == []
    assert report["meaning"]["tokens"] == sum(int(row.mask[1:].sum()) for row in ground.rows)


@pytest.mark.parametrize("taps", ["4", "final", "6,2"])
def test_any_taps(taps: str, model: Path, ground: Ground, check: Check, tmp_path: Path) -> None:
    spec = Target.open(str(model)).spec(taps)
    place = [ground.spec.tap_index(tap) for tap in spec.taps]
    write_store(tmp_path / "store", spec, [(row, states[place]) for row, states in pairs(ground)])
    assert codes(check(tmp_path / "store")) == []
    wrong = [(row, states[place].roll(1, dims=1)) for row, states in pairs(ground)]
    write_store(tmp_path / "wrong", spec, wrong)
    assert codes(check(tmp_path / "wrong"))[0] == "token-shift"


def test_an_un_normed_final_state_as_the_spec_says(
    model: Path, ground: Ground, check: Check, tmp_path: Path
) -> None:
    spec = dataclasses.replace(ground.spec, final_normed=False)
    states = ground.copy()
    for key, value in states.items():
        value[3] = ground.boundary(key, spec.num_layers)
    write_store(tmp_path / "store", spec, [(row, states[row.key]) for row in ground.rows])
    assert codes(check(tmp_path / "store")) == []
    write_store(tmp_path / "normed", spec, pairs(ground))
    assert codes(check(tmp_path / "normed"))[0] == "final-normed"


def test_states_of_another_engine_are_all_wrong(ground: Ground, check: Check, tmp_path: Path) -> None:
    """Fingerprints are states of no model: rejected, and no comfortable name is found for them."""
    write_store(
        tmp_path / "store", ground.spec, [(row, fingerprint(row.ids, ground.spec)) for row in ground.rows]
    )
    assert codes(check(tmp_path / "store"))[0] == "unexplained"


def test_a_store_that_cannot_be_opened_is_rejected(good_store: Path, check: Check) -> None:
    (good_store / "dataset.json").write_bytes(b"{" + (good_store / "dataset.json").read_bytes())
    assert codes(check(good_store)) == ["store-damaged"]


def test_an_empty_store_is_rejected(ground: Ground, check: Check, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", ground.spec):
        pass
    assert codes(check(tmp_path / "store"))[0] == "rows-missing"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"store": "nowhere"}, InputError, "nowhere"),
        ({"rows": Path("nowhere")}, InputError, "row folder nowhere"),
        ({"model": "./nowhere"}, ConfigError, "nowhere"),
        ({"engine": "no-such"}, ConfigError, "no-such"),
        ({"engine_options": {"colour": "red"}}, ConfigError, "colour"),
    ],
)
def test_what_cannot_be_verified_says_why(
    changes: dict[str, Any], error: type[Exception], words: str, good_store: Path, check: Check
) -> None:
    store = Path(changes.pop("store", good_store))
    with pytest.raises(error, match=words):
        check(store, **changes)


def test_a_folder_of_another_verification_is_refused(good_store: Path, check: Check, tmp_path: Path) -> None:
    check(good_store, out=tmp_path / "out")
    with pytest.raises(SpecMismatchError, match="seed"):
        check(good_store, out=tmp_path / "out", seed=1)


def test_nothing_is_written_into_the_store(good_store: Path, check: Check) -> None:
    def content() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in good_store.rglob("*") if p.is_file()}

    before = content()
    check(good_store)
    assert content() == before


def test_bit_flips_anywhere_are_found(ground: Ground, check: Check, tmp_path: Path) -> None:
    """Header, tables, ids, masks, states of every tap: no byte of a shard may change unnoticed."""
    rng = np.random.default_rng(0)
    write_store(tmp_path / "store", ground.spec, pairs(ground)[:4], shards=1)
    rows = write_rows(ground.rows[:4], tmp_path / "rows")
    (shard,) = (tmp_path / "store" / "shards").iterdir()
    data = shard.read_bytes()
    for number, place in enumerate([8, 200, *rng.integers(0, len(data), 10).tolist()]):
        changed = bytearray(data)
        changed[place] ^= 1 << int(rng.integers(8))
        shard.write_bytes(bytes(changed))
        report = check(tmp_path / "store", rows=rows, scan=False, out=tmp_path / f"out{number}")
        assert set(codes(report)) & {"checksum", "shard-truncated", "index-mismatch"}, place
