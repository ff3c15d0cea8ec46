"""``headrace verify``: prove a store, or name what is wrong with it."""

from __future__ import annotations

from typing import Any

from headrace.cli.output import Output
from headrace.errors import StoreError
from headrace.verify.config import VerifyConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Verify and print the report. Raises StoreError (exit code 1) when the store is rejected."""
    from headrace.cli.progress import progress
    from headrace.verify.run import verify

    report = verify(config, output.say, progress)
    output.set(**report)
    print_report(report, output)
    if not report["verify_ok"]:
        codes = ", ".join(fault["code"] for fault in report["faults"])
        raise StoreError(f"{config.store} is rejected: {codes}. {report['faults'][0]['mend'].capitalize()}")


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
