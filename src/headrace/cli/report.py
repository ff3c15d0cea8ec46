"""``headrace report``: one self-contained HTML file about a run."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.monitor.config import ReportConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Write the file and say which of its checks hold."""
    from headrace.monitor.report import write_report

    result = write_report(config.run, config.out)
    output.set(**result)
    output.table(
        "Checks", ["holds", "what"], [("yes" if ok else "NO", what) for what, ok in result["checks"].items()]
    )
    output.say(f"{result['out']}: {result['bytes']:,} bytes")
