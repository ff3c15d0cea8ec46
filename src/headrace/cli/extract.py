"""``headrace extract``: rows → store, through an inference engine."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.extract.config import ExtractConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Run the extraction and print what became of every row."""
    from headrace.extract.run import extract

    output.set(**extract(config, output.say))
