"""The stage behind ``headrace diagnose``: why is acceptance low? Runs every check of :mod:`headrace.draft.checks` and ranks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from headrace.draft.checkpoint import load_draft
from headrace.draft.checks import CHECKS
from headrace.draft.config import DiagnoseConfig
from headrace.draft.patient import Patient, Verdict
from headrace.draft.trainer import Machine
from headrace.draft.workers import join
from headrace.errors import InputError
from headrace.target import Target
from headrace.types import FINAL, Capture, Tap

ORDER: dict[Verdict, int] = {"fault": 0, "suspect": 1, "unknown": 2, "ok": 3}


def diagnose(config: DiagnoseConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Run every check; returns the drafter's numbers and the findings, worst first.

    Raises SpecMismatchError when drafter, store and target do not belong together, InputError when nothing can be judged.
    """
    patient = admit(config, say)
    whole = patient.whole
    findings = []
    for check in CHECKS:
        finding = check(patient)
        findings.append(finding)
        say(f"{finding.name}: {finding.verdict}. {finding.measured}")
    findings.sort(key=lambda f: (ORDER[f.verdict], -f.gain))
    return {
        "draft": str(config.draft),
        "store": str(config.store),
        "tokens": sum(len(c.ids) for c in patient.captures),
        **whole.summary(),
        "findings": [dataclasses.asdict(f) for f in findings],
        "faults": sum(f.verdict == "fault" for f in findings),
    }


def admit(config: DiagnoseConfig, say: Callable[[str], None]) -> Patient:
    """Open drafter, target and store, and read the captures to judge on."""
    from headrace.store import Store

    machine = Machine.settle(config.machine, join(config.machine).device)
    store = Store.open(config.store)
    target = Target.open(config.model or store.spec.target, store.spec.revision)
    draft = load_draft(config.draft, target, device=str(machine.device), dtype=machine.dtype)
    target.require(store.spec, f"store {config.store}")
    draft.model.config.require_spec(store.spec, f"store {config.store}")
    keys = _keys(config, store.keys())
    taps: tuple[Tap, ...] = (*draft.model.config.taps, FINAL)
    captures: list[Capture] = []
    tokens = 0
    for key in keys:
        captures.append(store.get(key, taps))
        tokens += len(captures[-1].ids)
        if tokens >= config.tokens:
            break
    if not captures:
        raise InputError(
            f"store {config.store} holds none of the rows to judge on; give its own rows, or leave --rows out"
        )
    say(f"{len(captures):,} rows, {tokens:,} tokens of {config.store}")
    judged = dataclasses.replace(draft, spec=store.spec)
    patient = Patient(judged, captures, target, machine, config.steps)
    patient.folder = config.draft
    return patient


def _keys(config: DiagnoseConfig, here: list[str]) -> list[str]:
    if config.rows is None:
        return here
    from headrace.data.rows import RowFolder

    held = set(here)
    return [key for key in RowFolder.open(config.rows).keys("validation") if key in held]
