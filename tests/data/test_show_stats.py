"""``show`` and ``stats``: a person can see the mask; the numbers are the rows'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli import main
from headrace.data.rows import RowFolder, RowWriter
from headrace.data.show import RowView
from headrace.data.stats import Numbers, draw
from headrace.errors import ConfigError, SpecMismatchError
from headrace.modelfiles import tokenizer_fingerprint
from headrace.target import Target
from headrace.testing.conversations import BASE, Bench, assistant, user
from headrace.testing.toy import ToyTokenizer
from headrace.types import Origin, Row

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def row_of(bench: Bench, messages: list[Any], line: int = 1) -> Row:
    draft = bench.row(messages)
    return Row.make(draft.ids, draft.mask, Origin("a.jsonl", line, f"c{line}"))


@pytest.fixture
def folder(tmp_path: Path, smollm2: Path) -> Path:
    tokenizer = Target.open(str(smollm2)).tokenizer
    bench = Bench(tokenizer)
    talks = [BASE, [user("hi 👩‍🚀"), assistant("yes\n👩‍🚀"), user("so"), assistant("no")]]
    with RowWriter(
        tmp_path / "rows", {"model": str(smollm2), "tokenizer_hash": tokenizer_fingerprint(tokenizer)}
    ) as writer:
        for number, talk in enumerate(talks):
            writer.add(row_of(bench, talk, number + 1), "train" if number == 0 else "validation")
    return tmp_path / "rows"


def test_supervised_text_stands_between_marks(folder: Path, smollm2: Path) -> None:
    rows = RowFolder.open(folder)
    view = RowView.open(rows)
    shown = view.text(list(rows.rows())[1], color=False)
    assert "<|im_start|>assistant\n⟦yes\n👩‍🚀<|im_end|>⟧\n<|im_start|>user\nso" in shown
    assert shown.endswith("⟦no<|im_end|>⟧\n")


def test_colours_change_nothing_but_colours(folder: Path) -> None:
    rows = RowFolder.open(folder)
    view = RowView.open(rows)
    for row in rows.rows():
        plain = view.text(row, color=False).replace("⟦", "").replace("⟧", "")
        assert ANSI.sub("", view.text(row, color=True)).replace("⏎\n", "\n") == plain
        green = re.findall(r"\x1b\[1;32m(?:\x1b\[4m)?(.*?)\x1b\[0m", view.text(row, color=True), flags=re.S)
        assert "".join(green).replace("⏎\n", "\n") == "".join(
            s.text for s in view.stretches(row) if s.supervised
        )


def test_a_mask_that_ends_one_too_late_is_seen() -> None:
    bench = Bench()
    row = row_of(bench, BASE)
    row.mask[-1] = True
    view = RowView(bench.tokenizer)
    assert view.text(row, color=False).endswith("<|e|>\n⟧")
    assert "⏎" in view.text(row, color=True)


def test_tokens_one_by_one() -> None:
    bench = Bench()
    tokens = RowView(bench.tokenizer).tokens(row_of(bench, BASE))
    assert [(n, mark) for n, _, mark, _ in tokens if mark] == [(10, "*"), (11, "*"), (12, "*"), (13, "*")]
    assert tokens[9][3] == "\\n"


def test_the_show_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = RowFolder.open(folder).keys()
    assert main(["show", str(folder)]) == 0
    assert "⟦yes<|im_end|>⟧" in capsys.readouterr().out
    assert main(["show", str(folder), "1", keys[0][:8], "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["key"] for r in result["rows"]] == [keys[1], keys[0]]
    assert main(["show", str(folder), "--ids", "--split", "validation"]) == 0
    assert "im_end" in capsys.readouterr().out
    for wrong, message in (
        ("7", "there is no row 7"),
        ("zz", "has no rows whose key"),
        ("", "has 2 rows whose key"),
    ):
        assert main(["show", str(folder), wrong]) == 2
        assert message in capsys.readouterr().err


def test_another_tokenizer_is_refused(folder: Path) -> None:
    rows = RowFolder.open(folder)
    with pytest.raises(SpecMismatchError, match="another tokenizer"):
        RowView.open(rows, tokenizer=ToyTokenizer())
    rows.manifest["model"] = ""
    with pytest.raises(ConfigError, match="--model"):
        RowView.open(rows)


def lengths_folder(path: Path) -> RowFolder:
    rng = np.random.default_rng(0)
    with RowWriter(path) as writer:
        for number in range(400):
            length = int(np.exp(rng.normal(5.5, 0.7))) + 4
            mask = np.zeros(length, bool)
            mask[int(length * rng.beta(2, 5)) + 1 :] = True
            row = Row.make(rng.integers(0, 1000, length), mask, Origin("ab"[number % 2], number, str(number)))
            writer.add(row, "validation" if number % 10 == 0 else "train")
    return RowFolder.open(path)


def test_numbers_are_those_of_the_rows(tmp_path: Path) -> None:
    folder = lengths_folder(tmp_path / "rows")
    numbers = Numbers.read(folder)
    rows = list(folder.rows())
    assert numbers.lengths.tolist() == [len(r) for r in rows]
    assert numbers.supervised.tolist() == [r.supervised for r in rows]
    assert int(numbers.held_out.sum()) == 40
    facts = numbers.describe()
    assert facts["sources"] == {"a": 200, "b": 200}
    assert facts["lengths"]["max"] == max(len(r) for r in rows)
    counted = [int(cells[1].replace(",", "")) for cells in numbers.length_table(24)]
    assert sum(counted) == 400


@pytest.mark.parametrize("suffix", ["png", pytest.param("svg", marks=pytest.mark.slow)])
def test_pictures_are_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    numbers = Numbers.read(lengths_folder(tmp_path / "rows"))
    draw(numbers, "title", 24, tmp_path / f"p.{suffix}")
    data = (tmp_path / f"p.{suffix}").read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in data
    assert len(data) > 10_000


def test_other_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        draw(Numbers.read(lengths_folder(tmp_path / "rows")), "t", 5, tmp_path / "p.pdf")


def test_the_stats_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths_folder(tmp_path / "rows")
    assert main(["stats", str(tmp_path / "rows"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 400
    with RowWriter(tmp_path / "one") as writer:
        writer.add(Row.make([1, 2], [0, 1]))
    assert main(["stats", str(tmp_path / "one")]) == 0
    assert "2" in capsys.readouterr().out
    with RowWriter(tmp_path / "none"):
        pass
    assert main(["stats", str(tmp_path / "none")]) == 2
