"""Stores in a bucket, over the real S3 protocol: what is written is what a folder would hold, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("moto")
import obstore

from headrace.errors import GoneError, InputError, PreflightError, SpecMismatchError, StoreError
from headrace.remote import open_bucket, reason, tidy, told
from headrace.store import Store, StoreWriter, WriterOptions
from headrace.store.bucket import HEAD_BYTES, RemoteFolder
from headrace.store.check import check_store
from headrace.store.convert import convert_store
from headrace.store.dataset import Dataset, create_dataset, read_dataset
from headrace.store.folder import Folder
from headrace.store.repair import repair_store
from headrace.testing.s3 import KEY, SECRET, S3Server
from headrace.testing.store import StoreTests, make_row, make_spec, make_states, same_bits, write_store
from headrace.types import Row

pytestmark = pytest.mark.slow

SPEC = make_spec()
ROWS = [make_row(seed, 30 + 7 * seed) for seed in range(12)]
SHORT = {
    "max_retries": 3,
    "backoff": {
        "init_backoff": timedelta(milliseconds=20),
        "max_backoff": timedelta(milliseconds=50),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=5),
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def url(server: S3Server, request: pytest.FixtureRequest) -> str:
    """A place in the bucket for this test alone."""
    if not server.gate.is_open:
        server.gate.open()
    return server.url(request.node.name.replace("[", "-").rstrip("]"))


def fill(place: Any, rows: list[Row] = ROWS, **options: Any) -> StoreWriter:
    with StoreWriter(place, SPEC, options=WriterOptions(**{"shard_captures": 3, **options})) as writer:
        for row in rows:
            writer.add(row, make_states(row, SPEC))
    return writer


def assert_same(place: str, rows: list[Row] = ROWS) -> None:
    """The store at ``place`` holds exactly ``rows``, and every check passes."""
    assert check_store(RemoteFolder(place)).ok
    store = Store.open(place)
    assert set(store) == {row.key for row in rows}
    for row in rows:
        capture = store[row.key]
        assert np.array_equal(capture.ids, row.ids)
        assert same_bits(capture.states, make_states(row, SPEC))


def objects(place: str, under: str = "shards") -> dict[str, bytes]:
    bucket = open_bucket(place)
    paths = [entry["path"] for page in obstore.list(bucket, prefix=under) for entry in page]
    return {path: bytes(obstore.get(bucket, path).bytes()) for path in sorted(paths)}


class TestS3(StoreTests):
    """What holds for every folder."""

    @pytest.fixture(autouse=True)
    def _place(self, url: str) -> None:
        self.url = url

    def folder(self, path: Path) -> Folder:
        bucket = open_bucket(self.url)
        gone = [entry["path"] for page in obstore.list(bucket) for entry in page]
        if gone:
            obstore.delete(bucket, gone)
        for file in path.rglob("*"):
            if file.is_file():
                obstore.put(bucket, file.relative_to(path).as_posix(), file.read_bytes())
        return RemoteFolder(self.url)


# --- writing ------------------------------------------------------------------------------------------------------------


def test_a_store_in_a_bucket_is_the_one_in_a_folder(url: str, tmp_path: Path) -> None:
    fill(url)
    local = write_store(tmp_path / "s", ROWS)
    theirs = [file.read_bytes() for file in sorted((local / "shards").glob("*.safetensors"))]
    assert list(objects(url).values()) == theirs
    assert {"dataset.json", "index.parquet"} < set(objects(url, ""))
    assert_same(url)
    # and again: nothing is stored twice
    assert len(fill(url).done) == len(ROWS) and len(objects(url)) == 4


def test_a_large_shard_goes_up_in_parts(url: str, server: S3Server) -> None:
    rows = [make_row(seed, 30_000) for seed in range(6)]  # 23 MB of raw states
    with StoreWriter(url, SPEC, codec="raw") as writer:
        for row in rows:
            writer.add(row, make_states(row, SPEC))
    (shard,) = objects(url).values()
    assert len(shard) > 20 << 20
    assert_same(url, rows)
    assert server.uploads() == 0


def test_taps_are_added_and_stores_converted(url: str, tmp_path: Path) -> None:
    fill(url)
    more = make_spec(taps=(6, 7))
    with pytest.raises(SpecMismatchError, match="taps"):
        StoreWriter(url, more)
    with StoreWriter(url, more, options=WriterOptions(add_taps=True)) as writer:
        for row in ROWS:
            writer.add(row, make_states(row, more))
    both = Store.open(url, (2, 7))
    assert len(both) == len(ROWS)
    convert_store(Store.open(url, (2, 6)), f"{url}-out", codec="raw")
    out = Store.open(f"{url}-out")
    for row in ROWS:
        assert same_bits(out[row.key].states, make_states(row, make_spec(taps=(2, 6))))
    with pytest.raises(ValueError, match="onto itself"):
        convert_store(Store.open(url), url + "/")


def test_the_first_dataset_json_wins(url: str) -> None:
    first = Dataset(spec=SPEC, codec="raw")
    create_dataset(url, first)
    create_dataset(url, Dataset(spec=make_spec(config_hash="f" * 16), codec="fp8"))
    assert read_dataset(RemoteFolder(url)) == first


WRITER = """
import os, signal, sys
from headrace.store import StoreWriter, WriterOptions
from headrace.testing.store import make_row, make_spec, make_states
place, first, last, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "kill"
spec = make_spec()
writer = StoreWriter(place, spec, options=WriterOptions(shard_captures=3))
for seed in range(first, last):
    row = make_row(seed, 30 + 7 * seed)
    writer.add(row, make_states(row, spec))
