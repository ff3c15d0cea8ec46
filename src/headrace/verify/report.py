"""The report of a verification as one JSON object; ``headrace.cli.verify`` prints it for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._version import __version__
from headrace.verify.sample import detectable_share

if TYPE_CHECKING:
    from headrace.verify.config import VerifyConfig
    from headrace.verify.faults import Fault
    from headrace.verify.journal import Journal, Record
    from headrace.verify.sampler import Sampler
    from headrace.verify.session import Session
    from headrace.verify.structure import Structure


def build_report(
    session: Session,
    journal: Journal,
    structure: Structure,
    sampler: Sampler | None,
    planned: Sequence[str],
    faults: Sequence[Fault],
) -> dict[str, Any]:
    """Everything a reader or a script needs; ``verify_ok`` is the verdict."""
    config = session.config
    records = [journal.records[key] for key in planned if key in journal.records]
    share = detectable_share(len(session.store), len(records), config.confidence)
    complete = structure.complete and len(records) == len(planned) and sampler is not None
    return {
        "verify_ok": not faults,
        "verdict": "rejected" if faults else "accepted",
        "complete": complete,
        "faults": [fault.to_dict() for fault in faults],
        "store": str(config.store),
        "target": session.target.name,
        "structure": structure.to_dict(),
        "sample": {
            "captures": len(records),
            "planned": len(planned),
            "of": len(session.store),
            "tokens": sum(record.tokens for record in records),
            "failed": sum(record.failed for record in records),
            "confidence": config.confidence,
            "rules_out_share": share,
            "seed": config.seed,
            "suspects": dict(journal.state["suspects"]),
        },
        "taps": tap_table(session.spec.taps, records, sampler),
        "noise": None if sampler is None else sampler.noise.to_dict(),
        "tolerance": None
        if sampler is None
        else {"median": sampler.tolerance.median, "token": sampler.tolerance.token},
        "meaning": None if sampler is None or not sampler.meaning.tokens else sampler.meaning.to_dict(),
        "reference": None
        if sampler is None
        else {
            "engine": sampler.reference.engine.info.name,
            "version": sampler.reference.engine.info.version,
            "settings": sampler.reference.engine.info.settings,
        },
        "out": str(journal.folder),
        "seconds": round(session.clock.seconds, 3),
        "headrace": __version__,
    }


def unreadable_report(config: VerifyConfig, message: str) -> dict[str, Any]:
    """The report on a store that cannot even be opened."""
    from headrace.verify.faults import Fault

    return {
        "verify_ok": False,
        "verdict": "rejected",
        "complete": False,
        "faults": [Fault("store-damaged", message).to_dict()],
        "store": str(config.store),
        "target": config.model,
        "structure": {"complete": False, "lines": [["store", "cannot be opened"]]},
        "sample": {"captures": 0, "planned": 0, "of": 0, "tokens": 0, "failed": 0},
        "taps": [],
        "noise": None,
        "tolerance": None,
        "meaning": None,
        "reference": None,
        "out": None,
        "seconds": 0.0,
        "headrace": __version__,
    }


def tap_table(
    taps: Iterable[Any], records: Sequence[Record], sampler: Sampler | None
) -> list[dict[str, Any]]:
    """One entry a tap: errors over the re-extracted captures beside the noise of the reference."""
    table: list[dict[str, Any]] = []
    if not records or sampler is None:
        return table
    weights = np.array([record.tokens for record in records], dtype=float)
    for tap in map(str, taps):
        errors = [record.taps[tap] for record in records]
        table.append(
            {
                "tap": tap,
                "median": _weighted_median(np.array([e.median for e in errors]), weights),
                "max": max(e.maximum for e in errors),
                "cosine_min": min(e.cosine for e in errors),
                "noise": sampler.noise.taps.get(tap, 0.0),
                "bad_tokens": sum(e.bad for e in errors),
                "bad_captures": sum(e.bad > 0 for e in errors),
            }
        )
    return table


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    running = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(running, running[-1] / 2)])
