"""The row folder: what is written comes back, streams, survives kills, and never replaces what is not ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import rows as rows_module
from headrace.data.folder import work_folder
from headrace.data.rows import Facts, RowFolder, RowWriter
from headrace.errors import CorruptError, InputError, UsageError
from headrace.types import Origin, Row


def make_rows(count: int, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        length = int(rng.integers(2, 60))
        out.append(
            Row.make(
                rng.integers(0, 49152, length),
                rng.random(length) < 0.5,
                Origin("a.jsonl", number + 1, f"c{number}"),
            )
        )
    return out


def write(path: Path, rows: list[Row], validation: int = 0) -> RowFolder:
    with RowWriter(path, {"tokenizer_hash": "abc"}) as writer:
        for number, row in enumerate(rows):
            writer.add(row, "validation" if number < validation else "train", Facts(turns=2, finish="stop"))
    return RowFolder.open(path)


def same(left: Row, right: Row) -> bool:
    equal = np.array_equal(left.ids, right.ids) and np.array_equal(left.mask, right.mask)
    return equal and left.key == right.key and left.origin == right.origin


def test_round_trip_in_order_with_splits(tmp_path: Path) -> None:
    rows = make_rows(50)
    folder = write(tmp_path / "rows", rows, validation=7)
    assert folder.splits == ("train", "validation")
    assert len(folder) == 50
    assert all(same(a, b) for a, b in zip(folder.rows("validation"), rows[:7], strict=True))
    assert all(same(a, b) for a, b in zip(folder.rows(), rows[7:] + rows[:7], strict=True))
    assert folder.keys("train") == [r.key for r in rows[7:]]
    assert folder.lengths("train").tolist() == [len(r) for r in rows[7:]]
    assert folder.manifest["tokens"] == sum(map(len, rows))
    assert folder.manifest["supervised"] == sum(r.supervised for r in rows)
    assert folder.manifest["tokenizer_hash"] == "abc"
    assert folder.check() == []


def test_get_finds_every_row_over_many_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "GROUP_TOKENS", 100)
    rows = make_rows(80)
    folder = write(tmp_path / "rows", rows, validation=11)
    assert pq.ParquetFile(tmp_path / "rows" / "train.parquet").num_row_groups > 10
    for row in reversed(rows):
        assert same(folder.get(row.key), row)
        assert row.key in folder
    with pytest.raises(KeyError, match="has no row"):
        folder.get("0" * 32)
    assert "nonsense" not in folder


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=30), max_size=20
    )
)
def test_any_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[tuple[int, bool]]]
) -> None:
    unique = {r.key: r for r in (Row.make([i for i, _ in v], [m for _, m in v]) for v in values)}
    folder = write(tmp_path_factory.mktemp("any") / "rows", list(unique.values()))
    assert [r.key for r in folder.rows()] == list(unique)
    assert all(same(a, b) for a, b in zip(folder.rows(), unique.values(), strict=True))


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a", make_rows(30), 3)
    write(tmp_path / "b", make_rows(30), 3)
    for name in ("manifest.json", "train.parquet", "validation.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_content_hash_ignores_order_but_not_splits(tmp_path: Path) -> None:
    rows = make_rows(10)
    forward = write(tmp_path / "a", rows).manifest["content_hash"]
    assert write(tmp_path / "b", rows[::-1]).manifest["content_hash"] == forward
    assert write(tmp_path / "c", rows, validation=1).manifest["content_hash"] != forward


def test_repeated_and_false_keys_are_refused(tmp_path: Path) -> None:
    row = make_rows(1)[0]
    with pytest.raises(ValueError, match="added before"):
        write(tmp_path / "rows", [row, row])
    with pytest.raises(ValueError, match="does not hash"):
        write(tmp_path / "rows", [Row(row.ids, ~row.mask, row.key)])
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_an_older_folder_as_it_was(tmp_path: Path) -> None:
    rows = make_rows(5)
    write(tmp_path / "rows", rows)
    with pytest.raises(RuntimeError), RowWriter(tmp_path / "rows") as writer:
        writer.add(rows[0])
        raise RuntimeError
    assert len(RowFolder.open(tmp_path / "rows")) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]
    write(tmp_path / "rows", rows[:2])
    assert len(RowFolder.open(tmp_path / "rows")) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_foreign_folders_and_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(UsageError, match="--out"):
            write(tmp_path / name, make_rows(1))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        RowFolder.open(tmp_path / "nothing")
    with pytest.raises(InputError, match="not a row folder"):
        RowFolder.open(tmp_path)
    folder = write(tmp_path / "rows", make_rows(20))
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    (tmp_path / "rows" / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(InputError, match="format 99"):
        RowFolder.open(tmp_path / "rows")
    (tmp_path / "rows" / "manifest.json").write_text(json.dumps(manifest))
    file = tmp_path / "rows" / "train.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(CorruptError, match="bytes"):
        RowFolder.open(tmp_path / "rows")
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0x40
    file.write_bytes(bytes(flipped))
    assert len(folder.check()) == 1


def test_a_changed_row_is_noticed_on_reading(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows", make_rows(3))
    table = pq.read_table(tmp_path / "rows" / "train.parquet")
    swapped = table.set_column(0, table.schema.field("key"), table["key"].take([1, 0, 2]))
    pq.write_table(swapped, tmp_path / "rows" / "train.parquet")
    with pytest.raises(CorruptError, match="does not hash to its key"):
        list(folder.rows())


KILLED_WRITER = """
import sys, os, signal
import numpy as np
from headrace.data.rows import RowWriter
from headrace.types import Row
with RowWriter(sys.argv[1]) as writer:
    writer.add(Row.make([1, 2, 3], [0, 1, 1]))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_nothing_at_the_path_and_its_leftovers_go(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path / "rows")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "rows").exists()
    assert len(list(tmp_path.iterdir())) == 1
    write(tmp_path / "rows", make_rows(2))
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    write(tmp_path / "rows", make_rows(4))
    dead = 2**22 - 3  # beyond any process id in use
    aside = (
        work_folder(tmp_path / "rows")
        .name.replace(f".{os.getpid()}.", f".{dead}.")
        .replace(".tmp", ".aside.tmp")
    )
    (tmp_path / "rows").rename(tmp_path / aside)
    with pytest.raises(RuntimeError), RowWriter(tmp_path / "rows"):
        raise RuntimeError
    assert len(RowFolder.open(tmp_path / "rows")) == 4
