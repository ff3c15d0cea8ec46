"""``headrace diagnose``: why is acceptance low."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.draft.config import DiagnoseConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Measure every known cause and print what was found, worst first."""
    from headrace.draft.diagnose import diagnose

    result = diagnose(config, output.say)
    output.set(**result)
    accuracy = " ".join(f"{a:.3f}" for a in result["accuracy"])
    output.say(
        f"acceptance length {result['implied_length']:.3f} implied, {result['simulated_length']:.3f} simulated; accuracy {accuracy}"
    )
    rows = [
        (f["name"], f["verdict"], f"{f['gain']:+.3f}" if f["gain"] else "", f["mend"] or "")
        for f in result["findings"]
    ]
    output.table("Findings, worst first", ["check", "verdict", "length gained", "mend"], rows)
