"""Extraction with its rows, its store or both in a bucket; and that no credential is left anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("moto")
import obstore

from headrace.cli import main
from headrace.data.mirror import check_mirror, mirror_rows
from headrace.data.rows import RowFolder
from headrace.errors import InputError, StoreError, UsageError
from headrace.extract.config import ExtractConfig
from headrace.extract.run import extract
from headrace.remote import open_bucket
from headrace.store import Store
from headrace.testing.extraction import compare_store, make_rows, write_rows
from headrace.testing.s3 import KEY, SECRET, S3Server

pytestmark = pytest.mark.slow

ROWS = make_rows(120)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


def objects(url: str) -> dict[str, bytes]:
    bucket = open_bucket(url)
    paths = [entry["path"] for page in obstore.list(bucket) for entry in page]
    return {path: bytes(obstore.get(bucket, path).bytes()) for path in paths}


def test_rows_and_store_in_a_bucket(
    server: S3Server,
    config_only: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole way by the command line; then every byte that was written or said is searched for the credentials."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    rows, store = server.url("rows"), server.url("store")
    write_rows(tmp_path / "rows", ROWS)
    mirror_rows(tmp_path / "rows", rows)
    args = ["extract", rows, "--model", str(config_only), "--engine", "fake", "--out", str(tmp_path / "run")]
    args += ["--store", store, "--shard-bytes", "100000"]
    assert main([*args, "--limit", "50"]) == 0
    assert len(Store.open(store)) == 50
    assert main(args) == 0
    assert compare_store(store, ROWS).equal
    assert not (tmp_path / "run" / "shards").exists() and not (tmp_path / "run" / "dataset.json").exists()
    for command in (["check", store], ["info", store], ["repair", store], ["status", str(tmp_path / "run")]):
        assert main(command) == 0
    assert main(args) == 0  # everything is there already
    said = capsys.readouterr()
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    written += [*objects(rows).values(), *objects(store).values(), said.out.encode(), said.err.encode()]
    assert len(written) > 10
    for secret in (KEY, SECRET):
        assert not any(secret.encode() in data for data in written)


def test_an_outage_stops_the_run_and_the_same_command_goes_on(
    server: S3Server, config_only: Path, tmp_path: Path
) -> None:
    """The gate shuts in the middle and opens again: nothing is lost, nothing is there twice."""
    write_rows(tmp_path / "rows", ROWS)
    config = ExtractConfig(
        rows=str(tmp_path / "rows"),
        model=str(config_only),
        out=tmp_path / "run",
        store=server.url("outage"),
        engine="fake",
        shard_bytes=50_000,
    )
    server.gate.shut_after = 150_000
    thread = server.gate.reopen_soon(0.3)
    result = extract(config, lambda _: None)
    thread.join()
    assert result["stored"] == len(ROWS) and result["store"] == server.url("outage")
    assert compare_store(server.url("outage"), ROWS).equal


def test_rows_are_fetched_once_and_again_when_they_change(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    url = server.url("changing")
    with pytest.raises(InputError, match="no row folder at"):
        RowFolder.open(url)
    write_rows(tmp_path / "a", ROWS)
    assert mirror_rows(tmp_path / "a", url) > 0 and mirror_rows(tmp_path / "a", url) == 0
    first = RowFolder.open(url)
    assert first.keys() == RowFolder.open(tmp_path / "a").keys() and not first.check()
    before = server.gate.down
    assert RowFolder.open(url + "/").path == first.path
    assert server.gate.down - before < 5_000, "only the list of objects travels"
    write_rows(tmp_path / "b", ROWS[:40])
    mirror_rows(tmp_path / "b", url)
    assert len(RowFolder.open(url)) == 40 and len(RowFolder.open(url).keys()) == 40
    assert len(first.keys()) == len(ROWS), "whoever has it open keeps it"


def test_a_mirror_replaces_nothing_else(server: S3Server, tmp_path: Path) -> None:
    obstore.put(open_bucket(server.url("photos")), "holiday.jpg", b"jpg")
    with pytest.raises(UsageError, match="something else"):
        check_mirror(server.url("photos"))
    with pytest.raises(UsageError, match="is a path"):
        check_mirror(str(tmp_path))
    check_mirror(server.url("nothing-yet"))
    with pytest.raises(StoreError, match="no such bucket"):
        check_mirror("s3://no-bucket-of-that-name/rows")
