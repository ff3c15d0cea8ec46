"""Mending a store: drop what is broken and only that, so that the next extract captures exactly that again.

A broken shard is first moved to ``broken/`` (a rename: of several repairs at a time one wins), then its sound captures are
written to a new shard. Killed in between, the store is sound and the captures not yet saved are simply extracted again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import CorruptError, HeadraceError, InputError
from headrace.files import fsync_folder
from headrace.store.check import CheckReport, Problem, Progress, check_links, check_store
from headrace.store.dataset import Dataset, create_dataset, read_dataset
from headrace.store.folder import (
    DATASET,
    INDEX,
    SHARDS,
    LocalFolder,
    MappedFile,
    new_shard_name,
    remove_leftovers,
)
from headrace.store.index import Index
from headrace.store.publish import write_index, write_shard
from headrace.store.reader import open_shard
from headrace.store.shard import Shard
from headrace.store.transfer import salvage

log = logging.getLogger(__name__)
BROKEN = "broken"
STALE_SECONDS = 86_400.0
"""Age at which a temporary file of an unknown host counts as abandoned."""


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
    path: Path, *, delete: bool = False, threads: int = 2, progress: Progress | None = None
) -> RepairReport:
    """Check all of a store and mend what can be mended. With ``delete``, broken files are deleted instead of kept.

    Raises InputError when there is no store, CorruptError when ``dataset.json`` is lost and the shards do not agree on it.
    """
    folder = LocalFolder(path)
    leftovers = remove_leftovers(path, STALE_SECONDS)
    rebuilt = [DATASET] if _restore_dataset(path, folder) else []
    checked = check_store(folder, threads=threads, progress=progress)
    report = RepairReport(checked, leftovers=leftovers, rebuilt=rebuilt)
    mend(path, read_dataset(folder), checked.problems, report)
    if folder.read_file(INDEX) is None or any(problem.kind == "index" for problem in checked.problems):
        report.rebuilt.append(INDEX)
        (path / INDEX).unlink(missing_ok=True)
    write_index(path, read_dataset(folder))
    if delete:
        for name in report.moved:
            (path / BROKEN / name).unlink(missing_ok=True)
    return report


def heal_store(path: Path, dataset: Dataset, sample_bytes: int) -> RepairReport | None:
    """Check the store before it is added to, and take out what is broken; None when nothing was.

    Up to ``sample_bytes`` of payload are checked (all of a smaller store, a random sample of a larger one), the tables of
    every shard always. What is dropped is no longer in the store, so an extraction captures it again.
    """
    checked = check_store(LocalFolder(path), sample_bytes=sample_bytes, keys=False)
    broken = [problem for problem in checked.problems if problem.kind not in ("duplicate", "index")]
    if not broken:
        return None
    for problem in broken:
        log.warning("%s", problem.message)
    report = RepairReport(checked)
    mend(path, dataset, broken, report)
    log.warning(
        "%s: %d broken shards set aside; what they alone held is captured again", path, len(report.moved)
    )
    return report


def mend(path: Path, dataset: Dataset, problems: Iterable[Problem], report: RepairReport) -> None:
    """Take the broken captures and shards out of the store, then whatever hung on them."""
    todo = list(problems)
    while todo:
        _mend_once(path, todo, report)
        # children of what was dropped have lost their first states
        folder = LocalFolder(path)
        shards = {name: open_shard(folder, name, dataset) for name in folder.shard_names()}
        todo = [p for p in check_links(Index.empty().plus(shards.items()), shards) if p.kind == "parent"]


def _mend_once(path: Path, problems: list[Problem], report: RepairReport) -> None:
    by_shard: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        if problem.shard:
            by_shard[problem.shard].append(problem)
    for name, found in sorted(by_shard.items()):
        try:
            (path / BROKEN).mkdir(exist_ok=True)
            (path / SHARDS / name).rename(path / BROKEN / name)
        except FileNotFoundError:  # another repair was faster
            continue
        for folder in (path / SHARDS, path / BROKEN):
            fsync_folder(folder)
        report.moved.append(name)
        _save_sound(path, name, found, report)


def _save_sound(path: Path, name: str, found: list[Problem], report: RepairReport) -> None:
    if any(problem.slot < 0 for problem in found):
        log.warning(
            "%s/%s could not be read at all; its captures have to be extracted again", path / BROKEN, name
        )
        return
    shard = Shard(MappedFile(path / BROKEN / name))
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
        write_shard(path, new, builder)
        report.written.append(new)


def _restore_dataset(path: Path, folder: LocalFolder) -> bool:
    """Make a lost or damaged ``dataset.json`` again from what the shards say; True when that was needed."""
    try:
        read_dataset(folder)
        return False
    except CorruptError:
        (path / BROKEN).mkdir(exist_ok=True)
        (path / DATASET).rename(path / BROKEN / DATASET)
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
            f"{path} has neither a readable {DATASET} nor a readable shard; nothing can be saved, extract again"
        )
    create_dataset(path, found)
    return True
