"""Series for charts: follow a growing, rotating log, thin themselves, never fall back in time."""

from __future__ import annotations

import itertools
from pathlib import Path

from headrace.extract.events import EventLog
from headrace.monitor.history import MAX_POINTS, SERIES, History


def progress(log: EventLog, value: int) -> None:
    log.write("progress", **dict.fromkeys(SERIES, value))


def test_it_follows_what_is_appended(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    history = History(log.path)
    for value in range(5):
        progress(log, value)
        history.update()
        history.update()
        assert history.to_json()["tokens_done"] == list(range(value + 1))


def test_a_line_still_being_written_waits(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    progress(log, 1)
    progress(log, 2)
    whole = log.path.read_bytes()
    log.path.write_bytes(whole[:-10])
    history = History(log.path)
    history.update()
    assert history.to_json()["tokens_done"] == [1]
    with open(log.path, "ab") as file:
        file.write(whole[-10:])
    history.update()
    assert history.to_json()["tokens_done"] == [1, 2]


def test_rotation_loses_and_repeats_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", max_bytes=1500, keep=100)
    history = History(log.path)
    for value in range(60):
        progress(log, value)
        if value % 7 == 0:
            history.update()
    history.update()
    assert history.to_json()["tokens_done"] == list(range(60))


def test_long_runs_are_thinned_evenly(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for value in range(5 * MAX_POINTS):
        progress(log, value)
    history = History(log.path)
    history.update()
    values = history.to_json()["tokens_done"]
    steps = {b - a for a, b in itertools.pairwise(values)}
    assert MAX_POINTS / 3 < len(values) <= MAX_POINTS and len(steps) == 1


def test_time_never_falls(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    body = "".join(f'"{name}":1,' for name in SERIES)
    lines = [f'{{{body}"event":"progress","time":{t}}}\n' for t in (100, 110, 50, 60, 130)]
    path.write_text("".join(lines))
    history = History(path)
    history.update()
    assert history.to_json()["t"] == [0, 10, 10, 10, 30]


def test_sessions_and_norms(finished: Path) -> None:
    history = History(finished / "extract" / "events.jsonl")
    history.update()
    course = history.to_json()
    assert course["sessions"] == [0]
    assert all(len(point) == 5 for point in course["norms"]) and course["norms"]


def test_no_log_yet(tmp_path: Path) -> None:
    history = History(tmp_path / "events.jsonl")
    history.update()
    assert history.to_json()["t"] == []
