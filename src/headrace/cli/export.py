"""``headrace export``: a drafter as a folder that SGLang or vLLM serves."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.draft.serving import ExportConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Export and say what was written."""
    from headrace.draft.export import export

    manifest = export(config, output.say)
    output.set(**manifest)
    output.table(
        f"exported for {manifest['engine']} {manifest['engine_version']}",
        ["", ""],
        [
            ["folder", manifest["out"]],
            ["taps (boundaries)", str(manifest["taps"])],
            [f"tap ids of {manifest['engine']}", str(manifest["engine_tap_ids"])],
            ["tensors", str(len(manifest["tensors"]))],
            ["bytes", f"{manifest['bytes']:,}"],
            ["weights", manifest["weights_hash"]],
            ["read back", "equal, bit by bit"],
        ],
    )
