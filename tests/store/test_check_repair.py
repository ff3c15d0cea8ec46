"""Check finds every kind of damage; repair drops that and nothing else; the next writer brings it back."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.bits import bits_of
from headrace.errors import CorruptError, InputError, StoreError
from headrace.store import Parent, Store, StoreWriter, WriterOptions
from headrace.store.build import ShardBuilder
from headrace.store.check import check_store
from headrace.store.codecs import open_codec
from headrace.store.encode import encode_capture
from headrace.store.folder import LocalFolder, MappedFile, new_shard_name
from headrace.store.publish import write_shard
from headrace.store.repair import repair_store
from headrace.store.shard import Shard
from headrace.testing.store import (
    flip_bit,
    make_row,
    make_spec,
    make_states,
    same_bits,
    shard_files,
    write_store,
)
from headrace.types import Row

SPEC = make_spec()
ROWS = [make_row(seed, 40) for seed in range(10)]


def kinds(path: Path, **options: object) -> list[str]:
    return [problem.kind for problem in check_store(LocalFolder(path), **options).problems]  # type: ignore[arg-type]


def damage_states(path: Path, slot: int = 1) -> str:
    """Flip a bit in the states of one capture of a shard file; returns its key."""
    shard = Shard(LocalFolder(path.parent.parent).open_shard(path.name))
    chunk = shard.chunks(slot, 5)[0]
    flip_bit(path, shard.prefix.starts[5] + chunk.start + 10)
    return shard.key(slot)


def assert_whole(path: Path, rows: list[Row]) -> None:
    assert check_store(LocalFolder(path)).ok
    store = Store.open(path)
    assert set(store) == {row.key for row in rows}
    assert all(same_bits(store[row.key].states, make_states(row, SPEC)) for row in rows)


def test_a_sound_store(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = write_store(tmp_path / "s", ROWS)
    report = check_store(LocalFolder(path), progress=lambda done, total: calls.append((done, total)))
    assert report.ok and report.captures == 10 and report.tokens == 400 and report.shards == 4
    assert report.bytes_checked == report.bytes_total > 0 and calls[-1] == (
        report.bytes_total,
        report.bytes_total,
    )
    before = {file: file.read_bytes() for file in shard_files(path)}
    repaired = repair_store(path)
    assert not repaired.dropped and not repaired.moved and not repaired.written
    assert {file: file.read_bytes() for file in shard_files(path)} == before


def test_damaged_states_are_found_dropped_and_brought_back(tmp_path: Path) -> None:
    """ST-17: what was copied wrongly differs from its checksum. One flipped bit costs one capture."""
    path = write_store(tmp_path / "s", ROWS)
    key = damage_states(shard_files(path)[1])
    report = check_store(LocalFolder(path))
    assert [(p.kind, p.key, p.slot) for p in report.problems] == [("states", key, 1)]
    with pytest.raises(CorruptError, match=f"states of {key} at tap 5 are damaged"):
        Store.open(path)[key]
    repaired = repair_store(path)
    assert list(repaired.dropped) == [key] and len(repaired.moved) == len(repaired.written) == 1
    assert (path / "broken" / repaired.moved[0]).exists()
    assert_whole(path, [row for row in ROWS if row.key != key])
    write_store(path, ROWS)
    assert_whole(path, ROWS)


@pytest.mark.parametrize("how", ["empty", "cut", "header", "garbage"])
def test_a_broken_file_costs_its_captures_only(tmp_path: Path, how: str) -> None:
    """ST-01: a zero-byte or torn file is not taken for done."""
    path = write_store(tmp_path / "s", ROWS)
    victim = shard_files(path)[0]
    lost = [Shard(LocalFolder(path).open_shard(victim.name)).key(slot) for slot in range(3)]
    data = victim.read_bytes()
    damage = {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "header": b"\x00" * 64 + data[64:],
        "garbage": b"x" * 5000,
    }
    victim.write_bytes(damage[how])
    assert kinds(path) == ["shard"]
    with StoreWriter(path, SPEC) as writer:
        assert writer.repaired is not None and writer.repaired.moved == [victim.name]
        assert set(writer.done) == {row.key for row in ROWS} - set(lost)
        added = [writer.add(row, make_states(row, SPEC)) for row in ROWS]
        assert sum(added) == 3
    assert_whole(path, ROWS)
    shutil.rmtree(path / "broken")
    assert_whole(path, ROWS)


def test_a_zeroed_middle_is_noticed_when_a_run_goes_on(tmp_path: Path) -> None:
    """ST-01: full size, right header, zeros inside: the resumed run redoes it, and the store ends as if nothing had been."""
    path = write_store(tmp_path / "s", ROWS)
    victim = shard_files(path)[2]
    data = bytearray(victim.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 500] = bytes(500)
    victim.write_bytes(data)
    write_store(path, ROWS)
    assert_whole(path, ROWS)
    assert len(list((path / "broken").iterdir())) == 1


def test_a_quick_check_looks_at_structure_and_a_sample(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS, codec="raw")
    report = check_store(LocalFolder(path), sample_bytes=1)
    assert report.ok and 0 < report.bytes_checked < report.bytes_total / 3
    assert report.bytes_checked >= len(shard_files(path)), "each shard is looked at"
    flip_bit(shard_files(path)[0], 70)
    assert kinds(path, sample_bytes=1) == ["shard"]
    # half of the chunks of a store whose every chunk is damaged cannot all look sound
    path = write_store(tmp_path / "t", ROWS, codec="raw")
    for file in shard_files(path):
        size = Shard(LocalFolder(path).open_shard(file.name)).prefix.size
        data = file.read_bytes()
        file.write_bytes(data[:size] + bytes(b ^ 1 for b in data[size:]))
    assert "states" in kinds(path, sample_bytes=10_000)


def test_an_unreadable_disk_block_is_a_problem_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the capture whose bytes cannot be read is lost, not those that would be read in one go with it."""
    path = write_store(tmp_path / "s", ROWS[:3], codec="raw")
    shard = Shard(LocalFolder(path).open_shard(shard_files(path)[0].name))
    tap = shard.spec.taps[0]
    bad = shard.prefix.starts[tap] + shard.chunks(1, tap)[0].start
    read = MappedFile.read

    def fail(self: MappedFile, start: int, stop: int) -> memoryview:
        if 0 < start <= bad < stop:  # header and tables are read from 0 on
            raise OSError(5, "Input/output error")
        return read(self, start, stop)

    monkeypatch.setattr(MappedFile, "read", fail)
    (problem,) = check_store(LocalFolder(path)).problems
    assert (problem.kind, problem.slot) == ("states", 1) and "Input/output error" in problem.message


