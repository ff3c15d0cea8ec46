"""``prepare`` end to end: order, splits, limits, accounts, reuse, kills, bad input."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headrace.cli import main
from headrace.config import build
from headrace.data import runs as runs_module
from headrace.data.config import PrepareConfig
from headrace.data.prepare import prepare
from headrace.data.rows import RowFolder
from headrace.errors import HeadraceError, InputError, PreflightError, UsageError
from headrace.testing.conversations import BASE, assistant, user
from headrace.testing.toy import PLAIN, WITH_BOS, ToyTokenizer


def base(number: int | str) -> dict[str, Any]:
    return {"id": f"c{number}", "messages": [user(f"hi {number}"), assistant(f"yes {number}")]}


def write(path: Path, records: list[Any]) -> Path:
    path.write_bytes(
        b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)
    )
    return path


class Desk:
    """A folder, a target that is a config only, and the toy tokenizer."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.said: list[str] = []

    def prepare(
        self, *files: Any, out: str = "rows", template: str = PLAIN, **options: Any
    ) -> dict[str, Any]:
        values = {
            "files": [str(f) for f in files],
            "model": str(self.model),
            "out": self.folder / out,
            **options,
        }
        return prepare(build(PrepareConfig, values, "test"), self.said.append, ToyTokenizer(template))

    def rows(self, out: str = "rows") -> RowFolder:
        return RowFolder.open(self.folder / out)

    def dropped(self, out: str = "rows") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pq.read_table(self.folder / out / "dropped.parquet").to_pylist()
        return found

    def bytes(self, out: str = "rows") -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted((self.folder / out).iterdir())}


@pytest.fixture
def desk(tmp_path: Path, config_only: Path) -> Desk:
    return Desk(tmp_path, config_only)


# --- order, split, limits -----------------------------------------------------------------------------------------


def test_rows_and_account(desk: Desk) -> None:
    file = write(
        desk.folder / "a.jsonl", [base(n) for n in range(200)] + [base(7), {"messages": [user("q")]}]
    )
    result = desk.prepare(file, validation=0.1)
    counts = result["counts"]
    assert counts["records"] == 202 == counts["records_kept"] + 1
    assert counts["rows_made"] == 201 == counts["rows_kept"] + 1
    assert counts["dropped"] == {"duplicate": 1, "no_assistant_turn": 1}
    assert result["rows"] == 200 == len(desk.rows())
    assert result["splits"]["train"]["rows"] + result["splits"]["validation"]["rows"] == 200
    assert 5 < result["splits"]["validation"]["rows"] < 40
    assert result["supervised_share"] == pytest.approx(result["supervised"] / result["tokens"], abs=1e-6)
    assert {(d["reason"], d["line"]) for d in desk.dropped()} == {
        ("duplicate", 201),
        ("no_assistant_turn", 202),
    }
    assert desk.rows().check() == []


def test_base_alone_reports_its_supervised_share(desk: Desk) -> None:
    result = desk.prepare(write(desk.folder / "a.jsonl", [{"messages": BASE}]), validation=0)
    assert result["supervised_share"] == pytest.approx(4 / 15, abs=1e-6)


def test_dp_44_a_limited_subset_holds_both_corpora(desk: Desk) -> None:
    first = write(desk.folder / "a.jsonl", [base(f"a{n}") for n in range(100)])
    second = write(desk.folder / "b.jsonl", [base(f"b{n}") for n in range(100)])
    desk.prepare(first, second, limit=50)
    kept = [row.origin.source[-7] for row in desk.rows().rows()]
    assert len(kept) == 50
    assert 10 <= kept.count("a") <= 40
    assert sum(d["reason"] == "limit" for d in desk.dropped()) == 150


def test_dp_44_the_order_is_the_seeds_alone(desk: Desk) -> None:
    records = [base(n) for n in range(300)]
    keys = {}
    for name, data, seed in (("a", records, 0), ("b", records[::-1], 0), ("c", records, 1)):
        desk.prepare(write(desk.folder / f"{name}.jsonl", data), out=name, seed=seed)
        keys[name] = desk.rows(name).keys("train")
    assert keys["a"] == keys["b"] != sorted(keys["a"])
    assert keys["c"] != keys["a"]


def test_limits_of_sources_are_unbiased_and_counted(desk: Desk) -> None:
    first = write(desk.folder / "a.jsonl", [base(f"a{n}") for n in range(100)])
    second = write(desk.folder / "b.jsonl", [base(f"b{n}") for n in range(100)])
    desk.prepare(f"{first}?limit=20", f"{second}?weight=0.5")
    sources = [(row.origin.source[-7], row.origin.line) for row in desk.rows().rows()]
    lines = [line for name, line in sources if name == "a"]
    assert len(lines) == 20
    assert max(lines) > 50
    assert 30 < len(sources) - 20 < 70


