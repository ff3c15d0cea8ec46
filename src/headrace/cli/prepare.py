"""``headrace prepare``: conversations → rows (token ids and loss masks)."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.data.config import PrepareConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Prepare, and print what became of every record."""
    from headrace.data.prepare import prepare, summary

    result = prepare(config, output.say)
    output.set(**result)
    counts = result["counts"]
    output.table(
        f"Rows of {counts['records']:,} records",
        ["", ""],
        [("made", f"{counts['rows_made']:,} rows of {counts['records_kept']:,} records"), *summary(result)],
    )
    output.say(
        f"{result['out']}: {result['rows']:,} rows in {result['seconds']:.1f} s"
        + (" (reused)" if result["reused"] else "")
    )