def test_a_lost_or_damaged_index_is_made_again(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS)
    good = (path / "index.parquet").read_bytes()
    (path / "index.parquet").unlink()
    assert kinds(path) == []
    assert repair_store(path).rebuilt == ["index.parquet"]
    assert (path / "index.parquet").read_bytes() == good
    (path / "index.parquet").write_bytes(good[:-30])
    assert kinds(path) == ["index"]
    repair_store(path)
    assert kinds(path) == [] and (path / "index.parquet").read_bytes() == good


def test_an_index_that_does_not_fit_its_shard(tmp_path: Path) -> None:
    """A shard replaced under its name (a restore from a wrong backup) is noticed by reader and check."""
    path = write_store(tmp_path / "s", ROWS[:3])
    other = write_store(tmp_path / "t", ROWS[3:6])
    shard_files(path)[0].write_bytes(shard_files(other)[0].read_bytes())
    assert kinds(path) == ["index"]
    with pytest.raises(StoreError, match="not the file that the index"):
        Store.open(path)[ROWS[0].key]
    repair_store(path)
    assert_whole(path, ROWS[3:6])


def test_a_lost_dataset_json_is_made_from_the_shards(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS, codec="fp8")
    before = Store.open(path).dataset
    (path / "dataset.json").unlink()
    with pytest.raises(InputError, match="run headrace repair"):
        Store.open(path)
    with pytest.raises(InputError, match="run headrace repair"):
        StoreWriter(path, SPEC)
    assert kinds(path) == ["dataset"]
    assert repair_store(path).rebuilt[0] == "dataset.json"
    after = Store.open(path).dataset
    assert (after.spec, after.codec, after.final_positions) == (
        before.spec,
        before.codec,
        before.final_positions,
    )
    flip_bit(path / "dataset.json", 100)
    assert kinds(path) == ["dataset"]
    repair_store(path)
    assert len(Store.open(path)) == 10 and (path / "broken" / "dataset.json").exists()


def test_nothing_left_to_repair_from(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS[:1])
    (path / "dataset.json").unlink()
    shard_files(path)[0].write_bytes(b"")
    with pytest.raises(CorruptError, match="extract again"):
        repair_store(path)
    with pytest.raises(InputError, match="not a Headrace store"):
        repair_store(tmp_path)


def test_second_copies_are_an_error_and_one_stays(tmp_path: Path) -> None:
    """ST-15: two runs that did not know of each other stored the same rows."""
    path = write_store(tmp_path / "s", ROWS[:5])
    other = write_store(tmp_path / "t", ROWS[3:8])
    for file in shard_files(other):
        (path / "shards" / file.name).write_bytes(file.read_bytes())
    report = check_store(LocalFolder(path))
    assert sorted(p.key for p in report.problems) == sorted(row.key for row in ROWS[3:5])
    assert {p.kind for p in report.problems} == {"duplicate"}
    store = Store.open(path)
    assert len(store) == 8 and same_bits(store[ROWS[4].key].states, make_states(ROWS[4], SPEC))
    repaired = repair_store(path)
    assert repaired.duplicates == 2 and not repaired.dropped
    assert_whole(path, ROWS[:8])


