"""``headrace repair``: drop what is broken, rebuild what is derived."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.cores import available_cores
from headrace.store.config import RepairConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Repair and print what was dropped."""
    from headrace.cli.progress import progress
    from headrace.store.folder import BROKEN
    from headrace.store.reader import Store
    from headrace.store.repair import repair_store

    path = config.store
    threads = config.threads or min(8, available_cores())
    with progress(f"repair {path}", bytes_unit=True) as update:
        report = repair_store(path, delete=config.delete, threads=threads, progress=update)
    store = Store.open(path)
    output.set(
        store=path,
        problems=len(report.checked.problems),
        dropped=report.dropped,
        duplicates_removed=report.duplicates,
        shards_moved=report.moved,
        shards_written=report.written,
        leftovers_removed=report.leftovers,
        rebuilt=report.rebuilt,
        captures=len(store),
    )
    for what, count in (
        ("captures dropped; extract brings them back", len(report.dropped)),
        ("second copies removed", report.duplicates),
        (
            "broken shards deleted" if config.delete else f"broken shards moved to {path}/{BROKEN}",
            len(report.moved),
        ),
        ("shards written from what was sound in them", len(report.written)),
        ("leftovers of dead writers removed", len(report.leftovers)),
    ):
        if count:
            output.say(f"{count:,} {what}")
    for name in report.rebuilt:
        output.say(f"{name} made again")
    output.say(f"{path}: {len(store):,} sound captures, {store.tokens:,} tokens")
