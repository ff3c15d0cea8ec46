"""A whole extraction: open everything in the order in which it can refuse, run the pipeline, close the account."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from headrace._version import __version__
from headrace.data.rows import RowFolder
from headrace.engines.base import Engine, engine_class, open_engine
from headrace.errors import (
    ConfigError,
    HeadraceError,
    IncompleteError,
    InputError,
    Interrupted,
    PreflightError,
    SpecMismatchError,
)
from headrace.extract.admission import Budget, in_windows, window_size
from headrace.extract.config import ExtractConfig
from headrace.extract.disk import DiskGuard, gigabytes, space
from headrace.extract.files import RunFiles
from headrace.extract.journal import Journal
from headrace.extract.ledger import ALREADY, Account, FailureFile, Selection, select
from headrace.extract.lock import RunLock
from headrace.extract.pipeline import Pipeline
from headrace.extract.plan import stored_ratio
from headrace.extract.progress import Progress
from headrace.extract.stages import Limits
from headrace.extract.view import make_view
from headrace.extract.watch import Watch
from headrace.store import Store, StoreWriter, WriterOptions
from headrace.target import Target
from headrace.types import Row

log = logging.getLogger(__name__)
Say = Callable[[str], None]


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
    """The steps of one session, in order; :meth:`run` is their list."""

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

    def run(self) -> Outcome:
        """Everything, from the checks to the closing line."""
        self._check_rows()
        self._take_folder()
        store = self._open_store()
        stored = set(store.keys()) if store is not None else set()
        failures = FailureFile(self.files.failures)
        selection = self._select(stored, failures)
        if not selection.todo:
            return self._nothing_to_do(selection, failures)
        engine = self._open_engine(selection)
        self._check_provenance(store, engine)
        self._check_space(selection)
        journal = Journal(self.files, self.config, self.spec, engine.info, self.rows)
        self.stack.callback(journal.close)
        return self._extract(engine, selection, failures, journal)

    # --- checks before anything is written --------------------------------------------------------------------------

    def _check_rows(self) -> None:
        if self.config.split and self.config.split not in self.rows.splits:
            raise ConfigError(f"--split {self.config.split}: {self.config.rows} has {list(self.rows.splits)}")
        theirs = self.rows.manifest.get("tokenizer_hash", "")
        if theirs and self.spec.tokenizer_hash and theirs != self.spec.tokenizer_hash:
            raise SpecMismatchError(
                f"rows {self.config.rows} were made with another tokenizer (hash {theirs}) than {self.config.model} has "
                f"({self.spec.tokenizer_hash}); prepare them with this model"
            )

    def _take_folder(self) -> None:
        """Make the folder and lock it; what was made is removed again when nothing comes of it."""
        made = [p for p in (self.config.out, self.files.folder) if not p.exists()]
        try:
            self.files.folder.mkdir(parents=True, exist_ok=True)
            self.stack.callback(_remove_empty, made)
            self.lock = RunLock.acquire(self.files.lock, self.say)
        except OSError as exc:
            raise ConfigError(
                f"--out {self.config.out} cannot be written: {exc.strerror or exc}; give a writable folder"
            ) from exc
        self.stack.callback(self.lock.release)

    def _open_store(self) -> Store | None:
        if not (self.config.out / "dataset.json").exists():
            return None
        store = Store.open(self.config.out)
        if lines := store.spec.differences(self.spec):
            raise SpecMismatchError(
                f"store {self.config.out} was begun with another spec: {'; '.join(lines)} (store != now). "
                "Give the same model, taps and dtype, or another --out"
            )
        return store

    def _select(self, stored: set[str], failures: FailureFile) -> Selection:
        split = self.config.split or None
        selection = select(
            self.rows.keys(split),
            self.rows.lengths(split),
            stored=stored,
            set_aside={} if self.config.retry_failed else failures.final(),
            only=self.config.only,
            limit=self.config.limit,
        )
        if not selection.rows:
            raise InputError(
                f"{self.config.rows} has no rows to extract; see headrace stats {self.config.rows}"
            )
        return selection

    def _open_engine(self, selection: Selection) -> Engine:
        if self.given_engine is not None:
            engine = self.given_engine
        else:
            engine = open_engine(self.config.engine, self.target, self.spec, engine_options(self.config))
            self.stack.callback(lambda: self._engine().close())
        self.engine = engine
        failing = [check for check in engine.preflight() if not check.ok]
        for check in failing:
            self.say(f"check failed: {check.name}: {check.value}. {check.mend}")
        if failing and not self.config.skip_preflight:
            first = failing[0]
            raise PreflightError(
                f"{len(failing)} checks of engine {engine.info.name} failed, first {first.name}: {first.value}. "
                f"{first.mend or 'See headrace doctor'} (--skip-preflight starts anyway)"
            )
        longest = max(selection.todo.values())
        wanted = engine.info.tokens_in_flight + 2 * longest
        if 0 < self.config.tokens_in_flight < wanted:
            raise ConfigError(
                f"--tokens-in-flight {self.config.tokens_in_flight} is less than engine {engine.info.name} needs ({wanted}: what it "
                f"asks for and two of the longest rows); give at least that, or lower the engine's own option"
            )
        self.budget = Budget(self.config.tokens_in_flight or wanted + engine.info.tokens_in_flight)
        return engine

    def _engine(self) -> Engine:
        return self.engine

    def _check_provenance(self, store: Store | None, engine: Engine) -> None:
        """One store, one engine: another name or version never continues it, other settings only when allowed."""
        before = (store.provenance.get("engine") if store is not None else None) or {}
        if not before:
            return
        now = engine_provenance(engine)
        for key in ("name", "version"):
            if before.get(key) != now[key]:
                raise SpecMismatchError(
                    f"store {self.config.out} was begun with engine {before.get('name')} {before.get('version')}, this is "
                    f"{now['name']} {now['version']}; use the same, or another --out (states of two engines never share a store)"
                )
        then, current = before.get("settings", {}), now["settings"]
        differ = [
            f"{k}: {then.get(k)!r} != {current.get(k)!r}"
            for k in sorted({*then, *current})
            if then.get(k) != current.get(k)
        ]
        if differ and not self.config.allow_other_settings:
            raise SpecMismatchError(
                f"store {self.config.out} was begun with other settings of engine {now['name']}: {'; '.join(differ)} (store != now). "
                "Use the same, or --allow-other-settings if they change no number that matters"
            )

    def _check_space(self, selection: Selection) -> None:
        need = (
            int(selection.tokens * self.spec.bytes_per_token * stored_ratio(self.config.codec))
            + self.config.min_free
        )
        free = space(self.config.out).free
        if free < need and not self.config.skip_preflight:
            raise PreflightError(
                f"the store needs about {gigabytes(need)} ({selection.tokens:,} tokens with codec {self.config.codec}, and --min-free), the file "
                f"system of {self.config.out} has {gigabytes(free)}; free some, choose a smaller codec, or --skip-preflight to fill it "
                "and pause when it is full"
            )

    # --- the work -----------------------------------------------------------------------------------------------------

    def _extract(
        self, engine: Engine, selection: Selection, failures: FailureFile, journal: Journal
    ) -> Outcome:
        writer = StoreWriter(
            self.config.out,
            self.spec,
            codec=self.config.codec,
            final_positions=self.config.final_positions,
            provenance={"engine": engine_provenance(engine), "headrace": __version__},
            # Zero states are judged here, tap by tap: at boundary 0 they are legitimate.
            options=WriterOptions(
                shard_bytes=int(self.config.shard_bytes),
                shard_seconds=60 * self.config.seal_minutes,
                allow_zeros=True,
            ),
        )
        self.stack.callback(writer.close)
        per_token = self.spec.bytes_per_token
        progress = Progress(
            rows=len(selection.todo),
            tokens=selection.tokens,
            rows_before=selection.skipped[ALREADY],
            tokens_before=selection.tokens_done,
            bytes_before=selection.tokens_done * per_token,
        )
        most = selection.tokens * per_token
        waiting = 2 * int(self.config.shard_bytes) + writer.options.queue_bytes

        def on_its_way() -> int:
            """Bytes that may still go to disk without another row being admitted; never more than the run has left."""
            written = progress.bytes_raw - selection.tokens_done * per_token
            left = most - written + min(waiting, written)
            return min(self.budget.used * per_token + waiting, left)

        guard = DiskGuard(self.config.out, int(self.config.min_free), on_its_way)
        pipeline = Pipeline(
            engine, writer, budget=self.budget, guard=guard, progress=progress, limits=_limits(self.config)
        )
        if self.given_engine is None:
            pipeline.reopen = self._reopen
        view = make_view(self.say)
        watch = Watch(pipeline, journal, view, failures, self.lock)
        error = self._guarded(pipeline, selection, watch)
        return self._close(pipeline, selection, watch, error)

    def _guarded(self, pipeline: Pipeline, selection: Selection, watch: Watch) -> HeadraceError | None:
        """Run the pipeline under the signal handlers; the error of ours that ended it, if one did."""
        self.say(
            f"extracting {len(selection.todo):,} rows ({selection.tokens:,} tokens) with {pipeline.engine.info.name} "
            f"{pipeline.engine.info.version} into {self.config.out}"
            + (f"; {selection.skipped[ALREADY]:,} are there already" if selection.skipped[ALREADY] else "")
        )
        try:
            with graceful_signals(pipeline):
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
        left = dict(selection.todo)

        def todo() -> Iterator[Row]:
            for row in self.rows.rows(self.config.split or None):
                if left.pop(row.key, None) is None:
                    continue
                if int(row.ids.max()) >= self.target.vocab_size or int(row.ids.min()) < 0:
                    raise SpecMismatchError(
                        f"row {row.key} has token id {int(row.ids.max())}, {self.config.model} has {self.target.vocab_size}; "
                        "prepare the rows with this model"
                    )
                yield row

        return in_windows(todo(), self.config.window or window_size(len(selection.todo)), self.config.seed)

    def _reopen(self) -> Engine:
        self.engine.close()
        self.engine = open_engine(self.config.engine, self.target, self.spec, engine_options(self.config))
        return self.engine

    # --- the account ----------------------------------------------------------------------------------------------------

    def _close(
        self, pipeline: Pipeline, selection: Selection, watch: Watch, error: HeadraceError | None
    ) -> Outcome:
        store = Store.open(self.config.out)
        stored = set(store.keys())
        failed = {key: row.failure for key, row in pipeline.verifier.failed.items()}
        finished = error is None
        account = Account.close(selection, stored, failed, finished=finished)
        watch.failures.settle(stored)
        if error is None and account.failed:
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(account.failed.items()))
            error = IncompleteError(
                f"{sum(account.failed.values())} of {account.rows} rows failed ({kinds}); see {self.files.failures}, then run the command again"
            )
        result = self._result(account, store, pipeline.progress.tokens_done)
        watch.journal.end(result, error)
        return Outcome(result, error)

    def _nothing_to_do(self, selection: Selection, failures: FailureFile) -> Outcome:
        """Every row is stored, skipped or set aside already: no engine is needed to say so."""
        account = Account.close(selection, set(), {}, finished=True)
        error = None
        if account.failed:
            error = IncompleteError(
                f"{sum(account.failed.values())} rows are set aside from earlier runs (see {failures.path}); --retry-failed tries them again"
            )
        elif not selection.skipped[ALREADY]:
            raise InputError(f"no row of {self.config.rows} is selected: {dict(selection.skipped)}")
        store = Store.open(self.config.out)
        self.say(f"nothing to do: {selection.skipped[ALREADY]:,} rows are in {self.config.out} already")
        return Outcome(self._result(account, store, tokens=0), error)

    def _result(self, account: Account, store: Store, tokens: int) -> dict[str, Any]:
        seconds = time.monotonic() - self.started
        return {
            "out": str(self.config.out),
            **account.to_json(),
            "tokens": tokens,
            "captures": len(store),
            "tokens_stored": store.tokens,
            "bytes_raw": store.bytes_raw,
            "bytes_stored": store.bytes_stored,
            "ratio": round(store.bytes_stored / max(1, store.bytes_raw), 4),
            "seconds": round(seconds, 2),
            "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
            "engine": self.config.engine,
            "codec": self.config.codec,
            "taps": list(self.spec.taps),
        }


def engine_provenance(engine: Engine) -> dict[str, Any]:
    """What a store remembers of the engine that fills it."""
    return {"name": engine.info.name, "version": engine.info.version, "settings": engine.info.settings}


def engine_options(config: ExtractConfig) -> dict[str, Any]:
    """The engine's own options, with ``url`` and ``device`` put where its schema has them.

    Raises ConfigError when the engine has no place for one of them, or takes one URL and several are given.
    """
    fields = engine_class(config.engine).Options.model_fields
    options = dict(config.engine_options)
    if config.device:
        if "device" not in fields:
            raise ConfigError(f"--device: engine {config.engine} has no such option; it has {sorted(fields)}")
        options["device"] = config.device
    if config.url:
        if "url" not in fields:
            raise ConfigError(
                f"--url: engine {config.engine} is no server; it has the options {sorted(fields)}"
            )
        if fields["url"].annotation is not str:
            options["url"] = list(config.url)
        elif len(config.url) == 1:
            options["url"] = config.url[0]
        else:
            raise ConfigError(f"--url: engine {config.engine} takes one URL, {len(config.url)} are given")
    return options


def _limits(config: ExtractConfig) -> Limits:
    return Limits(
        tries=config.tries,
        failures_in_a_row=config.max_failures_in_a_row,
        failed_share=config.max_failed_share,
        engine_wait_seconds=60 * config.engine_wait_minutes,
        stall_seconds=60 * config.stall_minutes,
        pause_seconds=60 * config.pause_minutes,
        seal_seconds=60 * config.seal_minutes,
    )


@contextlib.contextmanager
def graceful_signals(pipeline: Pipeline) -> Iterator[None]:
    """SIGINT and SIGTERM: the first one stops admission and lets rows in flight finish, the second raises Interrupted.

    Only the main thread can take signals; elsewhere (a notebook's thread, a worker) this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if pipeline.stopping:
            pipeline.aborted = True
            for which in before:  # a third one finds the usual handlers
                signal.signal(which, signal.SIG_DFL)
            raise Interrupted("stopped at once; run the same command again to go on")
        pipeline.stopping = f"stopped by {signal.Signals(number).name}"

    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    for which in before:
        signal.signal(which, handle)
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders made in vain, innermost first; anything in them keeps them."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()
