"""Converting: other codecs, other taps, passes joined; resumable; nothing rounded passes for exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError, SpecMismatchError
from headrace.store import Parent, Store, StoreWriter, WriterOptions
from headrace.store.check import check_store
from headrace.store.convert import convert_store, taps_of
from headrace.store.folder import LocalFolder
from headrace.store.info import store_info
from headrace.store.shard import Shard
from headrace.testing.store import make_row, make_spec, make_states, same_bits, shard_files, write_store
from headrace.types import Row

SPEC = make_spec()
ROWS = [make_row(seed, 10 * seed + 1) for seed in range(8)]


def assert_same(path: Path, rows: list[Row], taps: tuple[int | str, ...] = SPEC.taps) -> Store:
    assert check_store(LocalFolder(path)).ok
    store = Store.open(path)
    assert store.spec.taps == taps and set(store) == {row.key for row in rows}
    for row in rows:
        assert same_bits(store[row.key].states, make_states(row, make_spec(taps=taps)))
        assert store[row.key].ids.tolist() == row.ids.tolist()
    return store


@pytest.mark.parametrize(
    ("before", "after"), [("raw", "bf16-planes"), ("bf16-planes", "raw"), ("raw", "raw")]
)
def test_lossless_codecs_change_into_each_other(tmp_path: Path, before: str, after: str) -> None:
    calls: list[tuple[int, int]] = []
    source = Store.open(write_store(tmp_path / "a", ROWS, codec=before))
    result = convert_store(source, tmp_path / "b", codec=after, progress=lambda *p: calls.append(p))
    store = assert_same(tmp_path / "b", ROWS)
    assert (
        store.codec == after
        and result["captures"] == result["written"] == 8
        and result["tokens"] == source.tokens
    )
    assert calls[-1] == (source.tokens, source.tokens)
    assert store.provenance["converted_from"]["codec"] == before
    assert len(shard_files(tmp_path / "b")) == 1, "small shards are gathered"


def test_a_subset_of_taps_in_another_order(tmp_path: Path) -> None:
    source = write_store(tmp_path / "a", ROWS)
    taps = taps_of(Store.open(source), "final, 2")
    convert_store(Store.open(source, taps), tmp_path / "b")
    assert_same(tmp_path / "b", ROWS, ("final", 2))
    with pytest.raises(ConfigError, match=r"no taps \['7'\]; it has \['2', '4', '5', 'final'\]"):
        taps_of(Store.open(source), "2,7")


def test_passes_are_joined(tmp_path: Path) -> None:
    path = write_store(tmp_path / "a", ROWS)
    with StoreWriter(path, make_spec(taps=(1,)), options=WriterOptions(add_taps=True)) as writer:
        for row in ROWS[:5]:
            writer.add(row, make_states(row, writer.spec))
    convert_store(Store.open(path, (1, 2, "final")), tmp_path / "b")
    assert_same(tmp_path / "b", ROWS[:5], (1, 2, "final"))


def test_the_same_codec_copies_chunks_as_they_are(tmp_path: Path) -> None:
    source = Store.open(write_store(tmp_path / "a", ROWS, codec="fp8", captures_a_shard=100))
    convert_store(source, tmp_path / "b")
    one, two = (
        Shard(Store.open(tmp_path / n).folder.open_shard(shard_files(tmp_path / n)[0].name)) for n in "ab"
    )
    for tap in SPEC.taps:
        assert one.tables.checksums[tap].tolist() == two.tables.checksums[tap].tolist()
        assert one.tables.scales[tap].tolist() == two.tables.scales[tap].tolist()
    before, after = (store_info(Store.open(tmp_path / n))["taps"]["4"] for n in "ab")
    assert after["relative_error_mean"] == pytest.approx(before["relative_error_mean"])
    for key in source:
        assert same_bits(Store.open(tmp_path / "b")[key].states, source[key].states)


def test_rounded_states_do_not_pass_for_exact(tmp_path: Path) -> None:
    source = Store.open(write_store(tmp_path / "a", ROWS, codec="fp8"))
    with pytest.raises(ConfigError, match="were rounded; a raw store of them would look exact"):
        convert_store(source, tmp_path / "b", codec="raw")
    assert not (tmp_path / "b").exists()
    convert_store(source, tmp_path / "b", codec="raw", allow_lossy=True)
    copy = Store.open(tmp_path / "b")
    assert copy.provenance["converted_from"]["codec"] == "fp8"
    assert all(same_bits(copy[key].states, source[key].states) for key in source)


def test_final_states_can_be_left_out_but_not_made_up(tmp_path: Path) -> None:
    source = Store.open(write_store(tmp_path / "a", ROWS))
    convert_store(source, tmp_path / "b", final_positions="supervised")
    some = Store.open(tmp_path / "b")
    for row in ROWS:
        kept = some.final_kept(row.key)
        got = some.get(row.key, missing="zero").states
        assert same_bits(got[:3], make_states(row, SPEC)[:3])
        assert same_bits(got[3][kept], make_states(row, SPEC)[3][kept])
    assert check_store(LocalFolder(tmp_path / "b")).ok
    with pytest.raises(ConfigError, match="the rest cannot be made"):
        convert_store(some, tmp_path / "c", final_positions="all")
    convert_store(some, tmp_path / "d", codec="raw")
    again = Store.open(tmp_path / "d")
    assert again.final_positions == "supervised"
    assert all(same_bits(again.get(k, missing="nan").states, some.get(k, missing="nan").states) for k in some)


def test_parents_stay_parents(tmp_path: Path) -> None:
    root = make_row(1, 30)
    child = Row.make([*root.ids, 5, 6], [False] * 30 + [True] * 2)
    with StoreWriter(tmp_path / "a", SPEC, options=WriterOptions(shard_captures=1)) as writer:
        writer.add(root, make_states(root, SPEC))
        writer.add(child, make_states(child, SPEC)[:, 30:], parent=Parent(root.key, 30))
    # the child's shard now sorts before its parent's
    first, second = shard_files(tmp_path / "a")
    first.rename(first.with_name("3" + first.name[1:]))
    (tmp_path / "a" / "index.parquet").unlink()
    source = Store.open(tmp_path / "a")
    for name, codec in (("b", ""), ("c", "raw")):
        convert_store(source, tmp_path / name, codec=codec)
        copy = Store.open(tmp_path / name)
        assert copy.parent(child.key) == (root.key, 30) and copy.parent(root.key) is None
        assert all(same_bits(copy[key].states, source[key].states) for key in source)
        assert check_store(LocalFolder(tmp_path / name)).ok
    assert second.exists()


def test_an_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    source = Store.open(write_store(tmp_path / "a", ROWS))

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_store(source, tmp_path / "b", codec="raw", progress=stop)
    result = convert_store(source, tmp_path / "b", codec="raw")
    assert result["present"] > 0 and result["present"] + result["written"] == 8
    assert_same(tmp_path / "b", ROWS)
    with pytest.raises(SpecMismatchError, match="codec"):
        convert_store(source, tmp_path / "b", codec="bf16-planes")


def test_onto_itself_or_unknown(tmp_path: Path) -> None:
    source = Store.open(write_store(tmp_path / "a", ROWS))
    with pytest.raises(ConfigError, match="onto itself"):
        convert_store(source, tmp_path / "a", codec="raw")
    with pytest.raises(ConfigError, match="no codec named"):
        convert_store(source, tmp_path / "b", codec="zip")


def test_states_of_zeros_that_were_allowed_once_are_converted(tmp_path: Path) -> None:
    row = make_row(1, 4)
    with StoreWriter(tmp_path / "a", SPEC, options=WriterOptions(allow_zeros=True)) as writer:
        writer.add(row, make_states(row, SPEC) * 0)
    convert_store(Store.open(tmp_path / "a"), tmp_path / "b", codec="raw")
    assert not Store.open(tmp_path / "b")[row.key].states.any()
