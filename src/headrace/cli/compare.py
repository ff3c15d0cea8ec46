"""``headrace compare``: error a tap between two stores of the same rows."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.errors import StoreError
from headrace.verify.config import CompareConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Compare and print. Raises StoreError (exit code 1) when a tap is beyond ``--tolerance``."""
    from headrace.cli.progress import progress
    from headrace.verify.compare import compare

    report = compare(config, output.say, progress)
    output.set(**report)
    columns = ["tap", "median error", "99 %", "max error", "min cosine"]
    body = [
        [t["tap"], f"{t['median']:.2e}", f"{t['p99']:.2e}", f"{t['max']:.2e}", f"{t['cosine_min']:.5f}"]
        for t in report["taps"]
    ]
    output.table(f"{report['captures']:,} captures, {report['tokens']:,} tokens in both", columns, body)
    if report["worst"]:
        rows = [
            [w["key"], w["tokens"], w["tap"], f"{w['median']:.2e}", f"{w['max']:.2e}"]
            for w in report["worst"]
        ]
        output.table("Worst captures", ["key", "tokens", "tap", "median error", "max error"], rows)
    for side in ("a", "b"):
        if report[f"only_{side}"]:
            output.say(f"{report[f'only_{side}']:,} captures are only in {report[f'store_{side}']}")
    if report["out"]:
        output.say(f"report and plot: {report['out']}")
    if not report["within_tolerance"]:
        worst = max(report["taps"], key=lambda tap: tap["median"])
        raise StoreError(
            f"tap {worst['tap']} differs by {worst['median']:.2e} (median), more than the {config.tolerance:g} allowed; "
            "run headrace verify on either store to see which is wrong"
        )
