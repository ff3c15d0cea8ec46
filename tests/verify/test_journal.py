"""The journal survives being cut anywhere and is never taken for that of another verification."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import CorruptError, SpecMismatchError
from headrace.verify.journal import Journal, Record
from headrace.verify.measure import Noise, TapError

IDENTITY = {"spec": "s", "seed": 0}


def record(key: str, bad: int = 0) -> Record:
    return Record(key, 7, {"2": TapError(0.01, 0.2, 0.99, bad), "final": TapError(0.0, 0.0, 1.0, 0)})


def test_what_was_added_is_there_when_opened_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j", IDENTITY)
    journal.add([record("a"), record("b", bad=3)])
    journal.save(noise=Noise(1, 2, 0.1, 0.2, {"2": 0.1}).to_dict(), scanned=["x"])
    again = Journal.open(tmp_path / "j", IDENTITY)
    assert again.records == {"a": record("a"), "b": record("b", bad=3)}
    assert (again.records["a"].failed, again.records["b"].failed) == (False, True)
    assert again.noise == Noise(1, 2, 0.1, 0.2, {"2": 0.1})
    assert again.state["scanned"] == ["x"]


def test_cut_at_any_byte_keeps_the_whole_records(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j", IDENTITY)
    journal.add([record("a")])
    whole = len((tmp_path / "j" / "captures.jsonl").read_bytes())
    journal.add([record("b")])
    data = (tmp_path / "j" / "captures.jsonl").read_bytes()
    for length in range(len(data) + 1):
        (tmp_path / "j" / "captures.jsonl").write_bytes(data[:length])
        again = Journal.open(tmp_path / "j", IDENTITY)
        expected = {"a", "b"} if length == len(data) else {"a"} if length >= whole else set()
        assert set(again.records) == expected
        again.add([record("c")])
        assert "c" in Journal.open(tmp_path / "j", IDENTITY).records


def test_another_verification_is_refused(tmp_path: Path) -> None:
    Journal.open(tmp_path / "j", IDENTITY)
    with pytest.raises(SpecMismatchError, match="seed"):
        Journal.open(tmp_path / "j", {**IDENTITY, "seed": 1})


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    Journal.open(tmp_path / "j", IDENTITY).add([record("a")])
    file = tmp_path / "j" / "captures.jsonl"
    file.write_bytes(b"{}\n" + file.read_bytes())
    with pytest.raises(CorruptError, match="line 1"):
        Journal.open(tmp_path / "j", IDENTITY)
