"""The re-extraction: the sample through the reference engine, compared with the store capture by capture, journalled as it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from headrace.errors import CorruptError
from headrace.types import FINAL, Capture, Row
from headrace.verify import meaning
from headrace.verify.journal import Journal, Record
from headrace.verify.measure import Noise, TapError, Tolerance, token_errors
from headrace.verify.pool import Pool
from headrace.verify.reference import Reference
from headrace.verify.session import Session

JOURNAL_SECONDS = 5.0
NOISE_TOKENS = 2048  # the noise sample's states are held in memory
POOL_TOKENS = 20_000  # of captures re-extracted once more when an earlier run was interrupted
MEANING_TOKENS = 2048  # tokens whose logits are computed; each costs a pass over the vocabulary


class Sampler:
    """Re-extracts planned captures; afterwards ``journal.records`` holds the outcome of each."""

    def __init__(self, session: Session, reference: Reference, journal: Journal) -> None:
        self.session = session
        self.reference = reference
        self.journal = journal
        self.pool = Pool(session.spec.hidden_size, session.row)
        self.noise = journal.noise or Noise.of([], [])
        self.tolerance = self._tolerance()
        sums = journal.state["meaning"]
        self.meaning = meaning.Meaning() if sums is None else meaning.Meaning(**sums)
        self.damaged: dict[str, str] = {}
        """Captures that could not be read: key → why. The structure's check had not come to their shards yet."""
        self._pending: list[Record] = []
        self._written = time.monotonic()

    def run(self, planned: Sequence[str]) -> None:
        """Measure the noise if that was not done, then re-extract what of ``planned`` is not in the journal, within the budget."""
        todo = [key for key in planned if key not in self.journal.records]
        if self.journal.noise is None and todo:
            todo = self._measure_noise(todo)
        entry = self.session.store.entry
        total = self.session.clock.affordable(entry(key).tokens for key in todo)
        try:
            with self.session.watch("re-extracting", bytes_unit=False) as update:
                for done, capture in enumerate(self.reference.captures(self._rows(todo)), 1):
                    self._judge(capture)
                    update(done, max(done, total))
        finally:
            self._write()

    def fill_pool(self, keys: Sequence[str]) -> None:
        """Re-extract captures judged by an earlier run, so that wrong states can be looked for among them."""
        missing: list[Row] = []
        tokens = 0
        for key in keys:
            if key not in self.pool and tokens < POOL_TOKENS:
                missing.append(self.session.row(key))
                tokens += len(missing[-1])
        for capture in self.reference.captures(iter(missing)):
            self.pool.add(capture.key, capture.states)

    def _tolerance(self) -> Tolerance:
        session = self.session
        return Tolerance.derive(session.spec, session.store.codec, self.noise, session.config.tolerance)

    def _measure_noise(self, todo: list[str]) -> list[str]:
        """Re-extract the first captures in batches and one by one; returns the keys that are left."""
        chosen: list[Row] = []
        tokens = 0
        for key in todo[: self.session.config.noise_captures]:
            row = self._row(key)
            if row is None:
                continue
            if chosen and tokens + len(row) > NOISE_TOKENS:
                break
            chosen.append(row)
            tokens += len(row)
        together = {capture.key: capture for capture in self.reference.captures(iter(chosen))}
        errors = [token_errors(self.reference.one(row), together[row.key].states) for row in chosen]
        self.session.clock.spent += 2 * tokens
        self.noise = Noise.of(errors, self.session.spec.taps)
        self.tolerance = self._tolerance()
        self.journal.save(noise=self.noise.to_dict())
        for capture in together.values():
            self._judge(capture)
        self._write()
        return [key for key in todo if key not in together and key not in self.damaged]

    def _rows(self, keys: Sequence[str]) -> Iterator[Row]:
        """Rows to re-extract, until a budget is used up. Tokens count when they are sent."""
        for key in keys:
            if self.session.clock.over:
                return
            row = self._row(key)
            if row is not None:
                self.session.clock.spent += len(row)
                yield row

    def _row(self, key: str) -> Row | None:
        """The row, None when its shard turns out to be damaged."""
        try:
            return self.session.row(key)
        except CorruptError as exc:
            self._damage(key, exc)
            return None

    def _damage(self, key: str, exc: CorruptError) -> None:
        self.session.unreadable.add(key)
        self.damaged[key] = str(exc)

    def _judge(self, reference: Capture) -> None:
        """Compare one capture of the store with its reference."""
        try:
            stored = self.session.stored(reference.key)
        except CorruptError as exc:
            self._damage(reference.key, exc)
            return
        if stored.states.shape != reference.states.shape:
            return  # the ids differ, which the structure's check has named
        errors, kept = token_errors(stored.states, reference.states), self.session.kept(reference.key)
        taps = {
            str(tap): TapError.summarize(
                errors.relative[k][kept[k]], errors.cosine[k][kept[k]], self.tolerance
            )
            for k, tap in enumerate(self.session.spec.taps)
        }
        self._pending.append(Record(reference.key, len(stored.ids), taps))
        self.pool.add(reference.key, reference.states)
        self._mean(stored, kept)
        if time.monotonic() - self._written > JOURNAL_SECONDS:
            self._write()

    def _mean(self, stored: Capture, kept: np.ndarray) -> None:
        """Compare the stored final state's logits with the target's, for the first captures."""
        final = meaning.stored_final(self.session.target, self.session.spec, stored.states)
        if final is None or self.meaning.tokens >= MEANING_TOKENS:
            return
        row = self.session.row(stored.key)
        logits = self.reference.logits(row.ids)
        where = kept[self.session.spec.tap_index(FINAL)]
        self.meaning += meaning.compare(self.session.target, final, row, where, logits)

    def _write(self) -> None:
        self.journal.add(self._pending)
        self.journal.save(meaning=asdict(self.meaning))
        self._pending = []
        self._written = time.monotonic()
