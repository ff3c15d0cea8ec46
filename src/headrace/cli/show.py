"""``headrace show``: print rows with their supervised tokens marked."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.data.config import ShowConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Print each chosen row."""
    from headrace.data.rows import RowFolder
    from headrace.data.show import RowView, choose

    folder = RowFolder.open(config.rows)
    chosen = choose(folder, config)
    view = RowView.open(folder, config.model)
    color = output.stream.isatty() if config.color is None else config.color
    shown = []
    for number, row in chosen:
        origin = row.origin
        output.say(
            f"row {number} of {len(folder):,}  {row.key}  {len(row):,} tokens, {row.supervised:,} supervised  "
            f"{origin.source} line {origin.line}"
        )
        if config.ids:
            output.table("", ["position", "id", "loss", "token"], view.tokens(row))
        else:
            output.say(view.text(row, color))
        shown.append(
            {
                "number": number,
                "key": row.key,
                "tokens": len(row),
                "supervised": row.supervised,
                "source": origin.source,
                "line": origin.line,
                "conversation": origin.conversation,
                "stretches": [{"text": s.text, "supervised": s.supervised} for s in view.stretches(row)],
            }
        )
    output.set(rows=shown)
    output.say(
        "supervised tokens are "
        + ("green" if color else "between ⟦ and ⟧")
        + ("" if not config.ids else ", * in the table")
    )
