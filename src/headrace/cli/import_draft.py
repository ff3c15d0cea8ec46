"""``headrace import-draft``: a drafter of SGLang, vLLM or SpecForge → a Headrace drafter folder."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.draft.config import ImportConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Convert the folder and print what was found in it."""
    from headrace.draft.foreign import import_draft

    output.set(**import_draft(config, output.say))
