"""Two writers in two processes and a reader beside them, with no lock between."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.store import Store
from headrace.store.check import check_store
from headrace.store.dataset import Dataset, create_dataset, read_dataset
from headrace.store.folder import LocalFolder
from headrace.testing.store import make_row, make_spec, make_states, same_bits, shard_files, write_store

SPEC = make_spec()
WRITER = """
import sys
from headrace.store import StoreWriter, WriterOptions
from headrace.testing.store import make_row, make_spec, make_states
path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
spec = make_spec()
sys.stdin.readline()  # both start at the same moment
with StoreWriter(path, spec, options=WriterOptions(shard_captures=4)) as writer:
    for seed in range(first, last):
        row = make_row(seed, 60)
        writer.add(row, make_states(row, spec))
"""


@pytest.mark.slow
def test_two_writers_and_a_reader_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    parts = ((0, 60), (60, 120))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(first), str(last)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for first, last in parts
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    seen: set[str] = set()
    rows = {row.key: row for row in (make_row(seed, 60) for seed in range(120))}
    while any(writer.poll() is None for writer in writers):
        time.sleep(0.02)
        if not (path / "dataset.json").exists():
            continue
        store = Store.open(path)
        assert seen <= set(store), "a capture that was there is gone"
        for key in set(store) - seen:
            assert same_bits(store[key].states, make_states(rows[key], SPEC))
        seen = set(store)
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    assert set(Store.open(path)) == set(rows)
    assert check_store(LocalFolder(path)).ok
    # whichever index was written last, the store is whole and a new index holds all of it
    write_store(path, [make_row(500, 5)])
    (path / "shards").rename(path / "away")
    (path / "shards").mkdir()
    for file in (path / "away").iterdir():
        (path / "shards" / file.name).write_bytes(b"not opened")
    assert len(Store.open(path)) == 121


def test_the_first_dataset_json_wins(tmp_path: Path) -> None:
    first = Dataset(spec=SPEC, codec="raw")
    create_dataset(tmp_path / "s", first)
    create_dataset(tmp_path / "s", Dataset(spec=make_spec(config_hash="f" * 16), codec="fp8"))
    assert read_dataset(LocalFolder(tmp_path / "s")) == first
    assert [p.name for p in (tmp_path / "s").iterdir() if p.name != "shards"] == ["dataset.json"]


def test_a_reader_keeps_its_shards_while_they_are_repaired_away(tmp_path: Path) -> None:
    rows = [make_row(seed, 20) for seed in range(3)]
    path = write_store(tmp_path / "s", rows)
    store = Store.open(path)
    assert same_bits(store[rows[0].key].states, make_states(rows[0], SPEC))
    shard_files(path)[0].unlink()
    assert same_bits(store[rows[1].key].states, make_states(rows[1], SPEC))