def test_several_passes_are_no_second_copies(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS)
    for taps in ((1, 7), (3,)):
        with StoreWriter(path, make_spec(taps=taps), options=WriterOptions(add_taps=True)) as writer:
            for row in ROWS:
                writer.add(row, make_states(row, writer.spec))
    assert kinds(path) == []
    again = make_spec(taps=(3,))
    with StoreWriter(tmp_path / "t", again) as writer:
        writer.add(ROWS[0], make_states(ROWS[0], again))
    stray = shard_files(tmp_path / "t")[0]
    (path / "shards" / stray.name).write_bytes(stray.read_bytes())
    assert kinds(path) == ["duplicate"], "the third pass is seen although another pass lies between"


def test_children_of_what_was_dropped_are_dropped(tmp_path: Path) -> None:
    root = make_row(1, 30)
    child = Row.make([*root.ids, 5, 6], [False] * 30 + [True] * 2)
    grandchild = Row.make([*child.ids, 7], [False] * 32 + [True])
    path = tmp_path / "s"
    with StoreWriter(path, SPEC, options=WriterOptions(shard_captures=2)) as writer:
        for row in ROWS[:3]:
            writer.add(row, make_states(row, SPEC))
        writer.add(root, make_states(root, SPEC))
        writer.add(child, make_states(child, SPEC)[:, 30:], parent=Parent(root.key, 30))
        writer.add(grandchild, make_states(grandchild, SPEC)[:, 32:], parent=Parent(child.key, 32))
    assert kinds(path) == []
    assert damage_states(shard_files(path)[1]) == root.key
    repaired = repair_store(path)
    assert set(repaired.dropped) == {root.key, child.key, grandchild.key}
    assert "which is not stored" in repaired.dropped[grandchild.key]
    assert_whole(path, ROWS[:3])


def test_a_wrong_writer_is_found_by_the_keys(tmp_path: Path) -> None:
    """A key that is not the hash of its ids: right digests prove the bytes, not the writer."""
    path = write_store(tmp_path / "s", ROWS[:2])
    liar = Row(ROWS[3].ids, ROWS[3].mask, ROWS[4].key)
    miscounted = encode_capture(
        ROWS[5],
        bits_of(make_states(ROWS[5], SPEC)[:, :-1].contiguous()),
        SPEC,
        open_codec("bf16-planes", "bfloat16"),
        chunk_rows=8192,
        policy="all",
    )
    builder = ShardBuilder(SPEC, open_codec("bf16-planes", "bfloat16"), 8192, "all", {})
    builder.append(
        encode_capture(
            liar, bits_of(make_states(ROWS[3], SPEC)), SPEC, builder.codec, chunk_rows=8192, policy="all"
        )
    )
    builder.append(miscounted)
    write_shard(path, new_shard_name(1), builder)
    report = check_store(LocalFolder(path))
    assert [p.kind for p in report.problems] == ["key", "key"]
    assert (
        "not the hash" in report.problems[0].message and "do not fit its mask" in report.problems[1].message
    )
    assert len(repair_store(path).dropped) == 2
    assert_whole(path, ROWS[:2])


def test_delete_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS)
    damage_states(shard_files(path)[0])
    repaired = repair_store(path, delete=True)
    assert len(repaired.moved) == 1 and not list((path / "broken").iterdir())


def test_repair_keeps_norms_and_errors(tmp_path: Path) -> None:
    from headrace.store.info import store_info

    path = write_store(tmp_path / "s", ROWS, codec="fp8", captures_a_shard=100)
    before = store_info(Store.open(path))["taps"]["5"]
    damage_states(shard_files(path)[0])
    repair_store(path)
    after = store_info(Store.open(path))["taps"]["5"]
    assert after["rows"] == 360
    assert after["relative_error_mean"] == pytest.approx(before["relative_error_mean"], rel=1e-6)
    assert after["relative_error_max"] == before["relative_error_max"]
    assert after["norm_mean"] == pytest.approx(before["norm_mean"], rel=0.2)


def test_norms_and_errors_are_what_they_say(tmp_path: Path) -> None:
    from headrace.store.info import store_info

    path = write_store(tmp_path / "s", ROWS[:4], codec="fp8")
    store = Store.open(path)
    info = store_info(store)["taps"]["4"]
    true = torch.cat([make_states(row, SPEC)[1, ::16].double() for row in ROWS[:4]])
    read = torch.cat([store.get(row.key, [4]).states[0, ::16].double() for row in ROWS[:4]])
    norms, errors = true.norm(dim=1), (read - true).norm(dim=1) / true.norm(dim=1)
    assert info["norm_mean"] == pytest.approx(float(norms.mean())) and info["norm_max"] == pytest.approx(
        float(norms.max())
    )
    assert info["norm_min"] == pytest.approx(float(norms.min()))
    assert info["relative_error_mean"] == pytest.approx(float(errors.mean()))
    assert info["relative_error_max"] == pytest.approx(float(errors.max()))
    assert 0.001 < info["relative_error_mean"] < 0.05
    assert np.isclose(store_info(store)["ratio"], store.bytes_stored / store.bytes_raw)
