"""A whole distributed extraction with threads for hosts: work is given back, copied, tried again and accounted for, whoever dies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.base import Check, EngineInfo
from headrace.engines.fake import FingerprintEngine, FingerprintOptions
from headrace.errors import EngineUnavailableError, IncompleteError, PreflightError, SpecMismatchError
from headrace.extract import crew, crew_pipeline, crew_run
from headrace.extract.config import ExtractConfig
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.extract.run import Outcome, run_extraction
from headrace.store import StoreWriter
from headrace.testing.extraction import compare_store, make_rows, write_rows
from headrace.testing.faults import FaultyEngine, first_try_script
from headrace.types import Capture, CaptureSpec, Failure, Row

from .crew_of_threads import MakeEngine, ThreadCluster

pytestmark = pytest.mark.slow

ROWS = make_rows(400)
TOKENS = sum(map(len, ROWS))


def fake(spec: CaptureSpec, number: int) -> FingerprintEngine:
    return engine(spec)


def engine(spec: CaptureSpec, rate: float = TOKENS, **options: Any) -> FingerprintEngine:
    return FingerprintEngine(
        spec, FingerprintOptions(tokens_in_flight=300, tokens_per_second=rate, **options)
    )


class Ground:
    def __init__(self, folder: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        write_rows(folder / "rows", ROWS)
        self.values: dict[str, Any] = {
            "rows": folder / "rows",
            "model": str(model),
            "out": folder / "store",
            "engine": "fake",
            "ray": "threads",
            "shard_bytes": TOKENS * 128 // 12,
            "min_free": 0,
            "engine_wait_minutes": 0.03,
        }

    def run(self, make: MakeEngine, workers: int, **changes: Any) -> Outcome:
        return self.on(ThreadCluster(make, workers), **changes)

    def on(self, cluster: ThreadCluster, **changes: Any) -> Outcome:
        self.patch.setattr(crew_run, "RayCluster", cluster.bind)
        return run_extraction(ExtractConfig(**{**self.values, **changes}), lambda text: None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [
            event for event in read_events(RunFiles(self.folder / "store").events) if event["event"] == kind
        ]

    def assert_whole(self, outcome: Outcome) -> None:
        """Equal to one process's store, and every counter says so."""
        result = outcome.done()
        assert compare_store(self.folder / "store", ROWS).equal
        assert result["stored"] + result["skipped"] == result["rows"] == len(ROWS)
        last = self.events("progress")[-1]
        assert last["rows_done"] == len(ROWS) and last["tokens_done"] == TOKENS
        assert last["rows_in_flight"] == last["tokens_in_flight"] == last["rows_behind"] == 0
        assert last["bytes_raw"] == TOKENS * 128


