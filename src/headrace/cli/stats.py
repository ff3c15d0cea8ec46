"""``headrace stats``: length and mask histograms of rows."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.data.config import StatsConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Print the numbers, and draw them when asked to."""
    from headrace.data.rows import RowFolder
    from headrace.data.stats import Numbers, draw
    from headrace.errors import InputError

    folder = RowFolder.open(config.rows)
    if not len(folder):
        raise InputError(f"{config.rows} holds no rows; prepare some first")
    numbers = Numbers.read(folder)
    facts = numbers.describe()
    title = f"{config.rows}: {facts['rows']:,} rows, {facts['tokens']:,} tokens, {facts['supervised_share']:.1%} supervised"
    if config.picture is not None:
        draw(numbers, title, config.bins, config.picture)
    output.set(**facts, picture=str(config.picture) if config.picture else None)
    output.table(title, ["tokens", "rows", "of all tokens", ""], numbers.length_table(config.bins))
    columns = list(facts["lengths"])
    lengths = ["length", *(f"{facts['lengths'][c]:,.0f}" for c in columns)]
    shares = ["supervised share", *(f"{facts['shares'][c]:.1%}" for c in columns)]
    output.table("By row", ["", *columns], [lengths, shares])
    dropped = folder.manifest.get("counts", {}).get("dropped", {})
    if dropped:
        output.table("Dropped", ["reason", "count"], [(reason, f"{n:,}") for reason, n in dropped.items()])
    if config.picture is not None:
        output.say(f"picture: {config.picture}")