print(len(writer.done), flush=True)
if kill:
    os.kill(os.getpid(), signal.SIGKILL)
writer.close()
"""


def run_writer(place: str, first: int, last: int, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, place, str(first), str(last), end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_writers_at_once_and_one_that_is_killed(url: str) -> None:
    killed = run_writer(url, 0, 5, "kill")
    done, errors = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, errors
    assert len(Store.open(url)) >= int(done)
    writers = [run_writer(url, 0, 8, "close"), run_writer(url, 8, 12, "close")]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
    assert_same(url)


# --- faults of the server -------------------------------------------------------------------------------------------------


def test_a_short_outage_is_ridden_out(url: str, server: S3Server) -> None:
    """Connections are cut in the middle of a shard, and refused for a while."""
    folder = RemoteFolder(url)  # obstore's own patience
    rows = [make_row(seed, 30_000) for seed in range(4)]
    writer = StoreWriter(folder, SPEC, codec="raw")
    server.gate.shut_after = 9 << 20
    mender = server.gate.reopen_soon(0.5)
    with writer:
        for row in rows:
            writer.add(row, make_states(row, SPEC))
    mender.join()
    assert_same(url, rows)


def test_a_long_outage_ends_the_writer_and_costs_only_what_was_not_sealed(url: str, server: S3Server) -> None:
    writer = StoreWriter(RemoteFolder(url, retry=SHORT), SPEC, options=WriterOptions(shard_captures=3))
    for row in ROWS[:6]:
        writer.add(row, make_states(row, SPEC))
    writer.seal()
    server.gate.shut()
    for row in ROWS[6:]:
        writer.add(row, make_states(row, SPEC))
    with pytest.raises(
        StoreError, match=rf"cannot write {url}/shards/\S+\.safetensors: .*run again"
    ) as caught:
        writer.seal()
    assert SECRET not in str(caught.value) and KEY not in str(caught.value)
    with pytest.raises(StoreError, match="cannot write"):  # it stays failed
        writer.add(ROWS[0], make_states(ROWS[0], SPEC))
    writer.close()
    server.gate.open()
    assert_same(url, ROWS[:6])
    fill(url)
    assert_same(url)


def test_a_cut_upload_leaves_nothing(url: str, server: S3Server) -> None:
    rows = [make_row(seed, 30_000) for seed in range(6)]
    writer = StoreWriter(RemoteFolder(url, retry=SHORT), SPEC, codec="raw")
    for row in rows:
        writer.add(row, make_states(row, SPEC))
    server.gate.shut_after = 12 << 20
    with pytest.raises(StoreError, match="cannot write"):
        writer.close()
    server.gate.open()
    assert objects(url) == {} and len(Store.open(url)) == 0
    with StoreWriter(url, SPEC) as again:
        for row in rows:
            again.add(row, make_states(row, SPEC))
    assert_same(url, rows)


def test_the_server_is_killed_in_the_middle_of_a_write(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL to the real process. This one forgets everything, so the run that follows writes everything again."""
    with S3Server("other") as mortal:
        monkeypatch.setenv("AWS_ENDPOINT_URL", mortal.environment()["AWS_ENDPOINT_URL"])
        url = mortal.url("run")
        writer = StoreWriter(RemoteFolder(url, retry=SHORT), SPEC, options=WriterOptions(shard_captures=3))
        with pytest.raises(StoreError, match=f"cannot write {url}/shards/"):
            for number, row in enumerate(ROWS):
                if number == 5:
                    mortal.kill()
                writer.add(row, make_states(row, SPEC))
            writer.seal()
        writer.close()
        mortal.start()
        fill(url)
        assert_same(url)


def test_a_bucket_that_is_not_there(server: S3Server, url: str) -> None:
    with pytest.raises(StoreError, match="no such bucket"):
        StoreWriter("s3://nowhere-at-all/run", SPEC)
    with pytest.raises(StoreError, match="no such bucket"):
        Store.open("s3://nowhere-at-all/run")
    with pytest.raises(InputError, match="not a Headrace store"):
        Store.open(url)


# --- repair ---------------------------------------------------------------------------------------------------------------


