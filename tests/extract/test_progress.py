"""Progress that can be believed: the ETA against the truth on simulated days, rates, pauses, lines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.extract.admission import in_windows, window_size
from headrace.extract.progress import Meter, Progress, Snapshot
from headrace.extract.view import LineView, duration, progress_line
from headrace.types import Row


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def simulate(
    lengths: np.ndarray,
    seconds_for: Callable[[np.ndarray], float],
    batch_tokens: int,
    noise: float,
    seed: int,
) -> tuple[list[tuple[float, float, float]], float]:
    """A steady run: rows in the pipeline's own order, done batch by batch; returns (share, eta, time) and the end."""
    rng = np.random.default_rng(seed)
    rows = [Row.make([i % 60000] * n, [True] * n) for i, n in enumerate(lengths.tolist())]
    order = [len(r) for r in in_windows(rows, window_size(len(rows)), seed)]
    clock = Clock()
    total = int(lengths.sum())
    progress = Progress(rows=len(order), tokens=total, rows_before=0, tokens_before=0, clock=clock)
    points = []
    clock.now += 20.0  # the first batch has to come through: start-up is no part of the rate
    done, at = 0, 0
    while at < len(order):
        batch = []
        while at < len(order) and (not batch or sum(batch) + order[at] <= batch_tokens):
            batch.append(order[at])
            at += 1
        clock.now += seconds_for(np.array(batch)) * float(np.exp(noise * rng.standard_normal()))
        for tokens in batch:
            progress.admitted(tokens)
            progress.answered(tokens)
            progress.written(tokens, tokens)
        done += sum(batch)
        eta = progress.eta()
        if eta is not None:
            points.append((done / total, eta, clock.now))
    return points, clock.now


def lognormal(count: int, seed: int) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(7.3, 0.9, count), 16, 8192).astype(np.int64)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize("quadratic", [False, True])
def test_eta_within_15_percent_after_2_percent(seed: int, quadratic: bool) -> None:
    """A steady engine with noisy batches, log-normal lengths, and (or not) attention's cost of long rows."""
    lengths = lognormal(6000, seed)

    def seconds_for(batch: np.ndarray) -> float:
        return float((batch / 5000 + (batch / 8192) ** 2 * (0.3 if quadratic else 0.0)).sum())

    points, end = simulate(lengths, seconds_for, 16384, 0.25, seed)
    judged = [(share, eta, end - now) for share, eta, now in points if 0.02 <= share <= 0.995]
    assert len(judged) > 400
    wrong = [(share, eta, left) for share, eta, left in judged if abs(eta - left) > 0.15 * left + 5.0]
    assert not wrong, wrong[:5]


def test_eta_follows_a_lasting_change_of_speed() -> None:
    """When the engine becomes half as fast for good, the ETA believes it before long."""
    lengths = np.full(4000, 1000)
    count = 0

    def seconds_for(batch: np.ndarray) -> float:
        nonlocal count
        count += 1
        return float(batch.sum() / (5000 if count <= 100 else 2500))

    points, end = simulate(lengths, seconds_for, 16000, 0.05, 0)
    late = [(eta, end - now) for share, eta, now in points if 0.75 < share < 0.98]
    assert all(abs(eta - left) < 0.15 * left + 5 for eta, left in late)


def test_no_eta_before_there_is_something_to_judge_by() -> None:
    clock = Clock()
    progress = Progress(rows=10, tokens=100, rows_before=0, tokens_before=0, clock=clock)
    assert progress.eta() is None
    clock.now += 50
    progress.admitted(10)
    progress.answered(10)
    progress.written(10, 20)
    assert progress.eta() is None  # one completion says nothing about a rate
    clock.now += 10
    progress.admitted(10)
    progress.answered(10)
    progress.written(10, 20)
    assert progress.eta() == pytest.approx(80.0)


