"""Eyes of the supervisor: on each tick it shows progress, keeps the log, renews the lock; on each event it tells and records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.extract.disk import stored_size
from headrace.extract.journal import Journal
from headrace.extract.ledger import FailedRow, FailureFile
from headrace.extract.lock import RunLock
from headrace.extract.pipeline import Pipeline
from headrace.extract.progress import Snapshot
from headrace.extract.view import View

if TYPE_CHECKING:
    from headrace.extract.crew_pipeline import CrewPipeline

SHOW_SECONDS = 0.25
PROGRESS_SECONDS = 5.0
NORMS_SECONDS = 30.0
BEAT_SECONDS = 10.0
BEHIND = 0.75
"""Share of the time in which captures wait, from which on it is said that this process is the limit: 0.87 with an engine that answers
at once, 0.003 with transformers on two cores."""
ALOUD = {
    # events that a person should read the moment they happen: kind → sentence
    "engine_lost": "engine lost: {message}",
    "engine_back": "engine is back",
    "pause": "{message}",
    "unpause": "{message}",
    "round": "trying {rows} failed rows again (round {number})",
    "worker_joined": "worker {worker} is ready on {host} (process {pid})",
    "worker_lost": "worker {worker} is lost: {message}; its {rows} unsealed rows go to others",
    "set_aside": "set aside row {key} ({origin}) after {tries} tries: {kind}: {message}",
}


class Watch:
    """Attached to a pipeline for one session."""

    def __init__(
        self,
        pipeline: Pipeline | CrewPipeline,
        journal: Journal,
        view: View,
        failures: FailureFile,
        lock: RunLock,
    ) -> None:
        self.pipeline, self.journal = pipeline, journal
        self.view, self.failures, self.lock = view, failures, lock
        self._due = dict.fromkeys(("show", "progress", "norms", "beat"), time.monotonic())
        self._shards = stored_size(journal.place)
        self._bytes_stored = self._shards.measure()
        self._said = 0
        self._stop_said = self._limit_said = False
        pipeline.on_tick = self.tick
        pipeline.on_note = self.note

    def tick(self) -> None:
        """Whatever is due."""
        if self.pipeline.stopping and not self._stop_said:
            self._stop_said = True
            self.journal.event("stopping", message=self.pipeline.stopping)
            flying = self.pipeline.progress.rows_in_flight
            self.view.say(
                f"{self.pipeline.stopping}: finishing {flying} rows in flight; once more to stop at once"
            )
        if self._is_due("beat", BEAT_SECONDS):
            self.lock.beat()
        if self._is_due("show", SHOW_SECONDS):
            self.view.show(self.snapshot())
        if self._is_due("progress", PROGRESS_SECONDS):
            self._bytes_stored = self._shards.measure()
            self.journal.progress(self.snapshot())
        if self._is_due("norms", NORMS_SECONDS):
            self.journal.norms(self.pipeline.verifier.norms.summary())
            self._say_limit()

    def _say_limit(self) -> None:
        """Once: the engine is not what holds the run up."""
        share = self.pipeline.progress.backlog_share
        if self._limit_said or share is None or share < BEHIND:
            return
        self._limit_said = True
        message = f"captures wait for this process {share:.0%} of the time: checking, compressing or the disk is the limit, not the engine"
        if self.journal.manifest["config"]["url"]:
            message += "; unless it is the disk, stop (nothing is lost) and go on with --workers 2 or more"
        self.journal.event("client_limit", message=message)
        self._say(message)

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """An event of the pipeline."""
        if kind == "set_aside":
            self.failures.add(FailedRow.from_json(fields))
        self.journal.event(kind, **fields)
        if kind in ALOUD:
            self._say(ALOUD[kind].format(**fields))

    def snapshot(self) -> Snapshot:
        """The present state."""
        gauges = self.pipeline.engine.gauges()
        return self.pipeline.progress.snapshot(
            bytes_stored=self._bytes_stored,
            staging_bytes=int(gauges.get("staging_bytes", 0)),
            disk_free=self.pipeline.guard.last.free,
        )

    def last(self) -> Snapshot:
        """The final state, shown and recorded."""
        self._bytes_stored = stored_size(self.journal.place).measure()  # asked anew, however lately it was
        snapshot = self.snapshot()
        self.journal.progress(snapshot)
        self.journal.norms(self.pipeline.verifier.norms.summary())
        self.view.close(snapshot)
        return snapshot

    def _is_due(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + seconds
        return True

    def _say(self, text: str) -> None:
        """Say a sentence, but do not flood: after a hundred of them the log alone has the rest."""
        self._said += 1
        if self._said <= 100:
            self.view.say(text)
        elif self._said == 101:
            self.view.say(f"(further messages only in {self.journal.files.events})")
