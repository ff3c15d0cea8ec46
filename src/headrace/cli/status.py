"""``headrace status``: how a running, finished or crashed extraction stands."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.cli.output import Output
from headrace.monitor.config import StatusConfig as Config

if TYPE_CHECKING:
    from headrace.monitor.status import Status

__all__ = ["Config", "run"]
OVER = ("finished", "failed", "interrupted", "crashed")


def run(config: Config, output: Output) -> None:
    """Print the status once, or until the run is over with ``--watch``."""
    from headrace.monitor.status import read_status

    status = read_status(config.run)
    while config.watch and status.state not in OVER:
        output.say(headline(status))
        time.sleep(config.seconds)
        status = read_status(config.run)
    output.set(**status.to_json())
    output.say(
        f"{status.run}: {status.model} through {status.engine}, taps {', '.join(map(str, status.taps))}, {status.codec}"
    )
    output.say(headline(status))
    for warning in status.warnings:
        output.say(f"WARNING: {warning}")
    if status.norms:
        columns = ["tap", "median", "1 %", "99 %", "largest", "lately"]
        keys = ("tap", "median", "low", "high", "largest", "recent_median")
        output.table("Norms", columns, [[_figure(tap[k]) for k in keys] for tap in status.norms])
    if status.failures:
        shown = status.failures[-10:]
        rows = [(f["key"][:12], f["kind"], f["tries"], f["origin"], f["message"]) for f in shown]
        output.table(
            f"Rows without a capture ({status.failures_total})",
            ["key", "kind", "tries", "origin", "reason"],
            rows,
        )
    if status.error:
        output.say(f"ended with: {status.error}")


def headline(status: Status) -> str:
    """State and progress in one line."""
    from headrace.extract.progress import Snapshot
    from headrace.extract.view import duration, progress_line

    age = (
        ""
        if status.age_seconds is None or status.state in OVER
        else f" (last sign {duration(status.age_seconds)} ago)"
    )
    line = f"{status.state}{age}, session {status.sessions}, started {status.started}"
    if status.progress is None:
        return line
    known = {k: v for k, v in status.progress.items() if k not in ("time", "event")}
    return f"{line}: {progress_line(Snapshot(**known))}"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
