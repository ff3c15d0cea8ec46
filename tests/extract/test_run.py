"""Whole extractions in this process: what goes in, what comes out, what is refused, what a second run does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cli import main
from headrace.engines.base import Check, EngineInfo
from headrace.engines.fake import FingerprintEngine, FingerprintOptions
from headrace.errors import ConfigError, IncompleteError, InputError, PreflightError, SpecMismatchError
from headrace.extract.config import ExtractConfig
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.extract.run import Outcome, extract, run_extraction
from headrace.store import Store, StoreWriter
from headrace.testing.extraction import compare_store, make_rows, write_rows
from headrace.testing.faults import FaultyEngine
from headrace.types import CaptureSpec, Row

pytestmark = pytest.mark.slow


def quiet(text: str) -> None:
    """Nobody listens."""


class Place:
    """A folder with rows and a model, and the command that extracts them."""

    def __init__(self, folder: Path, model: Path, rows: list[Row]) -> None:
        self.folder = folder
        self.model = model
        self.rows = rows
        self.out = folder / "store"
        self.files = RunFiles(self.out)
        write_rows(folder / "rows", rows)

    def config(self, **changes: Any) -> ExtractConfig:
        values = {"rows": self.folder / "rows", "model": str(self.model), "out": self.out, "engine": "fake"}
        return ExtractConfig(**{**values, "shard_bytes": 200_000, **changes})

    def run(self, **changes: Any) -> dict[str, Any]:
        return extract(self.config(**changes), quiet)

    def run_with(self, engine: FingerprintEngine, **changes: Any) -> Outcome:
        return run_extraction(self.config(**changes), quiet, engine)

    def compare(self, rows: list[Row] | None = None) -> bool:
        return compare_store(self.out, self.rows if rows is None else rows).equal


@pytest.fixture
def place(tmp_path: Path, config_only: Path) -> Place:
    return Place(tmp_path, config_only, make_rows(300))


def test_rows_become_a_store(place: Place) -> None:
    result = place.run()
    tokens = sum(map(len, place.rows))
    assert place.compare()
    assert result["rows"] == result["stored"] == result["captures"] == 300
    assert result["tokens"] == result["tokens_stored"] == tokens
    assert result["bytes_raw"] == tokens * 4 * 16 * 2
    assert result["failed"] == result["skipped"] == result["not_reached"] == 0
    assert json.loads(json.dumps(result)) == result
    store = Store.open(place.out)
    assert len({store.entry(row.key).shard for row in place.rows}) > 1
    assert store.provenance["engine"]["name"] == "fake"


def test_the_records_tell_the_whole_run(place: Place) -> None:
    place.run()
    manifest = json.loads(place.files.manifest.read_text())
    assert manifest["config"]["engine"] == "fake" and manifest["rows"]["rows"] == 300
    assert CaptureSpec.from_dict(manifest["spec"]) == Store.open(place.out).spec
    (session,) = manifest["sessions"]
    assert session["outcome"] == "finished" and session["result"]["stored"] == 300
    events = list(read_events(place.files.events))
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]
    last = [event for event in events if event["event"] == "progress"][-1]
    assert last["rows_done"] == last["rows_total"] == 300 and last["eta_seconds"] == 0
    assert last["bytes_stored"] == Store.open(place.out).bytes_stored
    norms = [event for event in events if event["event"] == "norms"][-1]["taps"]
    assert [tap["tap"] for tap in norms] == [2, 4, 5, "final"]
    assert not place.files.lock.exists()


def test_the_same_command_again_does_nothing(place: Place) -> None:
    place.run()
    before = {path: path.read_bytes() for path in place.out.rglob("*") if path.is_file()}
    result = place.run()
    assert result["skipped_by_reason"] == {"already_stored": 300} and result["stored"] == 0
    assert {path: path.read_bytes() for path in place.out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("slow", "url", "said"),
    [("writer", [], "the limit"), ("writer", ["http://127.0.0.1:1"], "--workers 2"), ("engine", [], "")],
)
def test_it_is_said_when_the_engine_is_not_the_limit(
    place: Place,
    spec: CaptureSpec,
    monkeypatch: pytest.MonkeyPatch,
    slow: str,
    url: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("headrace.extract.progress.ENOUGH_LOOKS", 8)
    monkeypatch.setattr("headrace.extract.watch.NORMS_SECONDS", 0.2)
    add, tokens = StoreWriter.add, sum(map(len, place.rows))

    def slowly(self: StoreWriter, row: Row, states: torch.Tensor) -> bool:
        time.sleep(2 / len(place.rows))
        return add(self, row, states)

    if slow == "writer":
        monkeypatch.setattr(StoreWriter, "add", slowly)
    speed = tokens / 2 if slow == "engine" else 0.0
    engine = FingerprintEngine(spec, FingerprintOptions(tokens_in_flight=1000, tokens_per_second=speed))
    heard: list[str] = []
    config = place.config(tokens_in_flight=1000 + 2 * max(map(len, place.rows)), url=url)
    run_extraction(config, heard.append, engine)
    found = [
        event["message"] for event in read_events(place.files.events) if event["event"] == "client_limit"
    ]
    assert found == [line for line in heard if "captures wait for this process" in line]
    assert len(found) == bool(said)
    if said:
        assert said in found[0] and ("--workers" in found[0]) == bool(url)


def test_float32_states_go_into_a_codec_that_holds_them(place: Place) -> None:
    assert place.run(dtype="float32")["codec"] == "raw"
    assert place.compare()


def test_an_existing_store_keeps_its_codec(place: Place) -> None:
    place.run(limit=20, codec="raw")
    assert place.run()["codec"] == "raw" and place.compare()


def test_two_runs_give_the_same_captures(place: Place) -> None:
    place.run()
    place.run(out=place.folder / "other", seed=7, engine_options={"seed": 3})
    assert place.compare() and compare_store(place.folder / "other", place.rows).equal


def test_a_broken_shard_is_done_again(place: Place) -> None:
    """ST-01: a full-size file with a changed middle, one cut short, one emptied: each is redone, nothing broken is trusted."""
    place.run()
    shards = sorted((place.out / "shards").glob("*.safetensors"))
    assert len(shards) >= 4
    whole = shards[0].read_bytes()
    middle = len(whole) // 2
    shards[0].write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    shards[1].write_bytes(shards[1].read_bytes()[:-1000])
    shards[2].write_bytes(b"")
    result = place.run()
    assert 0 < result["stored"] < 300 and result["stored"] + result["skipped"] == 300
    assert place.compare()


def test_a_row_inserted_at_the_top_costs_one_capture(place: Place) -> None:
    """ST-14: extract 10 rows, insert one at the top, resume: 1 extracted, 10 reused, each with its own row."""
    ten, new = place.rows[:10], place.rows[10]
    write_rows(place.folder / "rows", ten)
    place.run()
    write_rows(place.folder / "rows", [new, *ten])
    result = place.run()
    assert (result["stored"], result["skipped_by_reason"]) == (1, {"already_stored": 10})
    assert place.compare([new, *ten])


def test_rows_that_left_the_folder_stay_in_the_store(place: Place) -> None:
    place.run()
    write_rows(place.folder / "rows", place.rows[100:])
    result = place.run()
    assert result["rows"] == 200 and result["captures"] == 300
    assert place.compare()


def test_limit_only_and_split(place: Place) -> None:
    assert place.run(limit=40)["skipped_by_reason"] == {"beyond_limit": 260}
    assert place.run(limit=40)["stored"] == 0
    key = place.rows[250].key
    assert place.run(only=[key[:12]])["skipped_by_reason"] == {"not_selected": 299}
    assert key in Store.open(place.out)
    assert place.run(split="validation")["rows"] == 30
    with pytest.raises(ConfigError, match="--split test"):
        place.run(split="test")


def test_poison_fails_the_command_and_is_tried_again_by_the_next(place: Place, spec: CaptureSpec) -> None:
    """EX-20: a skipped row must be tried again on resume, not forgotten."""
    poison = {place.rows[n].key for n in (5, 6)}
    outcome = place.run_with(FaultyEngine(spec, lambda key: "nan" if key in poison else ""))
    assert isinstance(outcome.error, IncompleteError)
    assert outcome.result["failed_by_kind"] == {"non_finite": 2} and outcome.result["stored"] == 298
    lines = [json.loads(line) for line in place.files.failures.read_text().splitlines()]
    assert {line["key"] for line in lines} == poison
    assert all(line["tries"] == 3 and "NaN at the final state, position" in line["message"] for line in lines)
    assert all(line["origin"].startswith("made-up.jsonl:") for line in lines)
    assert compare_store(place.out, place.rows).lost == sorted(poison)
    result = place.run()
    assert result["stored"] == 2 and place.compare() and not place.files.failures.exists()


def test_what_cannot_succeed_waits_for_retry_failed(place: Place, spec: CaptureSpec) -> None:
    key = place.rows[8].key
    engine = FaultyEngine(spec, lambda k: "refuse" if k == key else "")
    assert place.run_with(engine).result["failed_by_kind"] == {"too_long": 1}
    with pytest.raises(IncompleteError, match=r"set aside from earlier runs .*--retry-failed"):
        place.run()
    assert len(list(read_events(place.files.events))) and key not in Store.open(place.out)
    assert place.run(retry_failed=True)["stored"] == 1
    assert place.compare()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": "2,3,4,final"}, "taps"),
        ({"dtype": "float16"}, "dtype"),
        ({"codec": "raw"}, "codec"),
        ({"final_positions": "supervised"}, "final"),
    ],
)
def test_a_store_is_never_continued_as_something_else(
    place: Place, changes: dict[str, Any], words: str
) -> None:
    place.run(limit=50)
    before = sorted(place.out.rglob("*.safetensors"))
    with pytest.raises(Exception, match=words) as caught:
        place.run(**changes)
    assert caught.value.exit_code in (1, 2)
    assert sorted(place.out.rglob("*.safetensors")) == before
    assert place.run()["stored"] == 250 and place.compare()


@pytest.mark.parametrize("what", ["name", "version", "settings"])
def test_another_engine_or_version_never_continues_a_store(
    place: Place, spec: CaptureSpec, what: str
) -> None:
    """EX-29: no silent change of back-end inside one store."""
    place.run(limit=50)
    engine = FingerprintEngine(spec, FingerprintOptions())
    change = {"name": "other", "version": "9.9", "settings": {"attention": "another"}}[what]
    engine.info = replace(engine.info, **{what: change})
    with pytest.raises(
        SpecMismatchError, match="another" if what == "settings" else "was begun with engine fake"
    ):
        place.run_with(engine)
    allowed = place.run_with(engine, allow_other_settings=True) if what == "settings" else None
    assert allowed is None or allowed.done()["stored"] == 250


class Doubtful(FingerprintEngine):
    """An engine that fails its own check."""

    def preflight(self) -> list[Check]:
        return [
            Check("plug-in active", True, "0.1.0"),
            Check("prefix cache", False, "on", "restart with it off"),
        ]


def test_a_failed_preflight_refuses_and_leaves_nothing(place: Place, spec: CaptureSpec) -> None:
    engine = Doubtful(spec, FingerprintOptions())
    with pytest.raises(PreflightError, match=r"prefix cache: on\. restart with it off"):
        place.run_with(engine)
    assert not place.out.exists()
    assert place.run_with(engine, skip_preflight=True).done()["stored"] == 300


def test_a_store_that_will_not_fit_is_refused(place: Place) -> None:
    with pytest.raises(PreflightError, match="the store needs about"):
        place.run(min_free=1 << 60)
    assert not place.out.exists()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"rows": Path("nowhere")}, InputError, "nowhere"),
        ({"model": "./nowhere"}, ConfigError, "nowhere"),
        ({"taps": "2,99"}, ConfigError, "99"),
        ({"engine": "telepathy"}, ConfigError, "telepathy"),
        ({"engine_options": {"speed": 3}}, ConfigError, "speed"),
        ({"device": "cpu"}, ConfigError, "--device"),
        ({"url": ["http://localhost:1"]}, ConfigError, "--url"),
        ({"tokens_in_flight": 10}, ConfigError, "--tokens-in-flight 10 is less"),
        ({"only": ["zz"]}, ConfigError, "zz"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    place: Place, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        place.run(**changes)
    assert "\n" not in str(caught.value)
    assert not place.out.exists()


def test_an_out_that_cannot_be_made(place: Place) -> None:
    (place.folder / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        place.run(out=place.folder / "file" / "store")


def test_rows_of_another_vocabulary_are_refused_by_key(place: Place, tmp_path: Path) -> None:
    bad = Row.make([5, 70_000, 6], [False, True, True])
    write_rows(place.folder / "rows", [*place.rows[:5], bad])
    outcome = run_extraction(place.config(), quiet)
    assert isinstance(outcome.error, SpecMismatchError)
    assert f"row {bad.key} has token id 70000" in str(outcome.error) and "0..69999" in str(outcome.error)


def test_the_clock_set_back_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real, began = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() - 5000 * (time.monotonic() - began))
    assert place.run(engine_options={"tokens_per_second": 9000})["stored"] == 300
    assert place.compare()
    elapsed = [e["elapsed"] for e in read_events(place.files.events) if e["event"] == "progress"]
    assert elapsed == sorted(elapsed) and elapsed[-1] < 60


def test_the_command_in_json(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "extract",
        str(place.folder / "rows"),
        "--model",
        str(place.model),
        "--engine",
        "fake",
        "--out",
        str(place.out),
    ]
    assert main([*args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["stored"] == 300
    assert main([*args, "--json", "--taps", "last"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"] and result["error"]["kind"] == "SpecMismatchError"


def test_progress_lines_are_complete_and_plain(place: Place) -> None:
    lines: list[str] = []
    extract(place.config(engine_options={"tokens_per_second": 6000}), lines.append)
    progress = [line for line in lines if "tokens/s" in line and "%" in line]
    assert len(progress) >= 2
    for part in ("/300 captures", "overall", "ETA", "raw →", "in flight", "disk left"):
        assert all(part in line for line in progress)
    assert not any("\r" in line or "\x1b" in line for line in lines)


def test_engine_info_is_recorded(place: Place, spec: CaptureSpec) -> None:
    engine = FingerprintEngine(spec, FingerprintOptions())
    engine.info = EngineInfo(name="fake", version="1", tokens_in_flight=65536, settings={"device": "cpu"})
    place.run_with(engine).done()
    assert Store.open(place.out).provenance["engine"] == {
        "name": "fake",
        "version": "1",
        "settings": {"device": "cpu"},
    }
