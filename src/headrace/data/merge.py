"""``merge``: several row folders → one, each row once, shuffled anew, and no row moved from validation into training.

A conversation that is held out in any of the folders is held out in the result, with all of its rows: folders may have
been split with different seeds or shares, and what was once validation must never be trained on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from headrace._version import __version__
from headrace.data.config import MergeConfig
from headrace.data.convert import (
    DROPPED_SCHEMA,
    HELD_OUT,
    ORDER,
    PART,
    SKETCH,
    SOURCE,
    WORK_SCHEMA,
    Converted,
)
from headrace.data.emit import EmitOptions, Emitter
from headrace.data.folder import WorkFolder, refuse_foreign_folder
from headrace.data.rows import KIND, RowFolder, RowWriter
from headrace.data.runs import Runs
from headrace.errors import CorruptError, HeadraceError, InputError, SpecMismatchError
from headrace.files import read_json
from headrace.types import hash_json

_SAME = ("tokenizer_hash", "template_hash")
_CARRIED = ("model", "revision", "target_config_hash", *_SAME)


def merge(config: MergeConfig, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Make ``config.out``; returns its manifest and ``seconds``, ``out``, ``reused``.

    Raises SpecMismatchError for folders of different tokenizers or templates, CorruptError for broken ones.
    """
    started = time.monotonic()
    refuse_foreign_folder(config.out, KIND)
    folders = [RowFolder.open(path) for path in config.folders]
    _check_kin(folders)
    key = hash_json(
        [
            __version__,
            config.seed,
            [f.manifest["content_hash"] for f in folders],
            [str(f.path) for f in folders],
        ]
    )
    manifest = _finished(config, key)
    reused = manifest is not None
    if manifest is None:
        with WorkFolder(config.out) as work:
            runs = Runs(work.path, key)
            _gather(folders, config.seed, runs)
            manifest = _write(config, folders, runs, key)
            work.remove()
    else:
        say(f"{config.out} was merged from the same rows; nothing to do")
    return {
        **manifest,
        "out": str(config.out),
        "reused": reused,
        "seconds": round(time.monotonic() - started, 3),
    }


def _check_kin(folders: list[RowFolder]) -> None:
    first = folders[0]
    for other in folders[1:]:
        for name in _SAME:
            if first.manifest.get(name) != other.manifest.get(name):
                raise SpecMismatchError(
                    f"{first.path} and {other.path} were made with different {name.removesuffix('_hash')}s "
                    f"({first.manifest.get(name)} and {other.manifest.get(name)}); prepare both with one model"
                )


def _finished(config: MergeConfig, key: str) -> dict[str, Any] | None:
    manifest = config.out / "manifest.json"
    try:
        if manifest.is_file() and read_json(manifest).get("inputs_key") == key:
            folder = RowFolder.open(config.out)
            return None if folder.check() else folder.manifest
    except (CorruptError, InputError):
        pass  # broken or of another format: it is made anew
    return None


def _gather(folders: list[RowFolder], seed: int, runs: Runs) -> None:
    """All rows into runs, from where an earlier merge was stopped."""
    held_out = {c for folder in folders for c in folder.column("conversation", "validation").to_pylist()}
    start_folder, start_row = runs.position
    for number, folder in enumerate(folders):
        row = 0
        for table in _tables(folder) if number >= start_folder else ():
            if number > start_folder or row >= start_row:
                part = Converted(_work_table(table, number, held_out, seed), DROPPED_SCHEMA.empty_table())
                part.records = part.kept = part.made = table.num_rows
                part.counts = Counter({f"shape:{folder.path}": table.num_rows})
                runs.add(part, (number, row + table.num_rows))
            row += table.num_rows


def _tables(folder: RowFolder) -> Iterator[pa.Table]:
    for split in folder.splits:
        with pq.ParquetFile(folder.path / f"{split}.parquet") as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)


def _work_table(table: pa.Table, number: int, held_out: set[str], seed: int) -> pa.Table:
    count = table.num_rows
    keys = table["key"].to_pylist()
    order = [xxhash.xxh3_64_intdigest(key.encode(), seed=seed & (2**64 - 1)) for key in keys]
    columns = {name: table[name] for name in table.schema.names}
    columns |= {
        ORDER: pa.array(order, pa.uint64()),
        SOURCE: pa.array(np.full(count, number, np.int32)),
        PART: pa.array(np.zeros(count, np.int32)),
        HELD_OUT: pa.array([c in held_out for c in table["conversation"].to_pylist()], pa.bool_()),
        SKETCH: pa.array([b""] * count, pa.binary()),
    }
    return pa.table({name: columns[name] for name in WORK_SCHEMA.names}).cast(WORK_SCHEMA)


def _write(config: MergeConfig, folders: list[RowFolder], runs: Runs, key: str) -> dict[str, Any]:
    groups = tuple(range(len(folders)))
    emitter = Emitter(EmitOptions(limits=tuple(0 for _ in folders), groups=groups), runs)
    with RowWriter(config.out) as writer:
        with emitter.open(writer.folder / "dropped.parquet"):
            for table in runs.merged():
                emitter.emit(table, writer)
        if runs.tally.made != emitter.kept + sum(emitter.dropped.values()):
            raise HeadraceError(
                "the account of the merge does not add up; this is a fault of Headrace, please report it"
            )
        if not emitter.kept:
            raise HeadraceError("the folders hold no rows; nothing was merged")
        writer.manifest = {
            **{name: folders[0].manifest[name] for name in _CARRIED if name in folders[0].manifest},
            "inputs_key": key,
            "sources": [
                {"spec": str(f.path), "content_hash": f.manifest["content_hash"], "rows": len(f)}
                for f in folders
            ],
            "options": {"seed": config.seed},
            **emitter.describe(),
        }
    return RowFolder.open(config.out).manifest
