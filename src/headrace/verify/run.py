"""The verification itself: structure, scan, sample, meaning, diagnosis, verdict; each step goes on where an earlier run stopped."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.data.rows import RowFolder
from headrace.errors import CorruptError
from headrace.files import write_json
from headrace.store import Store
from headrace.target import Target
from headrace.types import Row, hash_json
from headrace.verify import meaning
from headrace.verify.config import VerifyConfig
from headrace.verify.diagnose import Diagnoser
from headrace.verify.elsewhere import Elsewhere
from headrace.verify.explain import faults_of
from headrace.verify.faults import Fault
from headrace.verify.journal import Journal
from headrace.verify.problem import Finding
from headrace.verify.reference import Reference
from headrace.verify.report import build_report, unreadable_report
from headrace.verify.sample import sample_size, spread
from headrace.verify.sampler import Sampler
from headrace.verify.scan import scan_store
from headrace.verify.session import Clock, Say, Session, Watch, lines
from headrace.verify.structure import check_structure

DIAGNOSED = 12  # captures explained in one run; a fault that needs more to be named is several faults
NEAREST_CHECKED = 3  # sound captures whose taps are compared with their neighbours
MOST_SUSPECTS = 64  # suspects put before the random sample


def verify(config: VerifyConfig, say: Say | None = None, watch: Watch | None = None) -> dict[str, Any]:
    """Verify a store and return the report: ``verify_ok`` is the verdict, ``faults`` what is wrong, by name.

    ``say`` takes a line for a person now and then, ``watch`` shows progress (lines to ``say`` when not given).

    Raises InputError or ConfigError when store, rows or target cannot be opened, EngineError when the reference fails.
    A store that is wrong raises nothing: the verdict says so.
    """
    say = say or (lambda _text: None)
    try:
        store = Store.open(config.store)
    except CorruptError as exc:
        return unreadable_report(config, str(exc))
    session = Session(
        config=config,
        say=say,
        watch=watch or functools.partial(lines, say),
        store=store,
        target=Target.open(config.model, config.revision),
        rows=None if config.rows is None else RowFolder.open(config.rows),
        clock=Clock(config.budget_minutes, config.budget_tokens),
    )
    return Verification(session, config.out or _default_out(config.store)).run()


def _default_out(store: str) -> Path:
    """Beside the store; for a URL, its last part in the current folder."""
    path = store.rstrip("/")
    return Path(f"{path.rsplit('/', 1)[-1] if '://' in path else path}.verify")


class Verification:
    """One run of :func:`verify`; the steps are called in order by :meth:`run`."""

    def __init__(self, session: Session, out: Path) -> None:
        self.session = session
        self.out = out
        self.journal = Journal.open(out, self._identity())
        self.excused: set[str] = set()
        """Captures beyond the tolerance that came out right when looked at alone."""

    def run(self) -> dict[str, Any]:
        """All steps. Returns the report, which is written to the output folder too."""
        session = self.session
        structure = check_structure(session, self.journal)
        faults = list(structure.faults)
        planned: list[str] = []
        sampler: Sampler | None = None
        if structure.can_compare:
            suspects, broken = scan_store(session, self.journal)
            faults += broken
            planned = self.plan(suspects)
            spec = session.spec
            options = session.config.engine_options
            with Reference.open(session.config.engine, session.target, spec, options) as reference:
                sampler = Sampler(session, reference, self.journal)
                budget = session.config.budget_tokens
                limit = f", at most {budget:,} tokens" if budget else ""
                session.say(
                    f"re-extracting a sample of {len(planned):,} of {len(session.store):,} captures{limit} with {reference.engine.info.name}"
                )
                sampler.run(planned)
                named = {fault.code for fault in faults}
                faults += [fault for fault in self.explain(sampler, planned) if fault.code not in named]
                faults += meaning.judge(sampler.meaning) + _damaged(sampler)
        report = build_report(session, self.journal, structure, sampler, planned, faults)
        report["sample"]["excused"] = len(self.excused)
        write_json(self.out / "report.json", report)
        return report

    def plan(self, suspects: dict[str, str]) -> list[str]:
        """Keys to re-extract: suspects, then a random sample spread over the shards."""
        session = self.session
        shards = session.shards()
        readable = {key for keys in shards.values() for key in keys}
        size = sample_size(len(readable), session.config.confidence, session.config.fault_share)
        first = [key for key in suspects if key in readable][:MOST_SUSPECTS]
        drawn = spread(shards, session.config.seed)[:size]
        return list(dict.fromkeys([*first, *drawn]))

    def explain(self, sampler: Sampler, planned: list[str]) -> list[Fault]:
        """Diagnose captures beyond the tolerance, and check that sound ones are nearest to what the spec claims."""
        failed = [key for key in planned if key in self.journal.records and self.journal.records[key].failed]
        sound = [
            key for key in planned if key in self.journal.records and not self.journal.records[key].failed
        ]
        if not failed and not sound:
            return []
        if failed:
            sampler.fill_pool([*failed, *sound])
        elsewhere = Elsewhere(sampler.reference, sampler.pool, self.session.neighbours)
        diagnoser = Diagnoser(sampler.reference, sampler.tolerance, elsewhere)
        findings = self._diagnose(diagnoser, failed)
        wrong = len(failed) - len(self.excused)
        scope = f"{wrong} of {len(failed) + len(sound)} re-extracted captures are wrong"
        faults = faults_of(findings, self.session.spec, scope)
        return faults or self._nearest(diagnoser, sound)

    def _diagnose(self, diagnoser: Diagnoser, failed: list[str]) -> list[Finding]:
        """Explain captures until DIAGNOSED of them are; those that are right after all are excused.

        A capture can be beyond the tolerance in a batch and right when re-extracted alone: then it is the reference that varies.
        """
        findings: list[Finding] = []
        explained: set[str] = set()
        for key in self._worth_diagnosing(failed):
            if len(explained) >= DIAGNOSED:
                break
            found = self._findings(diagnoser, key)
            findings += found
            (explained if found else self.excused).add(key)
        for key in list(dict.fromkeys(f.other for f in findings if f.other in failed)):
            if key not in explained:  # whether two captures hold each other's states
                findings += self._findings(diagnoser, key)
        return findings

    def _nearest(self, diagnoser: Diagnoser, sound: list[str]) -> list[Fault]:
        """A tap within the tolerance that another boundary fits clearly better, in every capture looked at, is a fault."""
        some = sorted(
            sound[: 8 * NEAREST_CHECKED], key=lambda key: -min(64, self.journal.records[key].tokens)
        )
        looked = some[:NEAREST_CHECKED]
        by_pattern: dict[str, list[Finding]] = {}
        for key in looked:
            for finding in diagnoser.nearest_is_claimed(*self._capture(key)):
                by_pattern.setdefault(finding.detail, []).append(finding)
        everywhere = [f for found in by_pattern.values() if len(found) == len(looked) for f in found]
        return faults_of(
            everywhere, self.session.spec, "The errors are within the tolerance, but this is nearer"
        )

    def _capture(self, key: str) -> tuple[Row, torch.Tensor, np.ndarray]:
        return self.session.row(key), self.session.stored(key).states, self.session.kept(key)

    def _findings(self, diagnoser: Diagnoser, key: str) -> list[Finding]:
        self.session.say(f"diagnosing capture {key}")
        return diagnoser.diagnose(*self._capture(key))

    def _worth_diagnosing(self, failed: list[str]) -> list[str]:
        """All of them in the order of use: one of each pattern of failing taps, whole and partial failures apart, then the next."""
        patterns: dict[tuple[str, ...], list[str]] = {}
        for key in failed:
            record = self.journal.records[key]
            name = tuple(
                f"{tap}{'' if e.bad < record.tokens else '*'}" for tap, e in record.taps.items() if e.bad
            )
            patterns.setdefault(name, []).append(key)
        rounds = itertools.zip_longest(*patterns.values())
        return [key for some in rounds for key in some if key is not None]

    def _identity(self) -> dict[str, Any]:
        """What a journal must agree on to be continued."""
        session, config = self.session, self.session.config
        reference = hash_json([config.engine, config.engine_options, session.target.weights_hash])
        return {
            "spec": hash_json(session.spec.to_dict()),
            "captures": len(session.store),
            "keys": hash_json(session.store.keys()),
            "reference": reference,
            "seed": config.seed,
            "tolerance": config.tolerance,
        }


def _damaged(sampler: Sampler) -> list[Fault]:
    """Captures of shards not checked yet that turned out to be damaged when they were read."""
    if not sampler.damaged:
        return []
    keys = list(sampler.damaged)
    return [Fault("checksum", sampler.damaged[keys[0]], len(keys), tuple(keys[:5]))]