def test_damage_is_set_aside_and_captured_again(url: str) -> None:
    fill(url)
    bucket = open_bucket(url)
    name, data = next(iter(objects(url).items()))
    obstore.put(bucket, name, data[:-1] + bytes([data[-1] ^ 1]))
    assert not check_store(RemoteFolder(url)).ok
    report = repair_store(url)
    assert len(report.dropped) == 1 and report.moved == [name.split("/")[-1]] and len(report.written) == 1
    assert list(objects(url, "broken")) == [f"broken/{report.moved[0]}"]
    assert check_store(RemoteFolder(url)).ok and len(Store.open(url)) == len(ROWS) - 1
    fill(url)
    assert_same(url)
    # a writer does the same for itself
    name, data = next(iter(objects(url).items()))
    obstore.put(bucket, name, data[:100])
    assert fill(url).repaired is not None
    assert_same(url)


def test_a_lost_dataset_json_is_made_again(url: str) -> None:
    fill(url)
    obstore.delete(open_bucket(url), ["dataset.json", "index.parquet"])
    with pytest.raises(InputError, match="headrace repair"):
        Store.open(url)
    assert repair_store(url, delete=True).rebuilt == ["dataset.json", "index.parquet"]
    assert_same(url)


def test_a_shard_deleted_under_a_reader(url: str) -> None:
    fill(url)
    store = Store.open(url)
    obstore.delete(open_bucket(url), list(objects(url)))
    with pytest.raises(GoneError, match="open it again"):
        store[ROWS[0].key]


# --- what travels ---------------------------------------------------------------------------------------------------------


def test_only_the_bytes_of_one_tap_travel(url: str, server: S3Server) -> None:
    rows = [make_row(seed, 8_000) for seed in range(8)]
    with StoreWriter(url, SPEC, codec="raw") as writer:
        for row in rows:
            writer.add(row, make_states(row, SPEC))
    store = Store.open(url)
    store.tokens_of(rows[0].key)  # opens the shard: its tables
    before = server.gate.down
    states = store.get(rows[3].key, [4]).states
    travelled = server.gate.down - before
    assert same_bits(states, make_states(rows[3], SPEC)[[1]])
    wanted = 8_000 * 16 * 2
    assert wanted <= travelled < wanted + 2_000, "headers of one answer, and nothing else"
    before = server.gate.down
    Store.open(url).tokens_of(rows[0].key)
    tables = sum(len(row) * 4 + len(row) / 8 + 200 for row in rows)
    assert server.gate.down - before < tables + HEAD_BYTES + 20_000, "opening a store reads tables, no states"


# --- credentials ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hunter2@bucket/run",
        "s3://hunter2@bucket/run",
        "s3://bucket/run?X-Amz-Signature=hunter2",
        "gs://bucket/run#hunter2",
        "abfss://box:hunter2@account.dfs.core.windows.net/run",
        "https://bucket.s3.amazonaws.com/run?X-Amz-Credential=hunter2",
        "az://box/run?sig=hunter2",
    ],
)
def test_urls_with_credentials_are_refused_and_not_repeated(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli import main
    from headrace.store.config import CheckConfig

    for refuse in (tidy, Store.open, lambda u: StoreWriter(u, SPEC), lambda u: CheckConfig(store=u)):
        with pytest.raises(ValueError, match=r"carries|not a place") as caught:
            refuse(url)
        assert "hunter2" not in str(caught.value)
    for command in (
        ["check", url],
        ["info", url],
        ["repair", url],
        ["convert", url, "--out", str(tmp_path / "x")],
    ):
        assert main(command) == 2
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err


def test_places(tmp_path: Path) -> None:
    assert tidy("s3://bucket/run/") == "s3://bucket/run"
    assert (
        tidy("abfss://box@account.dfs.core.windows.net/run") == "abfss://box@account.dfs.core.windows.net/run"
    )
    assert tidy("file:///data/my%20run/") == "/data/my run"
    assert tidy(tmp_path) == str(tmp_path) and tidy("a/b") == "a/b"
    for wrong in ("ftp://host/x", "s3:///run", "file://host/x"):
        with pytest.raises(InputError):
            tidy(wrong)


def test_a_profile_gives_credentials(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through boto3; without keys in the environment and without a profile nothing could be signed here."""
    file = tmp_path / "credentials"
    file.write_text("[mine]\naws_access_key_id = AKIA1\naws_secret_access_key = x\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    fill(url)
    assert_same(url)
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(PreflightError, match="profile nobodys"):
        Store.open(url)


def test_errors_say_nothing_of_what_the_service_repeats() -> None:
    from obstore.exceptions import GenericError, PermissionDeniedError

    body = (
        f"Server returned non-2xx status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{KEY}"
        f"</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign></Error> http://host/x?X-Amz-Signature={SECRET}"
    )
    for error in (PermissionDeniedError(body), GenericError(body)):
        assert reason(error) == "403 Forbidden, SignatureDoesNotMatch"
        with pytest.raises(StoreError, match="s3://b/x") as caught, told("write", "s3://b/x"):
            raise error
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        assert KEY not in str(caught.value) and SECRET not in str(caught.value)
    assert os.environ.get("AWS_SECRET_ACCESS_KEY") != "hunter2"
