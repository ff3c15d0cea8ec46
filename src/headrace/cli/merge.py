"""``headrace merge``: several row folders → one, deduplicated."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.data.config import MergeConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Merge, and print what came of it."""
    from headrace.data.merge import merge

    result = merge(config, output.say)
    output.set(**result)
    counts = result["counts"]
    lines = [(source["spec"], f"{source['rows']:,} rows") for source in result["sources"]]
    lines += [(f"dropped: {reason}", f"{n:,}") for reason, n in counts["dropped"].items()]
    lines += [
        (name, f"{entry['rows']:,} rows, {entry['tokens']:,} tokens")
        for name, entry in result["splits"].items()
    ]
    output.table(f"Merged into {result['out']}", ["", ""], lines)
    output.say(
        f"{result['out']}: {result['rows']:,} rows in {result['seconds']:.1f} s"
        + (" (reused)" if result["reused"] else "")
    )
