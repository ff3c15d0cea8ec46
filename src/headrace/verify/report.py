"""The report of a verification: one JSON object, and the same as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._version import __version__
from headrace.verify.sample import detectable_share

if TYPE_CHECKING:
    from headrace.cli.output import Output
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


def print_report(report: dict[str, Any], output: Output) -> None:
    """The report as tables and sentences."""
    structure, sample = report["structure"], report["sample"]
    output.table("Structure", ["check", "result"], structure["lines"])
    if report["taps"]:
        columns = ["tap", "median error", "max error", "min cosine", "noise", "bad tokens", "bad captures"]
        body = [
            [
                t["tap"],
                f"{t['median']:.2e}",
                f"{t['max']:.2e}",
                f"{t['cosine_min']:.5f}",
                f"{t['noise']:.2e}",
                t["bad_tokens"],
                t["bad_captures"],
            ]
            for t in report["taps"]
        ]
        title = f"{sample['captures']:,} of {sample['of']:,} captures re-extracted with {report['reference']['engine']}"
        output.table(title, columns, body)
    if report["meaning"]:
        m = report["meaning"]
        output.say(
            f"lm_head of the stored final state picks the target's greedy token in {m['greedy_agreement']:.2%} of "
            f"{m['tokens']:,} places ({m['clear_agreement']:.2%} where it is no near-tie); perplexity of the supervised tokens "
            f"{m['perplexity_stored']:.4f} stored, {m['perplexity_target']:.4f} target"
        )
    for fault in report["faults"]:
        output.say(f"FAULT {fault['code']}: {fault['meaning']}. {fault['detail']}. Mend: {fault['mend']}.")
    output.say(_verdict(report))


def _verdict(report: dict[str, Any]) -> str:
    if report["faults"]:
        return f"rejected: {', '.join(fault['code'] for fault in report['faults'])}"
    sample = report["sample"]
    more = (
        ""
        if report["complete"]
        else "; the budget ended before the planned sample did, run it again to go on"
    )
    if sample["captures"] >= sample["of"]:
        return f"accepted: all {sample['of']:,} captures re-extracted{more}"
    return (
        f"accepted: with {sample['confidence']:.0%} confidence fewer than {sample['rules_out_share']:.2%} of the captures "
        f"are wrong{more}"
    )
