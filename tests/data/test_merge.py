"""``merge``: one folder out of several, and validation stays validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import build
from headrace.data import runs as runs_module
from headrace.data.config import MergeConfig, PrepareConfig
from headrace.data.merge import merge
from headrace.data.prepare import prepare
from headrace.data.rows import RowFolder, RowWriter
from headrace.errors import SpecMismatchError
from headrace.testing.conversations import assistant, user
from headrace.testing.toy import WITH_BOS, ToyTokenizer
from headrace.types import Origin, Row


class Desk:
    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def rows(self, name: str, numbers: range, template: str = "", **options: Any) -> Path:
        records = [{"id": f"c{n}", "messages": [user(f"hi {n}"), assistant("yes")]} for n in numbers]
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        values = {
            "files": [str(self.folder / f"{name}.jsonl")],
            "model": str(self.model),
            "out": self.folder / name,
            **options,
        }
        prepare(
            build(PrepareConfig, values, "test"),
            tokenizer=ToyTokenizer(template) if template else ToyTokenizer(),
        )
        return self.folder / name

    def merge(self, *folders: Path, out: str = "merged", seed: int = 0) -> dict[str, Any]:
        return merge(MergeConfig(folders=list(folders), out=self.folder / out, seed=seed))

    def split(self, name: str, split: str) -> set[str]:
        return set(RowFolder.open(self.folder / name).keys(split))


@pytest.fixture
def desk(tmp_path: Path, config_only: Path) -> Desk:
    return Desk(tmp_path, config_only)


def test_every_row_once_and_accounted_for(desk: Desk) -> None:
    a, b = desk.rows("a", range(100), validation=0.2), desk.rows("b", range(60, 160), validation=0.2)
    result = desk.merge(a, b)
    assert result["rows"] == 160
    assert result["counts"]["dropped"] == {"duplicate": 40}
    assert result["counts"]["rows_made"] == 200 == result["rows"] + 40
    assert set(RowFolder.open(desk.folder / "merged").keys()) == set(RowFolder.open(a).keys()) | set(
        RowFolder.open(b).keys()
    )
    assert (
        RowFolder.open(desk.folder / "merged").manifest["tokenizer_hash"]
        == RowFolder.open(a).manifest["tokenizer_hash"]
    )
    assert desk.merge(a, b)["reused"]


def test_adding_data_never_moves_a_row_from_validation_to_train(desk: Desk) -> None:
    held: set[str] = set()
    folders = []
    for number, (seed, share) in enumerate([(0, 0.3), (7, 0.1), (3, 0.0), (1, 0.5)]):
        folders.append(
            desk.rows(f"p{number}", range(number * 40, number * 40 + 80), seed=seed, validation=share)
        )
        desk.merge(*folders, out=f"m{number}", seed=number)
        now = desk.split(f"m{number}", "validation")
        assert held <= now
        held = now
        assert not now & desk.split(f"m{number}", "train")
    assert held


def test_rows_of_a_held_out_conversation_follow_it(desk: Desk) -> None:
    rows = [Row.make([1, 2, n + 5], [0, 1, 1], Origin("x", n, "talk")) for n in range(4)]
    for name, split, part in (("a", "train", rows[:2]), ("b", "validation", rows[2:])):
        with RowWriter(desk.folder / name) as writer:
            for row in part:
                writer.add(row, split)
    desk.merge(desk.folder / "a", desk.folder / "b")
    assert desk.split("merged", "validation") == {r.key for r in rows}


def test_the_seed_orders_and_the_folders_order_does_not(desk: Desk) -> None:
    a, b = desk.rows("a", range(60)), desk.rows("b", range(60, 120))
    desk.merge(a, b, out="ab")
    desk.merge(b, a, out="ba")
    desk.merge(a, b, out="other", seed=1)
    keys = {name: RowFolder.open(desk.folder / name).keys("train") for name in ("ab", "ba", "other")}
    assert keys["ab"] == keys["ba"]
    assert sorted(keys["ab"]) == sorted(keys["other"])
    assert keys["ab"] != keys["other"]


def test_folders_of_different_tokenizers_are_refused(desk: Desk) -> None:
    a, b = desk.rows("a", range(5)), desk.rows("b", range(5), template=WITH_BOS)
    with pytest.raises(SpecMismatchError, match="different templates"):
        desk.merge(a, b)
    assert not (desk.folder / "merged").exists()


def test_a_stopped_merge_goes_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = desk.rows("a", range(300)), desk.rows("b", range(200, 500))
    desk.merge(a, b, out="whole")
    monkeypatch.setattr(runs_module, "RUN_TOKENS", 3000)
    real = runs_module.Runs.merged
    monkeypatch.setattr(runs_module.Runs, "merged", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        desk.merge(a, b)
    monkeypatch.setattr(runs_module.Runs, "merged", real)
    assert list((desk.folder / ".merged.work").glob("run-*.json"))
    desk.merge(a, b)
    for name in ("train.parquet", "validation.parquet", "dropped.parquet", "manifest.json"):
        assert (desk.folder / "merged" / name).read_bytes() == (desk.folder / "whole" / name).read_bytes()


def test_the_command(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = desk.rows("a", range(10)), desk.rows("b", range(5, 15))
    assert main(["merge", str(a), str(b), "--out", str(desk.folder / "m"), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == 15
    assert "duplicate" in said.err
    assert main(["merge", str(a), str(desk.folder / "none"), "--out", str(desk.folder / "m")]) == 2