@pytest.fixture
def ground(tmp_path: Path, config_only: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setattr(crew, "LOOK_AT_CLUSTER", 0.1)
    return Ground(tmp_path, config_only, monkeypatch)


def test_three_workers_make_the_store_of_one_process(ground: Ground) -> None:
    ground.assert_whole(ground.run(fake, 3))
    joined = ground.events("worker_joined")
    assert len(joined) == 3
    norms = ground.events("norms")[-1]["taps"]
    assert {tap["states"] for tap in norms} == {
        sum(len(range(min(8, len(r) // 2), len(r), 16)) for r in ROWS)
    }


def test_writers_know_what_is_still_to_come(ground: Ground) -> None:
    """So that their last shards are small ones: else all of them would write a whole shard when the engine is done already."""
    told: list[int] = []
    ground.patch.setattr(StoreWriter, "expect", lambda self, states_bytes: told.append(states_bytes))
    ground.assert_whole(ground.run(fake, 3))
    assert TOKENS * 128 // 4 < max(told) <= TOKENS * 128 and told[-1] == 0
    assert len(set(told)) > 6


def test_a_second_run_has_nothing_to_do(ground: Ground) -> None:
    ground.run(fake, 2)
    again = ground.run(fake, 2).done()
    assert again["skipped_by_reason"] == {"already_stored": len(ROWS)} and again["tokens"] == 0


@pytest.mark.parametrize("seed", [1])
def test_workers_and_hosts_that_die_cost_what_they_had_not_sealed(ground: Ground, seed: int) -> None:
    rng = random.Random(seed)
    deaths = [time.monotonic() + 0.3 + 0.15 * n for n in range(4)]

    def reaper(cluster: ThreadCluster) -> None:
        if deaths and time.monotonic() > deaths[0] and cluster.alive:
            deaths.pop(0)
            rng.choice(cluster.alive).crash("killed by the test", host=rng.random() < 0.5)

    cluster = ThreadCluster(fake, 3)
    cluster.on_wait = reaper
    ground.assert_whole(ground.on(cluster))
    assert len(ground.events("worker_lost")) >= 2


def test_workers_join_while_it_runs(ground: Ground) -> None:
    cluster = ThreadCluster(fake, 1)
    start = time.monotonic()

    def grow(cluster: ThreadCluster) -> None:
        cluster.size = 1 + int((time.monotonic() - start) > 0.3)

    cluster.on_wait = grow
    ground.assert_whole(ground.on(cluster))
    assert len(ground.events("worker_joined")) == 2


class Hung(FingerprintEngine):
    """Takes rows and answers none, until the test is over."""

    over = threading.Event()

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        for answer in super().capture(rows):
            self.over.wait()
            yield answer


def test_rows_of_a_hung_worker_go_to_the_others(ground: Ground) -> None:
    """It never answers and never dies: what it holds is copied once the others have nothing else to do."""

    def make(spec: CaptureSpec, number: int) -> FingerprintEngine:
        return Hung(spec, engine(spec).options) if number == 0 else fake(spec, number)

    try:
        ground.assert_whole(ground.run(make, 3))
    finally:
        Hung.over.set()
    assert ground.events("lease_copied")


def test_nothing_is_late_before_the_first_answer(ground: Ground) -> None:
    """One worker holds all rows of a short run, as it was there first; another that joins has nothing to do, and copies none of them."""
    ground.patch.setattr(crew_pipeline, "LATE_SECONDS", 0.1)
    options = FingerprintOptions(tokens_in_flight=10 * TOKENS, tokens_per_second=10 * TOKENS)
    begun = time.monotonic()

    class Slow(FingerprintEngine):
        """Answers nothing for a second, then everything."""

        def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
            for answer in super().capture(rows):
                time.sleep(max(0.0, begun + 1.5 - time.monotonic()))
                yield answer

    cluster = ThreadCluster(lambda spec, number: Slow(spec, options), 1)

    def grow(cluster: ThreadCluster) -> None:
        cluster.size = 1 + int(time.monotonic() > begun + 0.4)

    cluster.on_wait = grow
    ground.assert_whole(ground.on(cluster))
    assert len(ground.events("worker_joined")) == 2 and not ground.events("lease_copied")


def test_rows_are_kept_for_a_worker_on_its_way(ground: Ground) -> None:
    options = FingerprintOptions(tokens_in_flight=10 * TOKENS, tokens_per_second=TOKENS)
    taken = [0, 0]

    def make(spec: CaptureSpec, number: int) -> FingerprintEngine:
        class Counting(FingerprintEngine):
            def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
                for answer in super().capture(rows):
                    taken[number] += 1
                    yield answer

        time.sleep(0.4 * number)
        return Counting(spec, options)

    ground.assert_whole(ground.run(make, 2))
    assert min(taken) > len(ROWS) // 5, taken


def test_a_slow_worker_gives_back_what_it_has_not_begun(ground: Ground) -> None:
    def make(spec: CaptureSpec, number: int) -> FingerprintEngine:
        return engine(spec, rate=300 if number == 0 else 10 * TOKENS)

    start = time.monotonic()
    ground.assert_whole(ground.run(make, 2))
    assert (
        time.monotonic() - start < TOKENS / 300 / 2
    )  # far from what the slow one would have needed for a fair half


def test_failures_are_tried_again_in_rounds_and_set_aside(ground: Ground) -> None:
    once, never = ROWS[5].key, ROWS[11].key
    spoil = first_try_script({once: "nan"})

    def script(key: str) -> str:
        return "fail" if key == never else spoil(key)

    outcome = ground.run(lambda spec, n: FaultyEngine(spec, script, engine(spec).options), 3)
    assert isinstance(outcome.error, IncompleteError)
    assert (
        outcome.result["failed_by_kind"] == {"engine_error": 1} and outcome.result["stored"] == len(ROWS) - 1
    )
    assert compare_store(ground.folder / "store", ROWS).lost == [never]
    assert [event["number"] for event in ground.events("round")] == [2, 3]
    assert ground.events("set_aside")[0]["tries"] == 3


def test_a_row_that_kills_its_worker_is_found_and_set_aside(ground: Ground) -> None:
    """Innocent neighbours are stored; the culprit is known because it kills alone."""
    bad = ROWS[40].key

    def make(spec: CaptureSpec, number: int) -> FingerprintEngine:
        return FaultyEngine(spec, lambda key: "die" if key == bad else "", engine(spec, rate=0).options)

    outcome = ground.run(make, 2)
    assert isinstance(outcome.error, IncompleteError)
    assert (
        outcome.result["failed_by_kind"] == {"engine_died": 1} and outcome.result["stored"] == len(ROWS) - 1
    )
    assert compare_store(ground.folder / "store", ROWS).lost == [bad]


def test_a_place_whose_workers_always_die_is_given_up_and_the_rest_goes_on(ground: Ground) -> None:
    class Dead(FingerprintEngine):
        def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
            raise EngineUnavailableError("no device (on purpose)")

    broken: list[int] = []

    def make(spec: CaptureSpec, number: int) -> FingerprintEngine:
        if number == 0 or (len(broken) < 3 and number > 1):
            broken.append(number)
            return Dead(spec, engine(spec).options)
        return fake(spec, number)

    ground.assert_whole(ground.run(make, 2))


def test_no_worker_at_all_is_an_error_that_says_so(ground: Ground) -> None:
    def make(spec: CaptureSpec, number: int) -> FingerprintEngine:
        raise EngineUnavailableError("server http://10.0.0.9 does not answer")

    with pytest.raises(EngineUnavailableError, match=r"10\.0\.0\.9 does not answer"):
        ground.run(make, 2)
    with pytest.raises(EngineUnavailableError, match="no worker became ready"):
        ground.run(fake, 0)


def test_two_engines_never_fill_one_store(ground: Ground) -> None:
    class Other(FingerprintEngine):
        def __init__(self, spec: CaptureSpec, options: FingerprintOptions) -> None:
            super().__init__(spec, options)
            self.info = EngineInfo(name="fake", version="0.0", tokens_in_flight=300)

    def make(spec: CaptureSpec, number: int) -> FingerprintEngine:
        if number:
            time.sleep(0.2)
        return Other(spec, engine(spec).options) if number else fake(spec, number)

    ground.assert_whole(ground.run(make, 2))
    assert len(ground.events("worker_joined")) == 1
    assert SpecMismatchError.exit_code == 2


def test_an_engine_that_fails_its_checks_is_refused_before_any_work(ground: Ground) -> None:
    class Unfit(FingerprintEngine):
        def preflight(self) -> list[Check]:
            return [Check("radix cache", False, "on", "start it with --disable-radix-cache")]

    with pytest.raises(PreflightError, match="radix cache"):
        ground.run(lambda spec, number: Unfit(spec, engine(spec).options), 2)
