"""``headrace verify``: prove a store, or name what is wrong with it."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.errors import StoreError
from headrace.verify.config import VerifyConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Verify and print the report. Raises StoreError (exit code 1) when the store is rejected."""
    from headrace.cli.progress import progress
    from headrace.verify.report import print_report
    from headrace.verify.run import verify

    report = verify(config, output.say, progress)
    output.set(**report)
    print_report(report, output)
    if not report["verify_ok"]:
        codes = ", ".join(fault["code"] for fault in report["faults"])
        raise StoreError(f"{config.store} is rejected: {codes}. {report['faults'][0]['mend'].capitalize()}")
