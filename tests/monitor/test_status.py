"""Status from the records alone: running, finished, failed, crashed; from another process; in a shell."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.errors import InputError
from headrace.extract.files import RunFiles
from headrace.monitor.health import norm_warnings
from headrace.monitor.status import read_status

from .conftest import POISON, ROWS, TOKENS

pytestmark = pytest.mark.slow


def test_a_finished_run(finished: Path) -> None:
    status = read_status(finished)
    assert status.state == "finished" and status.error == "" and status.failures == []
    assert status.progress is not None
    assert status.progress["tokens_done"] == status.progress["tokens_total"] == TOKENS
    assert status.result is not None and status.result["stored"] == len(ROWS)
    assert [tap["tap"] for tap in status.norms] == [2, 4, 5, "final"]
    json.dumps(status.to_json())


def test_a_failed_run_names_its_rows(failed: Path) -> None:
    status = read_status(failed)
    assert status.state == "failed" and "5 of 1200 rows failed" in status.error
    assert {row["key"] for row in status.failures} == POISON
    assert status.failures_total == 5
    assert "set_aside" in {event["event"] for event in status.events}


def test_a_running_run_and_its_crash(running: tuple[Path, ForkProcess]) -> None:
    store, process = running
    first = read_status(store)
    assert first.state == "running" and first.age_seconds is not None and first.age_seconds < 20
    deadline = time.monotonic() + 30
    while True:  # figures move while another process looks
        later = read_status(store)
        if (
            later.progress
            and first.progress
            and later.progress["tokens_done"] > first.progress["tokens_done"]
        ):
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert read_status(store).state == "crashed"


def test_a_paused_run_says_so(running: tuple[Path, ForkProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = running
    events = RunFiles(store).events
    last = {**(read_status(store).progress or {}), "paused": "disk full"}
    with open(events, "a") as file:
        file.write(json.dumps(last) + "\n")
    assert read_status(store).state == "paused"


@pytest.mark.parametrize("where", [".", "extract"])
def test_any_path_of_the_run_will_do(finished: Path, where: str, tmp_path: Path) -> None:
    assert read_status(finished / where).run == str(finished)
    (tmp_path / "store").symlink_to(finished)
    assert read_status(tmp_path).state == "finished"


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="holds no extraction"):
        read_status(tmp_path)
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no extraction" in capsys.readouterr().err


def test_the_command(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(failed)]) == 0
    text = capsys.readouterr().out
    for words in (
        "failed, session 1",
        "1,195/1,200 captures",
        "set aside 5",
        "non_finite",
        "Norms",
        "ended with: 5 of 1200",
    ):
        assert words in text, words
    assert (
        main(["status", str(failed), "--watch", "--json"]) == 0
    )  # a run that is over is not watched for ever
    assert json.loads(capsys.readouterr().out)["state"] == "failed"


def norms(**changes: dict[str, float]) -> list[dict[str, object]]:
    """Norms of a healthy model, with changes to some taps."""
    taps = []
    for tap, scale in (("2", 80.0), ("15", 160.0), ("27", 530.0), ("final", 51.0)):
        figures = {
            "low": 0.8,
            "quartile": 0.9,
            "median": 1.0,
            "third_quartile": 1.1,
            "high": 2.0,
            "largest": 40.0,
            "mean": 1.02,
            "recent_median": 1.0,
        }
        values = {name: figure * scale * (1 + 1e-3 * len(taps)) for name, figure in figures.items()}
        values |= changes.get(f"tap{tap}", {})
        taps.append({"tap": tap if tap == "final" else int(tap), "states": 10_000, **values})
    return taps  # type: ignore[return-value]


def test_health_is_silent_on_a_healthy_model() -> None:
    assert norm_warnings(norms()) == []  # type: ignore[arg-type]
    assert norm_warnings([]) == []


def test_health_names_what_is_wrong() -> None:
    twice = norms()
    twice[1] = {**twice[0], "tap": 15}
    (text,) = norm_warnings(twice)  # type: ignore[arg-type]
    assert text.startswith("boundary 2 and boundary 15 have equal norms")
    (text,) = norm_warnings(norms(tap15={"recent_median": 20.0}))  # type: ignore[arg-type]
    assert text.startswith("boundary 15 has moved")
    (text,) = norm_warnings(norms(tapfinal={"low": 51.0, "high": 51.0, "largest": 51.0}))  # type: ignore[arg-type]
    assert text.startswith("the final state has the same norm everywhere")
    (text,) = norm_warnings(norms(tap27={"median": 20.0, "recent_median": 20.0}))  # type: ignore[arg-type]
    assert "boundary 27" in text and "after a norm" in text


def test_a_layer_captured_twice_is_seen_in_a_real_run(finished: Path, tmp_path: Path) -> None:
    """The fingerprints of two taps differ in one small value; their norms must not be called equal."""
    assert not any("equal norms" in text for text in read_status(finished).warnings)
