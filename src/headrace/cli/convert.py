"""``headrace convert``: rewrite a store with another codec or other taps."""

from __future__ import annotations

import time
from typing import Any

from headrace.cli.output import Output
from headrace.cores import available_cores
from headrace.store.config import ConvertConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Convert and print the sizes before and after."""
    from headrace.cli.progress import progress
    from headrace.store.convert import convert_store, taps_of
    from headrace.store.reader import Store
    from headrace.store.writer import WriterOptions

    source = Store.open(config.store)
    if config.taps:
        source = Store.open(config.store, taps_of(source, config.taps))
    began = time.monotonic()
    threads = config.threads or min(8, available_cores())
    with progress(f"convert {config.store}", bytes_unit=False) as update:
        result: dict[str, Any] = convert_store(
            source,
            config.out,
            codec=config.codec,
            final_positions=config.final_positions or None,
            allow_lossy=config.allow_lossy,
            options=WriterOptions(shard_bytes=int(config.shard_bytes), workers=threads),
            progress=update,
        )
    result["seconds"] = round(time.monotonic() - began, 3)
    output.set(**result)
    output.say(
        f"{config.out}: {result['captures']:,} captures ({result['present']:,} were there already), {result['tokens']:,} tokens; "
        f"{result['bytes_before'] / 1e9:.3f} GB → {result['bytes_stored'] / 1e9:.3f} GB in {result['seconds']:.1f} s"
    )
