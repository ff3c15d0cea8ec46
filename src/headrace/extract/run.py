"""A whole extraction: open everything in the order in which it can refuse, run the pipeline, close the account."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.data.rows import RowFolder
from headrace.engines.base import Engine, open_engine
from headrace.errors import (
    ConfigError,
    HeadraceError,
    IncompleteError,
    InputError,
    Interrupted,
    StorageFullError,
)
from headrace.extract import checks
from headrace.extract.admission import Budget, in_windows, window_size
from headrace.extract.config import ExtractConfig
from headrace.extract.files import RunFiles
from headrace.extract.journal import Journal
from headrace.extract.ledger import ALREADY, Account, FailureFile, Selection, select
from headrace.extract.lock import RunLock
from headrace.extract.parts import limits_of, make_guard, make_writer
from headrace.extract.pipeline import Pipeline
from headrace.extract.progress import Progress
from headrace.extract.signals import graceful_signals
from headrace.extract.view import make_view
from headrace.extract.watch import Watch
from headrace.extract.worker import Worker
from headrace.store import Store
from headrace.target import Target
from headrace.types import Row

if TYPE_CHECKING:
    from headrace.extract.crew_engine import CrewEngine
    from headrace.extract.crew_pipeline import CrewPipeline

log = logging.getLogger(__name__)
Say = Callable[[str], None]
CLOSE_SECONDS = 10.0
"""How long an engine may take to close."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run: the figures, and the error that its command ends with, if any."""

    result: dict[str, Any]
    error: HeadraceError | None = None

    def done(self) -> dict[str, Any]:
        """The figures; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.result


def extract(config: ExtractConfig, say: Say = log.info) -> dict[str, Any]:
    """Extract, and return the figures (counts, tokens, bytes, seconds, ``out``).

    Raises IncompleteError when any row failed or was not reached, Interrupted when a signal ended it; what is in the
    store by then stays, and the same call goes on. See :func:`run_extraction` for the other errors.
    """
    return run_extraction(config, say).done()


def run_extraction(config: ExtractConfig, say: Say = log.info, engine: Engine | None = None) -> Outcome:
    """Extract; ``engine`` takes the place of the configured one.

    Raises UsageError (2) for input that cannot be right, PreflightError (3) when a check refuses, both before any
    work; an error that ends the work early is returned in the outcome, beside the figures up to it.
    """
    with contextlib.ExitStack() as stack:
        return Extraction(config, say, engine, stack).run()


class Extraction:
    """The steps of one session, in order; :meth:`run` is their list. What is opened is closed by ``stack``."""

    def __init__(
        self, config: ExtractConfig, say: Say, engine: Engine | None, stack: contextlib.ExitStack
    ) -> None:
        self.config = config
        self.say = say
        self.stack = stack
        self.given_engine = engine
        self.rows = RowFolder.open(config.rows)
        self.target = Target.open(config.model, config.revision)
        self.spec = self.target.spec(config.taps, dtype=config.dtype, final_normed=config.final_normed)
        self.files = RunFiles(config.out)
        self.started = time.monotonic()
        self.engine: Engine | CrewEngine

    def run(self) -> Outcome:
        """Everything, from the checks to the account."""
        checks.check_rows(self.config, self.rows, self.spec)
        self._take_folder()
        store = checks.join_store(self.config, self.spec)
        failures = FailureFile(self.files.failures)
        selection = self._select(store, failures)
        if not selection.todo:
            return self._nothing_to_do(selection, failures)
        self.codec = checks.codec_of(self.config, store, self.spec)
        longest = max(selection.todo.values())
        self.engine = self._open_engine(longest)
        budget = Budget(checks.budget_tokens(self.config, self.engine, longest))
        if store is not None:
            checks.check_provenance(self.config, store, self.engine)
        checks.check_engine(self.config, self.engine, self.say)
        checks.check_space(self.config, selection, self.spec, self.codec)
        pipeline = self._pipeline(budget, selection)
        return self._work(pipeline, selection, failures)

    # --- before the work --------------------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """Make the folder and lock it; what was made is removed again when nothing comes of it."""
        made = [p for p in (self.config.out, self.files.folder) if not p.exists()]
        self.stack.callback(_remove_empty, made)
        try:
            self.files.folder.mkdir(parents=True, exist_ok=True)
            self.lock = RunLock.acquire(self.files.lock, self.say)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise ConfigError(
                f"--out {self.config.out} cannot be written: {reason}; give a writable folder"
            ) from exc
        self.stack.callback(self.lock.release)

    def _select(self, store: Store | None, failures: FailureFile) -> Selection:
        split = self.config.split or None
        selection = select(
            self.rows.keys(split),
            self.rows.lengths(split),
            stored=set(store.keys()) if store is not None else set(),
            set_aside={} if self.config.retry_failed else failures.final(),
            only=self.config.only,
            limit=self.config.limit,
        )
        if not selection.rows:
            raise InputError(
                f"{self.config.rows} has no rows to extract; see headrace stats {self.config.rows}"
            )
        return selection

    def _open_engine(self, longest: int) -> Engine | CrewEngine:
        if self.config.distributed:
            return self._open_crew(longest)
        if self.given_engine is not None:
            return self.given_engine
        engine = open_engine(self.config.engine, self.target, self.spec, checks.engine_options(self.config))
        self.stack.callback(self._close_engine)
        return engine

    def _open_crew(self, longest: int) -> CrewEngine:
        if self.given_engine is not None:
            raise ConfigError("workers open their engines themselves; name one with engine = ...")
        from headrace.extract.crew_run import open_crew

        crew = open_crew(self.config, self.spec, self.codec, longest)
        self.stack.callback(self._close_engine)
        return crew

    def _close_engine(self) -> None:
        """Close whichever engine is open by now; one that hangs in it is left behind."""
        worker = Worker("close", self.engine.close)
        worker.start()
        worker.join(CLOSE_SECONDS)
        if worker.error is not None:
            raise worker.error

    def _reopen(self) -> Engine:
        self.engine.close()
        engine = open_engine(self.config.engine, self.target, self.spec, checks.engine_options(self.config))
        self.engine = engine
        return engine

    # --- the work -----------------------------------------------------------------------------------------------------

    def _pipeline(self, budget: Budget, selection: Selection) -> Pipeline | CrewPipeline:
        progress = Progress(
            rows=len(selection.todo),
            tokens=selection.tokens,
            rows_before=selection.skipped[ALREADY],
            tokens_before=selection.tokens_done,
            bytes_before=selection.tokens_done * self.spec.bytes_per_token,
        )
        if not isinstance(self.engine, Engine):
            from headrace.extract.crew_run import make_crew_pipeline

            # The store is made here and now: its first workers then only join it, and it is there whatever becomes of them.
            make_writer(self.config, self.spec, self.codec, self.engine).close()
            return make_crew_pipeline(self.config, self.engine, progress, selection.tokens)
        writer = make_writer(self.config, self.spec, self.codec, self.engine)
        writer.expect(selection.tokens * self.spec.bytes_per_token)
        self.stack.callback(lambda: None if pipeline.aborted else writer.close())
        guard = make_guard(self.config, self.spec, budget, progress, tokens=selection.tokens)
        pipeline = Pipeline(
            self.engine, writer, budget=budget, guard=guard, progress=progress, limits=limits_of(self.config)
        )
        if self.given_engine is None:
            pipeline.reopen = self._reopen
        return pipeline

    def _work(
        self, pipeline: Pipeline | CrewPipeline, selection: Selection, failures: FailureFile
    ) -> Outcome:
        journal = Journal(self.files, self.config, self.spec, self.engine.info, self.rows, self.codec)
        self.stack.callback(journal.close)
        info, there = self.engine.info, selection.skipped[ALREADY]
        self.say(
            f"extracting {len(selection.todo):,} rows ({selection.tokens:,} tokens) with {info.name} {info.version} "
            f"into {self.config.place}" + (f"; {there:,} are there already" if there else "")
        )
        watch = Watch(pipeline, journal, make_view(self.say), failures, self.lock)
        with graceful_signals(pipeline):
            error = self._run(pipeline, selection, watch)
            result, error = self._account(pipeline, selection, failures, error)
            journal.end(result, error)
        return Outcome(result, error)

    def _run(
        self, pipeline: Pipeline | CrewPipeline, selection: Selection, watch: Watch
    ) -> HeadraceError | None:
        """The error of ours that ended the pipeline, if one did; others pass."""
        try:
            pipeline.run(self._ordered(selection), self.rows.get)
        except HeadraceError as exc:
            return exc
        finally:
            watch.last()
        return (
            Interrupted(f"{pipeline.stopping}; run the same command again to go on")
            if pipeline.stopping
            else None
        )

    def _ordered(self, selection: Selection) -> Iterator[Row]:
        left = set(selection.todo)

        def todo() -> Iterator[Row]:
            for row in self.rows.rows(self.config.split or None):
                if row.key in left:
                    left.remove(row.key)
                    checks.check_ids(row, self.target)
                    yield row

        return in_windows(todo(), self.config.window or window_size(len(left)), self.config.seed)

    # --- the account ----------------------------------------------------------------------------------------------------

    def _account(
        self,
        pipeline: Pipeline | CrewPipeline,
        selection: Selection,
        failures: FailureFile,
        error: HeadraceError | None,
    ) -> tuple[dict[str, Any], HeadraceError | None]:
        store = Store.open(self.config.place)
        stored = set(store.keys())
        failed = {key: row.failure for key, row in pipeline.verifier.failed.items()}
        account = Account.close(selection, stored, failed, finished=error is None)
        with contextlib.suppress(StorageFullError):  # the longer file still tells the truth, and more of it
            failures.settle(stored)
        if isinstance(error, Interrupted) and not account.not_reached:
            error = None  # the signal came when everything was done
        if error is None and account.failed:
            error = IncompleteError(
                f"{sum(account.failed.values())} of {account.rows} rows failed ({_counts(account.failed)}); "
                f"see {self.files.failures}, then run the command again"
            )
        return self._result(account, store, pipeline.progress.tokens_done), error

    def _nothing_to_do(self, selection: Selection, failures: FailureFile) -> Outcome:
        """Every row is stored, skipped or set aside already: no engine is needed to say so."""
        account = Account.close(selection, set(), {}, finished=True)
        error = None
        if account.failed:
            error = IncompleteError(
                f"{sum(account.failed.values())} rows are set aside from earlier runs ({_counts(account.failed)}; see "
                f"{failures.path}); --retry-failed tries them again"
            )
        elif not selection.skipped[ALREADY]:
            raise InputError(f"no row of {self.config.rows} is selected: {_counts(dict(selection.skipped))}")
        self.say(f"nothing to do: {selection.skipped[ALREADY]:,} rows are in {self.config.place} already")
        return Outcome(self._result(account, Store.open(self.config.place), tokens=0), error)

    def _result(self, account: Account, store: Store, tokens: int) -> dict[str, Any]:
        seconds = time.monotonic() - self.started
        return {
            "out": str(self.config.out),
            "store": self.config.place,
            **account.to_json(),
            "tokens": tokens,
            "captures": len(store),
            "tokens_stored": store.tokens,
            "bytes_raw": store.bytes_raw,
            "bytes_stored": store.bytes_stored,
            "ratio": round(store.bytes_stored / max(1, store.bytes_raw), 4),
            "seconds": round(seconds, 2),
            "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
            "engine": self.config.engine if self.given_engine is None else self.given_engine.info.name,
            "codec": store.codec,
            "taps": list(self.spec.taps),
        }


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders made in vain, innermost first; anything in them keeps them."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()
