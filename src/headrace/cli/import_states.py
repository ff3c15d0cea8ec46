"""``headrace import-states``: states of other tools → a store."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.store.config import ImportConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Import and print what became of every sample."""
    from headrace.cli.progress import progress
    from headrace.data.rows import RowFolder
    from headrace.store.foreign.importer import import_states

    rows = RowFolder.open(config.rows) if config.rows is not None else None
    with progress(f"import {config.source}", bytes_unit=False) as update:
        result = import_states(config, rows, update)
    output.set(**result)
    account = [("written", result.get("written", 0)), ("in the store already", result.get("present", 0))]
    account += [(f"dropped: {reason}", count) for reason, count in result["dropped"].items()]
    output.table(
        f"{result['samples']:,} samples",
        ["captures", "became"],
        [(f"{n:,}", what) for what, n in account if n],
    )