def test_the_split_is_stable_when_data_grows(desk: Desk) -> None:
    records = [base(n) for n in range(150)]
    desk.prepare(write(desk.folder / "a.jsonl", records), validation=0.3)
    held = {r.origin.conversation for r in desk.rows().rows("validation")}
    grown = [base(n) for n in range(1000, 1100)] + records[::-1] + [{**base(0), "id": "copy"}]
    desk.prepare(write(desk.folder / "b.jsonl", grown), out="more", validation=0.3)
    train = {r.origin.conversation for r in desk.rows("more").rows("train")}
    assert held
    assert not held & train


def test_a_copy_under_another_id_never_moves_a_row_into_training(desk: Desk) -> None:
    records = [base(n) for n in range(60)]
    desk.prepare(write(desk.folder / "a.jsonl", records), validation=0.3)
    held = set(desk.rows().keys("validation"))
    copies = [{**r, "id": f"other{n}"} for n, r in enumerate(records)]
    desk.prepare(write(desk.folder / "b.jsonl", copies + records), out="more", validation=0.3)
    assert held <= set(desk.rows("more").keys("validation"))


def test_turns_of_one_conversation_stay_on_one_side(desk: Desk) -> None:
    from headrace.testing.toy import THINKING

    talk = [user("q"), assistant("<think>a</think>b"), user("r"), assistant("<think>c</think>d")]
    records = [{"id": f"c{n}", "messages": [user(str(n)), *talk[1:]]} for n in range(80)]
    result = desk.prepare(write(desk.folder / "a.jsonl", records), template=THINKING, validation=0.3)
    assert (result["rows"], result["counts"]["notes"]["conversations_fanned_out"]) == (160, 80)
    sides = [{r.origin.conversation for r in desk.rows().rows(s)} for s in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 80


# --- failures -----------------------------------------------------------------------------------------------------


def test_dp_36_no_rows_is_a_failure_that_says_why(desk: Desk) -> None:
    file = write(desk.folder / "a.jsonl", [{"foo": n} for n in range(5)] + [{"messages": [user("q")]}])
    with pytest.raises(
        HeadraceError, match=r"unknown_shape 5 records, no_assistant_turn 1 records"
    ) as caught:
        desk.prepare(file, on_bad_row="skip")
    assert caught.value.exit_code == 1
    assert "line 1: unknown_shape" in str(caught.value)
    assert [p.name for p in desk.folder.iterdir()] == ["a.jsonl"]
    assert desk.prepare(file, on_bad_row="skip", allow_empty=True)["rows"] == 0
    with pytest.raises(HeadraceError, match="the input is empty"):
        desk.prepare(write(desk.folder / "empty.jsonl", []), out="other")


def test_a_bad_line_stops_with_file_and_line(desk: Desk) -> None:
    file = write(desk.folder / "a.jsonl", [base(1), b'{"messages": [', base(2)])
    with pytest.raises(InputError, match=r"a\.jsonl line 2: the record is not JSON") as caught:
        desk.prepare(file)
    assert caught.value.exit_code == 2
    assert [p.name for p in desk.folder.iterdir()] == ["a.jsonl"]
    result = desk.prepare(file, on_bad_row="skip")
    assert (result["rows"], result["counts"]["dropped"]) == (2, {"broken_json": 1})
    assert any("skipped 1 bad records: broken_json 1" in line for line in desk.said)


def test_too_many_dropped_is_a_failure(desk: Desk) -> None:
    file = write(desk.folder / "a.jsonl", [base(1), {"messages": [user("q")]}])
    with pytest.raises(HeadraceError, match=r"50\.0% of 2 records were dropped"):
        desk.prepare(file, max_dropped=0.4)
    assert desk.prepare(file, max_dropped=0.5)["rows"] == 1


def test_rows_that_vanish_without_a_reason_stop_everything(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.data.emit import Emitter

    monkeypatch.setattr(Emitter, "_drop", lambda self, table, reason, details=None: None)
    file = write(desk.folder / "a.jsonl", [base(1), base(1), base(2)])
    with pytest.raises(HeadraceError, match="3 rows, 2 kept, 0 dropped"):
        desk.prepare(file)
    assert not (desk.folder / "rows").exists()


def test_nothing_of_the_users_is_replaced(desk: Desk) -> None:
    file = write(desk.folder / "a.jsonl", [base(1)])
    (desk.folder / "rows").mkdir()
    (desk.folder / "rows" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="give another folder"):
        desk.prepare(file)
    assert (desk.folder / "rows" / "notes.txt").read_text() == "mine"


def test_a_second_process_is_kept_away(desk: Desk) -> None:
    import fcntl

    file = write(desk.folder / "a.jsonl", [base(1)])
    (desk.folder / ".rows.work").mkdir()
    with open(desk.folder / ".rows.work" / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PreflightError, match="another process"):
            desk.prepare(file)
    assert desk.prepare(file)["rows"] == 1


# --- reuse --------------------------------------------------------------------------------------------------------


def test_dp_46_equal_inputs_are_reused_and_any_change_rebuilds(desk: Desk) -> None:
    file = write(desk.folder / "a.jsonl", [base(n) for n in range(20)])
    assert not desk.prepare(file)["reused"]
    assert desk.prepare(file)["reused"]
    changed: list[dict[str, Any]] = [
        {"template": PLAIN.replace("{{ m.content }}", "{{ m.content }}!")},
        {"template": WITH_BOS},
        {"max_length": 17},
        {"seed": 1},
        {"content_tokens": "reject"},
        {"date": "2025-01-01"},
        {"last_turn_only": True},
        {"validation": 0.5},
        {"role_aliases": {"x": "user"}},
        {"min_supervised": 2},
        {"evaluation_prompts": [str(write(desk.folder / "e.jsonl", [{"prompt": "zzz"}]))]},
    ]
    for options in changed:
        assert not desk.prepare(file, **options)["reused"], options
        assert desk.prepare(file, **options)["reused"], options
    assert not desk.prepare(f"{file}?weight=0.9")["reused"]
    write(file, [base(n) for n in range(19)] + [base(99)])
    assert not desk.prepare(file)["reused"]
    assert desk.prepare(file, stall_seconds=7)["reused"]


def test_dp_46_other_special_ids_rebuild(desk: Desk) -> None:
    file = write(desk.folder / "a.jsonl", [base(1)])
    desk.prepare(file)
    values = {"files": [str(file)], "model": str(desk.model), "out": desk.folder / "rows"}
    shifted = ToyTokenizer()
    shifted.added_tokens_decoder[9] = shifted.added_tokens_decoder.pop(4)
    assert not prepare(build(PrepareConfig, values, "test"), tokenizer=shifted)["reused"]


def test_a_broken_folder_is_made_anew(desk: Desk) -> None:
    file = write(desk.folder / "a.jsonl", [base(n) for n in range(20)])
    desk.prepare(file)
    before = desk.bytes()
    target = desk.folder / "rows" / "train.parquet"
    target.write_bytes(target.read_bytes()[:-7] + b"garbage")
    assert not desk.prepare(file)["reused"]
    assert desk.bytes() == before


# --- the external shuffle -----------------------------------------------------------------------------------------


def test_many_small_runs_give_the_same_bytes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [base(random.Random(n).randrange(1500)) for n in range(2000)]
    file = write(desk.folder / "a.jsonl", records)
    desk.prepare(file)
    monkeypatch.setattr(runs_module, "RUN_TOKENS", 2000)
    monkeypatch.setattr(runs_module, "WINDOW_TOKENS", 3000)
    monkeypatch.setattr(runs_module, "_GROUP_TOKENS", 300)
    desk.prepare(file, out="small")
    assert desk.bytes("small") == desk.bytes()
    assert [p.name for p in desk.folder.iterdir() if p.name.startswith(".")] == []


class Stop(BaseException):
    """A kill, as far as the code can see."""


def test_a_stopped_run_goes_on_behind_its_last_sealed_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [base(n) for n in range(2000)] + [b"{"]
    file = write(desk.folder / "a.jsonl", records)
    desk.prepare(file, out="whole", on_bad_row="skip")
    monkeypatch.setattr(runs_module, "RUN_TOKENS", 9000)
    from headrace.data.convert import Converter

    real, seen = Converter.__call__, []

    def stopping(self: Converter, chunk: Any) -> Any:
        seen.append(chunk.first)
        if len(seen) == 5:
            raise Stop
        return real(self, chunk)

    monkeypatch.setattr(Converter, "__call__", stopping)
    with pytest.raises(Stop):
        desk.prepare(file, on_bad_row="skip")
    assert not (desk.folder / "rows").exists()
    assert list((desk.folder / ".rows.work").glob("run-*.json"))
    desk.prepare(file, on_bad_row="skip")
    assert seen[5] > 0
    assert desk.bytes() == desk.bytes("whole")
    assert not (desk.folder / ".rows.work").exists()


def test_runs_of_other_inputs_and_broken_runs_are_not_gone_on_from(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "RUN_TOKENS", 9000)
    file = write(desk.folder / "a.jsonl", [base(n) for n in range(2000)])
    work = desk.folder / ".rows.work"
    monkeypatch.setattr(runs_module.Runs, "merged", lambda self: (_ for _ in ()).throw(Stop()))
    with pytest.raises(Stop):
        desk.prepare(file)
    monkeypatch.undo()
    sealed = sorted(work.glob("run-*.parquet"))
    assert len(sealed) > 4
    sealed[2].write_bytes(sealed[2].read_bytes()[:-1])
    desk.prepare(file)
    desk.prepare(file, out="whole")
    assert desk.bytes() == desk.bytes("whole")


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_on_the_real_tokenizer(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [base(n) for n in range(700)]
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps(r).encode() + b"\n" for r in records))
    )
    common = ["prepare", str(tmp_path / "a.jsonl.gz"), "--model", str(smollm2), "--json"]
    assert main([*common, "--out", str(tmp_path / "one")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["rows"], result["reused"]) == (True, 700, False)
    command = [sys.executable, "-m", "headrace", *common, "--out", str(tmp_path / "two"), "--workers", "2"]
    two = subprocess.run(command, capture_output=True, text=True, check=False)
    assert two.returncode == 0, two.stderr
    for name in ("train.parquet", "validation.parquet", "dropped.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert main([*common, "--out", str(tmp_path / "two")]) == 0
    assert json.loads(capsys.readouterr().out)["reused"]


@pytest.mark.slow
def test_what_the_command_says_about_bad_input(
    tmp_path: Path, smollm2: Path, config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "good.jsonl", [base(1)]), write(tmp_path / "bad.jsonl", [base(1), b"{"])
    boss = write(tmp_path / "boss.jsonl", [{"messages": [{"role": "boss", "content": "x"}]}])
    none = write(tmp_path / "none.jsonl", [{"messages": [user("q")]}])
    cases = [
        ([str(tmp_path / "missing.jsonl"), "--model", str(smollm2)], 2, "missing.jsonl does not exist"),
        ([str(bad), "--model", str(smollm2)], 2, "bad.jsonl line 2"),
        (
            [str(boss), "--model", str(smollm2)],
            2,
            "boss.jsonl line 1: the record has role 'boss' in message 1",
        ),
        ([str(none), "--model", str(smollm2)], 1, "no row is left of 1 records"),
        ([str(good), "--model", str(config_only)], 2, "has no usable tokenizer"),
        ([str(good), "--model", str(tmp_path / "nowhere")], 2, "nowhere does not exist"),
        ([str(good), "--model", str(smollm2), "--date", "soon"], 2, "date"),
    ]
    for args, code, message in cases:
        assert main(["prepare", *args, "--out", str(tmp_path / "rows")]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert message in said.err
        assert len(said.err.strip().splitlines()) == 1, said.err
        assert not (tmp_path / "rows").exists()


KILLED = """
import sys
from pathlib import Path
from headrace.data import runs
from headrace.data.config import PrepareConfig
from headrace.data.prepare import prepare
from headrace.testing.toy import ToyTokenizer
runs.RUN_TOKENS = 60_000
file, model, out = sys.argv[1:]
prepare(PrepareConfig(files=[file], model=model, out=Path(out), max_length=0), print, ToyTokenizer())
"""


@pytest.mark.slow
def test_kill_9_and_run_again(tmp_path: Path, config_only: Path) -> None:
    records = [{"id": n, "messages": [user("count"), assistant(f"{n} " * 100)]} for n in range(6000)]
    file = write(tmp_path / "a.jsonl", records)

    def command(out: str) -> list[str]:
        return [sys.executable, "-c", KILLED, str(file), str(config_only), str(tmp_path / out)]

    process = subprocess.Popen(command("rows"), stdout=subprocess.DEVNULL)
    while len(list((tmp_path / ".rows.work").glob("run-*.json"))) < 3 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "rows").exists()
    again = subprocess.run(command("rows"), capture_output=True, text=True, check=True)
    assert "going on behind record" in again.stdout
    subprocess.run(command("whole"), capture_output=True, check=True)
    for name in ("train.parquet", "validation.parquet", "dropped.parquet", "manifest.json"):
        assert (tmp_path / "rows" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / ".rows.work").exists()
