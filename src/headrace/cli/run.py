"""``headrace run``: every stage of a recipe, and the closing table."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.errors import HeadraceError
from headrace.run import RunConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Run and print the table. Raises HeadraceError (exit code 1) when speculative output differs from plain decoding."""
    from headrace.run import closing_rows
    from headrace.run import run as run_recipe

    report = run_recipe(config, output.say)
    output.set(**report)
    output.table(f"{config.recipe}", ["", ""], closing_rows(report))
    if not report.get("output_ok", True):
        raise HeadraceError(
            "speculative decoding did not give the target's own output; see evaluate/manifest.json"
        )
