"""``headrace check``: every checksum of a store."""

from __future__ import annotations

import time

from headrace.cli.output import Output
from headrace.cores import available_cores
from headrace.errors import CorruptError
from headrace.store.config import CheckConfig as Config

__all__ = ["Config", "run"]

_SHOWN = 20


def run(config: Config, output: Output) -> None:
    """Check and print what is wrong. Raises CorruptError (exit code 1) when anything is."""
    from headrace.cli.progress import progress
    from headrace.store.check import check_store
    from headrace.store.folder import open_folder

    threads = config.threads or min(8, available_cores())
    began = time.monotonic()
    with progress(f"check {config.store}", bytes_unit=True) as update:
        report = check_store(
            open_folder(config.store),
            sample_bytes=int(config.sample) if config.quick else None,
            threads=threads,
            progress=update,
        )
    seconds = time.monotonic() - began
    output.set(
        store=config.store,
        mode="quick" if config.quick else "full",
        check_ok=report.ok,
        shards=report.shards,
        captures=report.captures,
        tokens=report.tokens,
        bytes_total=report.bytes_total,
        bytes_checked=report.bytes_checked,
        problems=[problem._asdict() for problem in report.problems],
        seconds=round(seconds, 3),
    )
    looked = f"{report.bytes_checked / 1e9:.2f} of {report.bytes_total / 1e9:.2f} GB of states"
    output.say(
        f"{config.store}: {report.shards:,} shards, {report.captures:,} captures, {report.tokens:,} tokens; "
        f"all tables and {looked} checked in {seconds:.1f} s"
    )
    if report.ok:
        output.say("nothing is wrong")
        return
    rows = [(p.kind, p.shard or "-", p.key or "-") for p in report.problems[:_SHOWN]]
    output.table(f"{len(report.problems)} problems", ["what", "shard", "key"], rows)
    first = report.problems[0].message
    raise CorruptError(f"{len(report.problems)} problems in {config.store}, the first: {first}")
