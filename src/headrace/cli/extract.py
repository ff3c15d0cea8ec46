"""``headrace extract``: rows → store, through an inference engine."""

from __future__ import annotations

from typing import Any

from headrace.cli.output import Output
from headrace.extract.config import ExtractConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Run the extraction and print what became of every row."""
    from headrace.extract.run import run_extraction

    outcome = run_extraction(config, output.say)
    output.set(**outcome.result)
    _print(outcome.result, output)
    outcome.done()


def _print(result: dict[str, Any], output: Output) -> None:
    from headrace.extract.disk import gigabytes
    from headrace.extract.view import duration

    account = [("stored", result["stored"])]
    account += [(f"skipped: {reason}", count) for reason, count in result["skipped_by_reason"].items()]
    account += [(f"failed: {kind}", count) for kind, count in result["failed_by_kind"].items()]
    account += [("not reached", result["not_reached"])] if result["not_reached"] else []
    output.table("Account", ["rows", "became"], [(f"{n:,}", what.replace("_", " ")) for what, n in account])
    output.say(
        f"{result['store']}: {result['captures']:,} captures, {result['tokens_stored']:,} tokens, "
        f"{gigabytes(result['bytes_raw'])} raw → {gigabytes(result['bytes_stored'])} stored ({result['ratio']:.2f}); "
        f"this session {result['tokens']:,} tokens in {duration(result['seconds'])} ({result['tokens_per_second']:,.0f} tokens/s)"
    )
