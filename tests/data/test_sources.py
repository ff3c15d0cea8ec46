"""Sources: every kind of file, alone and together, cut or broken; memory stays flat."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import readers
from headrace.data.readers import file_kind
from headrace.data.sources import dataset_identity, find_sources, parse_source
from headrace.errors import ConfigError, InputError

RECORDS = [{"id": n, "text": f'line {n}\n{{}}[],"é漢 \\ud83d'} for n in range(600)]


def lines_of(records: list[Any]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def read(*specs: str | Path, start: tuple[int, int] = (0, 0)) -> list[tuple[int, int, Any]]:
    """(source, line, record) of everything."""
    out = []
    for chunk in find_sources([str(s) for s in specs]).chunks(start):
        records = chunk.arrow.to_pylist() if chunk.arrow is not None else [json.loads(t) for t in chunk.texts]
        assert len(records) == len(chunk.lines)
        out += [(chunk.source, line, record) for line, record in zip(chunk.lines, records, strict=True)]
    return out


def write_all(folder: Path) -> list[Path]:
    """The records in every kind of file."""
    plain, array = lines_of(RECORDS), json.dumps(RECORDS, indent=1).encode()
    files = {
        "a.jsonl": plain,
        "b.jsonl.gz": gzip.compress(plain),
        "c.jsonl.zst": zstandard.compress(plain[:5000]) + zstandard.compress(plain[5000:]),
        "d.json": array,
        "e.json.gz": gzip.compress(array),
        "f.json.zst": zstandard.compress(array),
        "g.ndjson": b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n\n"),
        "h.json": plain,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    clean = [{**r, "text": "x"} for r in RECORDS]
    pq.write_table(pa.Table.from_pylist(clean), folder / "i.parquet", row_group_size=100)
    return sorted(p for p in folder.iterdir())


def test_every_kind_of_file_gives_the_same_records(tmp_path: Path) -> None:
    for file in write_all(tmp_path):
        found = read(file)
        assert [r["id"] for _, _, r in found] == list(range(600)), file
        if file.suffix != ".parquet":
            assert [r for _, _, r in found] == RECORDS, file
    assert [line for _, line, _ in read(tmp_path / "a.jsonl")] == list(range(1, 601))
    assert [line for _, line, _ in read(tmp_path / "g.ndjson")] == list(range(1, 1200, 2))
    assert [line for _, line, _ in read(tmp_path / "d.json")][:2] == [2, 6]


def test_a_folder_is_all_of_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_bytes(lines_of([{"n": 2}]))
    (tmp_path / "a.jsonl").write_bytes(lines_of([{"n": 1}]))
    (tmp_path / "sub" / "c.json").write_bytes(b'[{"n": 3}]')
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".hidden.jsonl").write_text("x")
    assert [r["n"] for _, _, r in read(tmp_path)] == [1, 2, 3]
    assert [Path(name).name for name in find_sources([str(tmp_path)]).ignored] == ["README.md"]


def test_going_on_in_the_middle_gives_the_rest(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    everything = read(*files)
    for start in ((0, 0), (0, 1), (0, 256), (0, 300), (2, 599), (8, 100), (8, 600), (9, 0)):
        expected = [(s, n, r) for s, n, r in everything if (s, r["id"]) >= start]
        assert read(*files, start=start) == expected
    limited = [f"{files[0]}?head=300", str(files[1])]
    assert len(read(*limited, start=(0, 290))) == 10 + 600


def test_head_holds_for_a_whole_folder(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of([{"n": name}] * 300))
    (tmp_path / "z").mkdir()
    other = tmp_path / "z.jsonl"
    found = read(f"{tmp_path}?head=500")
    assert [r["n"] for _, _, r in found] == ["a"] * 300 + ["b"] * 200
    assert not other.exists()


def test_options_behind_a_source() -> None:
    group = parse_source("data.jsonl?weight=0.25&limit=100&head=7")
    assert (group.path, group.weight, group.limit, group.head) == ("data.jsonl", 0.25, 100, 7)
    assert dict(parse_source("hf://a/b?split=test&name=n&weight=1").options) == {"split": "test", "name": "n"}
    for wrong in ("weight=2", "weight=0", "weight=x", "limit=-1", "head=1.5", "colour=red", "split=train"):
        with pytest.raises(ConfigError, match=r"source data\.jsonl"):
            parse_source(f"data.jsonl?{wrong}")


def test_a_file_whose_name_has_a_question_mark_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "what?.jsonl"
    file.write_bytes(lines_of([{"n": 1}]))
    assert len(read(file)) == 1


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", gzip.compress(lines_of(RECORDS), mtime=0)[:-200], "cut or corrupt after line"),
        ("a.jsonl.gz", b"not gzip at all", "cut or corrupt after line 0"),
        ("a.jsonl.zst", zstandard.compress(lines_of(RECORDS))[:-20], "cut or corrupt after line"),
        ("a.jsonl.zst", b"not zstd at all", "cut or corrupt after line 0"),
        ("a.json", b'[{"n": 1}, {"n": 2}', "line 1: the array has no"),
        ("a.json", b'[{"n": 1},\n{"n": }]', "line 2: broken JSON"),
        ("a.json", b'[{"n": 1}] tail', "more text after the array"),
        ("a.json", b'[{"n": "\xff"}]', "not UTF-8"),
        ("a.json", b'{"n": 1}\n{"n"', "line 2: broken JSON"),
        ("a.parquet", b"PAR1 not parquet", "not a sound Parquet file"),
        ("a.parquet", b"", "not a sound Parquet file"),
    ],
    # The names of tests, without the bytes: processes that share out the tests must agree on them.
    ids=lambda value: value if isinstance(value, str) else "bytes",
)
def test_broken_files_are_named_with_the_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)


def test_what_is_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    cases = {
        "nothing.jsonl": "does not exist",
        "a.csv": "no known kind",
        "empty": "holds no",
        "saved": "write hf://",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            find_sources([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "lines"),
        ("A.JSONL.GZ", "lines"),
        ("a.json.zst", "json"),
        ("a.parquet", "parquet"),
        ("a.txt", None),
        ("gz", None),
    ],
)
def test_kinds_are_told_by_name(name: str, kind: str | None) -> None:
    assert file_kind(Path(name)) == kind


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=6),
            lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=3), c, max_size=3),
        )
    ),
    st.integers(2, 40),
    st.sampled_from([None, 1]),
)
def test_json_arrays_come_apart_at_any_block_size(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], block: int, indent: int | None
) -> None:
    file = tmp_path_factory.mktemp("json") / "a.json"
    file.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
    before = readers._BLOCK
    readers._BLOCK = block
    try:
        assert [r for _, _, r in read(file)] == values
    finally:
        readers._BLOCK = before


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for name, copies in (("small", 20), ("large", 200)):
        text = "x" * 4000
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of([{"text": text}] * 20 * copies))
        (tmp_path / f"{name}.json").write_text(json.dumps([{"text": text}] * 20 * copies))
        for suffix in ("jsonl", "json"):
            tracemalloc.start()
            count = sum(len(chunk) for chunk in find_sources([str(tmp_path / f"{name}.{suffix}")]).chunks())
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert count == 20 * copies
    assert max(peaks[2:]) < 1.5 * max(peaks[:2]) + (1 << 20)


@pytest.mark.slow
def test_datasets_saved_and_loose(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"text": f"t{n}"} for n in range(300)])
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": data, "test": data.select(range(5))}).save_to_disk(str(tmp_path / "dict"))
    (tmp_path / "loose").mkdir()
    data.to_parquet(str(tmp_path / "loose" / "train.parquet"))
    for spec, count in (
        ("saved", 300),
        ("saved?head=290", 290),
        ("dict?split=test", 5),
        ("loose?split=train", 300),
    ):
        found = read(f"hf://{tmp_path}/{spec}")
        assert [r["text"] for _, _, r in found] == [f"t{n}" for n in range(count)]
        assert [line for _, line, _ in found] == list(range(1, count + 1))
    with pytest.raises(InputError, match=r"has splits \['test', 'train'\]"):
        read(f"hf://{tmp_path}/dict")
    with pytest.raises(InputError, match="cannot be opened"):
        read(f"hf://{tmp_path}/missing?split=train")


@pytest.mark.slow
def test_a_changed_dataset_has_another_identity(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    seen = set()
    for number in range(2):
        datasets.Dataset.from_list([{"text": f"t{number}"}]).save_to_disk(str(tmp_path / f"saved{number}"))
        group = parse_source(f"hf://{tmp_path}/saved{number}")
        assert dataset_identity(group) == dataset_identity(group) != ""
        seen.add(dataset_identity(group))
        (tmp_path / "loose").mkdir(exist_ok=True)
        datasets.Dataset.from_list([{"text": f"t{number}" * (number + 1)}]).to_json(
            str(tmp_path / "loose" / "train.jsonl")
        )
        loose = parse_source(f"hf://{tmp_path}/loose?split=train")
        assert dataset_identity(loose) != ""
        seen.add(dataset_identity(loose))
    assert len(seen) == 4
