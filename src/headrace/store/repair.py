"""Mending a store: drop what is broken and only that, so that the next extract captures exactly that again.

A broken shard is first moved to ``broken/`` (a rename: of several repairs at a time one wins; in a bucket, which knows no
rename, two may save the same captures, and the next repair drops the second copies), then its sound captures are
written to a new shard. Killed in between, the store is sound and the captures not yet saved are simply extracted again.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.errors import CorruptError, HeadraceError, InputError
from headrace.store.check import CheckReport, Problem, Progress, check_links, check_store
from headrace.store.dataset import Dataset, create_dataset, read_dataset
from headrace.store.folder import (
    BROKEN,
    DATASET,
    INDEX,
    SHARDS,
    WritableFolder,
    new_shard_name,
    open_folder,
)
from headrace.store.index import Index
from headrace.store.publish import write_index, write_shard
from headrace.store.reader import open_shards
from headrace.store.shard import Shard
from headrace.store.transfer import salvage

log = logging.getLogger(__name__)
STALE_SECONDS = 86_400.0
"""Age at which a temporary file of an unknown host counts as abandoned."""
REMOTE_SAMPLE = 64 << 20
"""Payload of a store in a bucket that is read before it is added to: objects appear whole there, and every read travels."""


@dataclass
class RepairReport:
    """What a repair did."""

    checked: CheckReport
    dropped: dict[str, str] = field(default_factory=dict)
    """Key → why it was dropped; extract brings it back. Duplicates are not in here: one copy stays."""
    duplicates: int = 0
    """Second copies removed."""
    moved: list[str] = field(default_factory=list)
    """Files now under ``broken/`` (or deleted)."""
    written: list[str] = field(default_factory=list)
    """New shards holding the sound captures of the moved ones."""
    leftovers: list[str] = field(default_factory=list)
    """Temporary files of dead writers that were removed."""
    rebuilt: list[str] = field(default_factory=list)
    """``dataset.json`` or ``index.parquet``, when made again."""


def repair_store(
    place: str | os.PathLike[str] | WritableFolder,
    *,
    delete: bool = False,
    threads: int = 2,
    progress: Progress | None = None,
) -> RepairReport:
    """Check all of a store and mend what can be mended. With ``delete``, broken files are deleted instead of kept.

    Raises InputError when there is no store, CorruptError when ``dataset.json`` is lost and the shards do not agree on it.
    """
    folder = open_folder(place)
    leftovers = folder.remove_leftovers(STALE_SECONDS)
    rebuilt = [DATASET] if _restore_dataset(folder) else []
    checked = check_store(folder, threads=threads, progress=progress)
    report = RepairReport(checked, leftovers=leftovers, rebuilt=rebuilt)
    mend(folder, read_dataset(folder), checked.problems, report)
    if folder.read_file(INDEX) is None or any(problem.kind == "index" for problem in checked.problems):
        report.rebuilt.append(INDEX)
        folder.remove_file(INDEX)
    write_index(folder, read_dataset(folder))
    if delete:
        for name in report.moved:
            folder.remove_file(f"{BROKEN}/{name}")
    return report


def heal_store(
    place: str | os.PathLike[str] | WritableFolder, dataset: Dataset, sample_bytes: int
) -> RepairReport | None:
    """Check the store before it is added to, and take out what is broken; None when nothing was.

    Up to ``sample_bytes`` of payload are checked (all of a smaller store, a random sample of a larger one; at most
    REMOTE_SAMPLE in a bucket), the tables of every shard always. What is dropped is no longer in the store, so an extraction captures it again.
    """
    folder = open_folder(place)
    sample_bytes = min(sample_bytes, REMOTE_SAMPLE) if folder.remote else sample_bytes
    checked = check_store(folder, sample_bytes=sample_bytes, keys=False)
    broken = [problem for problem in checked.problems if problem.kind not in ("duplicate", "index")]
    if not broken:
        return None
    for problem in broken:
        log.warning("%s", problem.message)
    report = RepairReport(checked)
    mend(folder, dataset, broken, report)
    log.warning(
        "%s: %d broken shards set aside; what they alone held is captured again",
        folder.name,
        len(report.moved),
    )
    return report


def mend(folder: WritableFolder, dataset: Dataset, problems: Iterable[Problem], report: RepairReport) -> None:
    """Take the broken captures and shards out of the store, then whatever hung on them."""
    todo = list(problems)
    while todo:
        _mend_once(folder, todo, report)
        # children of what was dropped have lost their first states
        shards = dict(open_shards(folder, folder.shard_names(), dataset))
        todo = [p for p in check_links(Index.empty().plus(shards.items()), shards) if p.kind == "parent"]


def _mend_once(folder: WritableFolder, problems: list[Problem], report: RepairReport) -> None:
    by_shard: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        if problem.shard:
            by_shard[problem.shard].append(problem)
    for name, found in sorted(by_shard.items()):
        if not folder.set_aside(f"{SHARDS}/{name}"):
            continue
        report.moved.append(name)
        _save_sound(folder, name, found, report)


def _save_sound(folder: WritableFolder, name: str, found: list[Problem], report: RepairReport) -> None:
    if any(problem.slot < 0 for problem in found):
        log.warning(
            "%s/%s/%s could not be read at all; its captures have to be extracted again",
            folder.name,
            BROKEN,
            name,
        )
        return
    shard = Shard(folder.open_broken(name))
    bad = {problem.slot: problem for problem in found}
    builder, more = salvage(shard, [slot for slot in range(len(shard)) if slot not in bad])
    for slot, problem in bad.items():
        if problem.kind == "duplicate":
            report.duplicates += 1
        else:
            report.dropped[shard.key(slot)] = problem.message
    report.dropped |= {shard.key(slot): f"{shard.name}: its states are damaged" for slot in more}
    if builder.captures:
        new = new_shard_name(len(report.written))
        write_shard(folder, new, builder)
        report.written.append(new)


def _restore_dataset(folder: WritableFolder) -> bool:
    """Make a lost or damaged ``dataset.json`` again from what the shards say; True when that was needed."""
    try:
        read_dataset(folder)
        return False
    except CorruptError:
        folder.set_aside(DATASET)
    except InputError:
        if not folder.shard_names():
            raise
    found: Dataset | None = None
    for name in folder.shard_names():
        try:
            info = Shard(folder.open_shard(name)).info
        except HeadraceError:
            continue
        mine = Dataset(
            spec=info.spec, codec=info.codec, final_positions=info.final_positions, provenance=info.provenance
        )
        if found is None:
            found = mine
        found.require_same(mine, f"{folder.name}/{SHARDS}/{name}", any_taps=True)
    if found is None:
        raise CorruptError(
            f"{folder.name} has neither a readable {DATASET} nor a readable shard; nothing can be saved, extract again"
        )
    create_dataset(folder, found)
    return True
