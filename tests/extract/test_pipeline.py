"""The pipeline under every fault an engine can have: nothing lost, nothing wrong, nothing stuck."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from headrace.engines.base import Engine
from headrace.engines.fake import FingerprintEngine, FingerprintOptions
from headrace.errors import EngineError, EngineUnavailableError, IncompleteError, StorageFullError
from headrace.extract.admission import Portions
from headrace.extract.check import sampled_norms
from headrace.extract.stages import Limits
from headrace.extract.worker import Worker
from headrace.testing.faults import SPOILERS, FaultyEngine, first_try_script, random_script
from headrace.types import Capture, CaptureSpec, Failure, Row

from .conftest import Bench, MemorySink, make_rows

FAST = Limits(retry_pause_seconds=0.0, failed_share=1.0, engine_wait_seconds=5.0)


def options(tokens: int = 2000, speed: float = 0.0) -> FingerprintOptions:
    return FingerprintOptions(tokens_in_flight=tokens, tokens_per_second=speed, seed=1)


def test_every_capture_arrives_once_and_right(spec: CaptureSpec, tmp_path: Path) -> None:
    bench = Bench(FingerprintEngine(spec, options()), make_rows(500), tmp_path)
    bench.run()
    bench.check()


@pytest.mark.parametrize("fault", [*SPOILERS, "fail", "missing"])
def test_a_passing_fault_costs_a_retry_and_nothing_else(
    fault: str, spec: CaptureSpec, tmp_path: Path
) -> None:
    rows = make_rows(120)
    engine = FaultyEngine(spec, first_try_script({rows[n].key: fault for n in (0, 17, 80, 119)}), options())
    bench = Bench(engine, rows, tmp_path, limits=FAST)
    bench.run()
    bench.check()
    assert engine.injected == {fault: 4}
    assert len(bench.kinds("failure")) == 4 and not bench.kinds("set_aside")


@pytest.mark.parametrize("fault", ["late", "twice", "stray"])
def test_disorder_is_no_fault(fault: str, spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(120)
    bench = Bench(
        FaultyEngine(spec, first_try_script({r.key: fault for r in rows[::7]}), options()), rows, tmp_path
    )
    bench.run()
    bench.check()
    assert not bench.kinds("failure")
    strays = [kind for kind, _ in bench.notes if kind == "stray_answer"]
    assert len(strays) == (0 if fault == "late" else len(rows[::7]))


def test_all_faults_at_once_thousands_of_captures(spec: CaptureSpec, tmp_path: Path) -> None:
    """2,000 rows, one answer in five spoiled in some way, at random."""
    rows = make_rows(2000)
    faults = dict.fromkeys(
        [*SPOILERS, "fail", "missing", "late", "twice", "stray"], 0.2 / (len(SPOILERS) + 5)
    )
    engine = FaultyEngine(spec, random_script(faults, seed=5), options(8000))
    bench = Bench(engine, rows, tmp_path, limits=Limits(retry_pause_seconds=0.0, tries=20, failed_share=1.0))
    bench.run()
    bench.check()
    assert set(engine.injected) == set(faults)


def test_poison_is_set_aside_with_its_reason_after_its_tries(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(100)
    poison = {rows[3].key: "nan", rows[50].key: "fail"}
    bench = Bench(FaultyEngine(spec, lambda key: poison.get(key, ""), options()), rows, tmp_path, limits=FAST)
    bench.run()
    bench.check(missing=poison)
    failed = bench.pipeline.verifier.failed
    assert {key: (f.failure.kind, f.tries) for key, f in failed.items()} == {
        rows[3].key: ("non_finite", 3),
        rows[50].key: ("engine_error", 3),
    }
    assert "position" in failed[rows[3].key].failure.message
    assert failed[rows[3].key].origin == "made-up.jsonl:4"


def test_what_cannot_succeed_is_tried_once(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(30)
    engine = FaultyEngine(spec, lambda key: "refuse" if key == rows[5].key else "", options())
    bench = Bench(engine, rows, tmp_path, limits=FAST)
    bench.run()
    bench.check(missing=[rows[5].key])
    assert engine.injected == {"refuse": 1}


def test_a_streak_of_failures_stops_the_run(spec: CaptureSpec, tmp_path: Path) -> None:
    """ST-23: a dead server must not churn through the whole set failing."""
    rows = make_rows(400)
    answered = 0

    def script(key: str) -> str:
        nonlocal answered
        answered += 1
        return "fail" if answered > 100 else ""

    bench = Bench(FaultyEngine(spec, script, options()), rows, tmp_path, limits=Limits(failures_in_a_row=20))
    with pytest.raises(IncompleteError, match=r"20 rows in a row failed, the last with engine_error: .*500"):
        bench.run()
    assert len(bench.sink.sealed) == 100  # what was good before is durable
    assert not bench.pipeline.verifier.failed  # and no row is blamed for the server's fault


def test_many_poison_rows_are_no_streak_when_they_are_tried_again(spec: CaptureSpec, tmp_path: Path) -> None:
    """Later rounds hold nothing but rows that failed before; that must not look like a dead engine."""
    rows = make_rows(1000)
    poison = {row.key for row in rows[::25]}
    bench = Bench(
        FaultyEngine(spec, lambda key: "nan" if key in poison else "", options()),
        rows,
        tmp_path,
        limits=Limits(failures_in_a_row=20, retry_pause_seconds=0.0),
    )
    bench.run()
    bench.check(missing=poison)


def test_too_large_a_share_of_failures_stops_the_run(spec: CaptureSpec, tmp_path: Path) -> None:
    """EX-20: scattered NaN beyond a threshold is a fault of the engine, not of rows."""
    bench = Bench(FaultyEngine(spec, random_script({"nan": 0.1}, 3), options()), make_rows(1000), tmp_path)
    with pytest.raises(IncompleteError, match=r"of 2\d\d answers failed"):
        bench.run()


def test_an_engine_that_answers_only_the_first_k(spec: CaptureSpec, tmp_path: Path) -> None:
    """EX-17: 32 slots never released; every row must still be captured or the run must fail."""

    class Leaky(FingerprintEngine):
        def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
            pulled = [row for row, _ in zip(rows, range(33), strict=False)]
            yield from map(self.answer, pulled[:32])

    bench = Bench(Leaky(spec, options()), make_rows(100), tmp_path, limits=FAST)
    bench.run()
    bench.check()

    class Dead(FingerprintEngine):
        def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
            return iter(())

    with pytest.raises(EngineError, match="ended although there are rows left"):
        Bench(Dead(spec, options()), make_rows(10), tmp_path).run()


class Mortal:
    """Makes engines that die; each reopening makes the next one."""

    def __init__(self, spec: CaptureSpec, script: Callable[[str], str]) -> None:
        self.spec, self.script, self.opened = spec, script, 0

    def open(self) -> Engine:
        self.opened += 1
        return FaultyEngine(self.spec, self.script, options(600))


def test_a_dead_engine_comes_back_and_nothing_is_lost(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(600)
    rng = random.Random(2)
    mortal = Mortal(spec, lambda key: "die" if rng.random() < 0.01 else "")
    bench = Bench(mortal.open(), rows, tmp_path, limits=FAST)
    bench.pipeline.reopen = mortal.open
    bench.run()
    bench.check()
    assert mortal.opened >= 4
    assert not bench.kinds("set_aside")


@pytest.mark.slow
def test_the_row_that_kills_the_engine_is_found_and_the_others_are_not_blamed(
    spec: CaptureSpec, tmp_path: Path
) -> None:
    rows = make_rows(200)
    killer = rows[77].key
    mortal = Mortal(spec, lambda key: "die" if key == killer else "")
    bench = Bench(mortal.open(), rows, tmp_path, limits=FAST)
    bench.pipeline.reopen = mortal.open
    bench.run()
    bench.check(missing=[killer])
    failure = bench.pipeline.verifier.failed[killer].failure
    assert failure.kind == "engine_died" and not failure.retryable
    assert mortal.opened == 4  # in the crowd, in the second crowd, alone


def test_an_engine_that_only_dies_is_given_up(spec: CaptureSpec, tmp_path: Path) -> None:
    mortal = Mortal(spec, lambda key: "die")
    bench = Bench(mortal.open(), make_rows(300), tmp_path, limits=FAST)
    bench.pipeline.reopen = mortal.open
    with pytest.raises(EngineUnavailableError):
        bench.run()
    assert not bench.pipeline.verifier.failed and mortal.opened == 5


def test_an_engine_that_stays_away_ends_the_run(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(300)
    answered = iter([""] * 50 + ["die"])

    def reopen() -> Engine:
        raise EngineUnavailableError("connection refused")

    bench = Bench(
        FaultyEngine(spec, lambda key: next(answered, ""), options()),
        rows,
        tmp_path,
        limits=Limits(engine_wait_seconds=2.5),
    )
    bench.pipeline.reopen = reopen
    began = time.monotonic()
    with pytest.raises(EngineUnavailableError, match="gone"):
        bench.run()
    assert 1.0 < time.monotonic() - began < 10.0
    assert len(bench.sink.sealed) == 50


def test_a_hanging_engine_is_noticed_and_replaced(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(200)
    answers = iter([""] * 60 + ["hang"])
    mortal = Mortal(spec, lambda key: next(answers, ""))
    bench = Bench(mortal.open(), rows, tmp_path, limits=Limits(stall_seconds=0.5, retry_pause_seconds=0.0))
    bench.pipeline.reopen = mortal.open
    bench.run()
    bench.check()
    assert mortal.opened == 2
    for thread in threading.enumerate():
        if thread.name == "headrace-engine":
            thread.name = "headrace-engine-hanging"  # the abandoned one sleeps on; it is a daemon


def test_stopping_finishes_what_is_in_flight(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(3000)
    bench = Bench(FingerprintEngine(spec, options(3000, speed=60_000.0)), rows, tmp_path)
    threading.Timer(0.4, lambda: setattr(bench.pipeline, "stopping", "stopped by test")).start()
    bench.run()
    stored = set(bench.sink.sealed)
    assert 50 < len(stored) < 2900
    bench.check(
        missing={row.key for row in rows} - stored
    )  # everything admitted was finished: no budget is out


def test_a_worker_told_to_stop_leaves_the_rows_it_has_not_begun_with(
    spec: CaptureSpec, tmp_path: Path
) -> None:
    """Not: looks at them for ever, and holds up every other thread of the process."""
    rows = make_rows(3000)
    bench = Bench(FingerprintEngine(spec, options(3000, speed=60_000.0)), rows, tmp_path)
    portions = Portions(bench.budget.wake)
    portions.add(rows, drain=False)
    threading.Timer(0.4, lambda: setattr(bench.pipeline, "stopping", "stopped by test")).start()
    worker = Worker("serve", lambda: bench.pipeline.serve(portions))
    worker.start()
    worker.join(20)
    left, ended = len(portions), worker.ended
    portions.give_back(left)  # so that no other test is held up if this one fails
    assert ended and worker.error is None
    assert 50 < len(bench.sink.sealed) == len(rows) - left < 2900
    bench.check(missing={row.key for row in rows} - set(bench.sink.sealed))


@pytest.mark.slow
def test_back_pressure_reaches_admission(spec: CaptureSpec, tmp_path: Path) -> None:
    """A disk that stands still stops the pulling within the budget."""
    gate = threading.Event()
    sink = MemorySink(before_add=lambda row: gate.wait() and None)
    rows = make_rows(2000)
    budget = 8000
    bench = Bench(FingerprintEngine(spec, options(2000)), rows, tmp_path, sink=sink, budget=budget)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, bench.budget.used)
        if time.monotonic() - began > 0.8:
            gate.set()

    bench.pipeline.on_tick = look
    began = time.monotonic()
    bench.run()
    bench.check()
    assert budget - 60 <= most <= budget


@pytest.mark.slow
def test_full_disk_pauses_and_goes_on(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(400)
    bench = Bench(FingerprintEngine(spec, options(1000, speed=20_000.0)), rows, tmp_path, min_free=1 << 60)
    threading.Timer(1.5, lambda: setattr(bench.guard, "min_free", 0)).start()
    bench.run()
    bench.check()
    kinds = [kind for kind, _ in bench.notes]
    assert kinds.index("pause") < kinds.index("unpause")
    text = next(str(fields["message"]) for kind, fields in bench.notes if kind == "pause")
    assert "paused" in text and str(tmp_path) in text
    snapshot = bench.progress.snapshot(bytes_stored=0, staging_bytes=0, disk_free=0)
    assert snapshot.elapsed > 1.0 and snapshot.paused == ""


def test_a_disk_that_stays_full_ends_the_run(spec: CaptureSpec, tmp_path: Path) -> None:
    bench = Bench(
        FingerprintEngine(spec, options()),
        make_rows(50),
        tmp_path,
        min_free=1 << 60,
        limits=Limits(pause_seconds=0.5),
    )
    with pytest.raises(StorageFullError, match="no space"):
        bench.run()


def test_a_write_error_ends_the_run_at_once(spec: CaptureSpec, tmp_path: Path) -> None:
    """ST-13: saves that fail must not pass as warnings."""
    count = 0

    def fail_late(row: Row) -> None:
        nonlocal count
        count += 1
        if count > 40:
            raise StorageFullError(28, "no space left to write the shard")

    bench = Bench(
        FingerprintEngine(spec, options(500)),
        make_rows(2000),
        tmp_path,
        sink=MemorySink(fail_late),
        budget=3000,
    )
    with pytest.raises(StorageFullError, match="no space left"):
        bench.run()


def test_a_bug_in_an_engine_is_not_swallowed(spec: CaptureSpec, tmp_path: Path) -> None:
    class Buggy(FingerprintEngine):
        def answer(self, row: Row) -> Capture | Failure:
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        Bench(Buggy(spec, options()), make_rows(5), tmp_path).run()


def test_an_engine_that_raises_keeps_what_was_done(spec: CaptureSpec, tmp_path: Path) -> None:
    class OutOfMemory(FingerprintEngine):
        count = 0

        def answer(self, row: Row) -> Capture | Failure:
            self.count += 1
            if self.count > 30:
                raise EngineError("out of memory; lower the engine option batch_tokens")
            return super().answer(row)

    bench = Bench(OutOfMemory(spec, options()), make_rows(100), tmp_path)
    with pytest.raises(EngineError, match="out of memory"):
        bench.run()
    assert len(bench.sink.sealed) == 30 and bench.budget.used == 0


def test_norms_are_those_of_the_states(spec: CaptureSpec, tmp_path: Path) -> None:
    rows = make_rows(300)
    bench = Bench(FingerprintEngine(spec, options()), rows, tmp_path)
    bench.run()
    taps = bench.pipeline.verifier.norms.summary()
    assert [tap.tap for tap in taps] == list(spec.taps)
    for index, tap in enumerate(taps):
        sampled = [sampled_norms(states)[index] for states in bench.sink.sealed.values()]
        norms = sorted(float(norm) for part in sampled for norm in part)
        count = len(norms)
        assert tap.states == count > 500
        assert tap.mean == pytest.approx(sum(norms) / count, rel=1e-4)
        assert tap.largest == pytest.approx(max(norms), rel=1e-4)
        assert tap.median == pytest.approx(norms[count // 2], rel=0.1)
        assert tap.low == pytest.approx(norms[count // 100], rel=0.12)