def test_pauses_are_no_part_of_rate_or_eta() -> None:
    clock = Clock()
    progress = Progress(rows=100, tokens=1000, rows_before=0, tokens_before=0, clock=clock)

    def work(rows: int) -> None:
        for _ in range(rows):
            clock.now += 1
            progress.admitted(10)
            progress.answered(10)
            progress.written(10, 20)

    work(20)
    progress.pause("disk full")
    clock.now += 3600
    assert progress.snapshot(bytes_stored=0, staging_bytes=0, disk_free=0).paused == "disk full"
    progress.pause("")
    work(20)
    snapshot = progress.snapshot(bytes_stored=0, staging_bytes=0, disk_free=0)
    assert snapshot.paused == ""
    assert snapshot.elapsed == pytest.approx(3640)
    assert snapshot.tokens_per_second_overall == pytest.approx(10.0)
    assert snapshot.eta_seconds == pytest.approx(60.0, rel=0.05)


def test_resumed_rows_count_as_done_but_not_as_speed() -> None:
    clock = Clock()
    progress = Progress(rows=5, tokens=50, rows_before=95, tokens_before=950, clock=clock)
    clock.now += 10
    progress.admitted(10)
    progress.answered(10)
    progress.written(10, 80)
    s = progress.snapshot(bytes_stored=60, staging_bytes=0, disk_free=10**12)
    assert (s.rows_done, s.rows_total, s.tokens_done, s.tokens_total) == (96, 100, 960, 1000)
    assert s.tokens_per_second_overall == pytest.approx(1.0)


def test_meter_history_is_bounded_and_exact() -> None:
    meter = Meter()
    for second in range(200_000):
        meter.add(float(second), 7 * second)
    assert len(meter._times) <= Meter.MAX_POINTS
    for window in (60.0, 3600.0, 66_000.0):
        assert meter.rate(199_999.0, window) == pytest.approx(7.0)


def a_snapshot(**changes: object) -> Snapshot:
    values: dict[str, object] = {
        "elapsed": 100.0,
        "rows_total": 1376,
        "rows_done": 512,
        "rows_failed": 0,
        "tokens_total": 3_320_000,
        "tokens_done": 1_234_567,
        "tokens_failed": 0,
        "rows_in_flight": 12,
        "tokens_in_flight": 98_000,
        "rows_behind": 3,
        "tokens_per_second": 2612.4,
        "tokens_per_second_overall": 2580.1,
        "eta_seconds": 3802.0,
        "bytes_raw": 12_300_000_000,
        "bytes_stored": 8_400_000_000,
        "staging_bytes": 1_200_000_000,
        "disk_free": 812_000_000_000,
        "errors": {"timeout": 2},
        "paused": "",
    }
    return Snapshot(**{**values, **changes})  # type: ignore[arg-type]


def test_a_line_has_everything() -> None:
    assert progress_line(a_snapshot()) == (
        "37.2% | 1,234,567/3,320,000 tokens, 512/1,376 captures | 2,612 tokens/s (1 min), 2,580 overall | ETA 1:03:22 | "
        "12.3 GB raw → 8.40 GB stored | in flight 12 (98,000 tokens) | disk left 812 GB | staging 1.20 GB | errors: timeout 2"
    )
    assert "PAUSED: disk full" in progress_line(a_snapshot(paused="disk full"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "…"), (5, "0:05"), (845, "14:05"), (11645, "3:14:05"), (180_000, "2 d 02:00")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_lines_come_soon_and_then_seldom() -> None:
    clock = Clock()
    lines: list[float] = []
    view = LineView(lambda text: lines.append(clock.now - 1000), seconds=10, clock=clock)
    for _ in range(1000):
        clock.now += 0.1
        view.show(a_snapshot())
    assert lines[:5] == pytest.approx([1, 3, 7, 15, 25], abs=0.2)
    assert len(lines) < 14


def test_a_backlog_of_today_is_seen_after_days_without_one() -> None:
    """A run may begin with one server and go on with four."""
    progress = Progress(rows=1, tokens=1)
    for _ in range(299):
        progress.looked(False)
    assert progress.backlog_share is None, "too few looks"
    for _ in range(1000):
        progress.looked(False)
        progress.looked(True)
    assert progress.backlog_share == pytest.approx(1000 / 2299)
    for _ in range(100_000):
        progress.looked(False)
    assert progress.backlog_share == pytest.approx(0, abs=1e-3)
    for _ in range(600):  # a minute of a slow disk is no reason yet
        progress.looked(True)
    assert 0.1 < (progress.backlog_share or 0) < 0.3
    for _ in range(9000):
        progress.looked(True)
    assert (progress.backlog_share or 0) > 0.9
