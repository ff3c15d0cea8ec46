"""``headrace export-states``: a store → another tool's files."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.store.config import ExportConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Export and print how many samples were written."""
    from headrace.cli.progress import progress
    from headrace.store.foreign.exporter import export_states

    with progress(f"export {config.store}", bytes_unit=False) as update:
        result = export_states(config, update)
    output.set(**result)
    output.say(
        f"{result['out']}: {result['samples']:,} samples in the {config.layout} layout, {result['written']:,} written now"
    )
