"""Proving a store: every table, every key, every chunk, and how the shards fit together. Reads only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from headrace.errors import CorruptError, GoneError, InputError
from headrace.store.dataset import Dataset, read_dataset
from headrace.store.encode import kept_positions
from headrace.store.folder import INDEX, Folder
from headrace.store.format import Array
from headrace.store.index import Index
from headrace.store.reader import REQUESTS, open_shard
from headrace.store.shard import Shard
from headrace.types import Tap

Kind = Literal["dataset", "shard", "key", "states", "parent", "duplicate", "index"]
Progress = Callable[[int, int], None]
"""Called with (bytes checked, bytes to check)."""
_UNIT_BYTES = 16 << 20


class Problem(NamedTuple):
    """One thing that is not as it was written."""

    kind: Kind
    shard: str
    """Name of the shard, ``""`` for the files beside them."""
    slot: int
    """Capture in the shard, -1 for the whole file."""
    key: str
    message: str


@dataclass
class CheckReport:
    """What a check looked at and found."""

    shards: int = 0
    captures: int = 0
    tokens: int = 0
    bytes_total: int = 0
    """Payload bytes in the store."""
    bytes_checked: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is wrong with what was looked at."""
        return not self.problems


class _Unit(NamedTuple):
    """Chunks of one tap of one shard that one task checks."""

    name: str
    shard: Shard
    tap: Tap
    numbers: Array
    """int64, ascending places in the tap's chunk table."""
    nbytes: int


def check_store(
    folder: Folder,
    *,
    sample_bytes: int | None = None,
    keys: bool = True,
    threads: int = 2,
    progress: Progress | None = None,
) -> CheckReport:
    """Check a store: all tables, every key (unless ``keys`` is off: the digests prove the tables are as written, this proves
    the writer), and all payloads or about ``sample_bytes`` of them, picked anew at each call, at least one chunk a shard.

    Never raises for what is wrong with the store: that is in the report. Raises InputError when there is no store.
    """
    report = CheckReport()
    try:
        dataset = read_dataset(folder)
    except CorruptError as exc:
        report.problems.append(Problem("dataset", "", -1, "", str(exc)))
        return report
    except InputError:
        if not folder.shard_names():
            raise
        message = f"{folder.name} has shards and no dataset.json; run headrace repair"
        report.problems.append(Problem("dataset", "", -1, "", message))
        return report
    sound = check_tables(folder, dataset, report, keys=keys)
    report.problems += check_links(Index.empty().plus(sound), dict(sound))
    report.problems += _check_index(folder, dict(sound))
    report.bytes_total = sum(shard.source.size - shard.prefix.size for _, shard in sound)
    share = 1.0
    if sample_bytes is not None and sample_bytes < report.bytes_total:
        share = sample_bytes / report.bytes_total
    report.problems += _check_payloads(
        _units(sound, share), threads, report, progress, int(share * report.bytes_total)
    )
    return report


def check_tables(
    folder: Folder, dataset: Dataset, report: CheckReport, *, keys: bool
) -> list[tuple[str, Shard]]:
    """Open every shard and check what is not payload; returns the shards that can be read, with their names."""
    sound = []
    for name, shard in _open_all(folder, dataset):
        report.shards += 1
        if isinstance(shard, CorruptError):
            report.problems.append(Problem("shard", name, -1, "", str(shard)))
            continue
        report.captures += len(shard)
        report.tokens += len(shard.tables.ids)
        report.problems += _check_captures(name, shard) if keys else []
        sound.append((name, shard))
    return sound


def _open_all(folder: Folder, dataset: Dataset) -> Iterator[tuple[str, Shard | CorruptError]]:
    def open_one(name: str) -> tuple[str, Shard | CorruptError | None]:
        try:
            return name, open_shard(folder, name, dataset)
        except CorruptError as exc:
            return name, exc
        except GoneError:
            return name, None  # moved away by a repair that runs at the same time

    with ThreadPoolExecutor(REQUESTS if folder.remote else 1, "headrace-open") as pool:
        for name, shard in pool.map(open_one, folder.shard_names()):
            if shard is not None:
                yield name, shard


def _check_captures(name: str, shard: Shard) -> Iterator[Problem]:
    """Keys against ids and masks, counts against masks: what a wrong writer could have written with a right digest."""
    for slot in range(len(shard)):
        key, mask = shard.key(slot), shard.mask(slot)
        try:
            shard.check_key(slot)
        except CorruptError as exc:
            yield Problem("key", name, slot, key, str(exc))
            continue
        parent = shard.parent(slot)
        shared = parent[1] if parent else 0
        wrong = int(mask.sum()) != int(shard.tables.supervised[slot])
        for tap in shard.spec.taps:
            keep = kept_positions(mask, tap, shard.info.final_positions)
            wrong |= shard.rows(slot, tap) != (
                len(mask) - shared if keep is None else int(keep[shared:].sum())
            )
        if wrong:
            yield Problem(
                "key",
                name,
                slot,
                key,
                f"{shard.name}: the row counts of {key} do not fit its mask; run headrace repair",
            )


def check_links(index: Index, shards: dict[str, Shard]) -> list[Problem]:
    """Captures stored twice, and captures whose parent is not what they say."""
    problems = list(_check_repeats(index, shards))
    for name, shard in shards.items():
        if shard.tables.shared is None:
            continue
        for slot in np.flatnonzero(shard.tables.shared).tolist():
            message = _check_parent(index, shards, shard, slot)
            if message:
                problems.append(Problem("parent", name, slot, shard.key(slot), message))
    return problems


def _check_repeats(index: Index, shards: dict[str, Shard]) -> Iterator[Problem]:
    """Several passes bring other taps under the same key; the same tap twice is a second copy."""
    same = (index.hi[1:] == index.hi[:-1]) & (index.lo[1:] == index.lo[:-1])
    seen: set[Tap] = set()
    last = -1
    for row in (np.flatnonzero(same) + 1).tolist():
        if row != last + 1:
            seen = set(index.shards[index.shard[row - 1]].taps)
        about, last = index.shards[index.shard[row]], row
        if seen & set(about.taps):
            slot = int(index.slot[row])
            key = shards[about.name].key(slot)
            yield Problem(
                "duplicate",
                about.name,
                slot,
                key,
                f"{key} is stored again in {about.name}; run headrace repair",
            )
        seen |= set(about.taps)


def _check_parent(index: Index, shards: dict[str, Shard], shard: Shard, slot: int) -> str:
    parent = shard.parent(slot)
    assert parent is not None
    key, shared = parent
    child = shard.key(slot)
    for row in index.find(key):
        about = index.shards[index.shard[row]]
        if not set(shard.spec.taps) <= set(about.taps):
            continue
        ids = shards[about.name].ids(int(index.slot[row]))
        if shared <= len(ids) and bool((ids[:shared] == shard.ids(slot)[:shared]).all()):
            return ""
        return (
            f"{child} does not begin with the first {shared} tokens of its parent {key}; run headrace repair"
        )
    return f"{child} takes its first states from {key}, which is not stored; run headrace repair, then extract again"


def _check_index(folder: Folder, shards: dict[str, Shard]) -> list[Problem]:
    """The index on disk against the shards. A missing or short one is no fault: it is completed on opening."""
    data = folder.read_file(INDEX)
    if data is None:
        return []
    message = f"{folder.name}/{INDEX} is damaged; run headrace repair, which makes it again"
    index = Index.from_parquet(data)
    if index is None:
        return [Problem("index", "", -1, "", message)]
    known = [about for about in index.shards if about.name in shards]
    if any(shards[about.name].prefix.digest != about.digest for about in known):
        return [Problem("index", "", -1, "", message.replace("is damaged", "does not fit the shards"))]
    return []


# --- payloads -----------------------------------------------------------------------------------------------------------


def _units(shards: list[tuple[str, Shard]], share: float) -> Iterator[_Unit]:
    """The work, made as it is needed: a store of terabytes has millions of chunks."""
    for name, shard in shards:
        taps = list(shard.tables.ends)
        firsts = np.cumsum([0, *(len(shard.tables.ends[tap]) for tap in taps)])
        total = int(firsts[-1])
        picked = np.arange(total)
        if share < 1.0 and total:
            picked = np.sort(random.sample(range(total), max(1, int(share * total))))
        for tap, first, last in zip(taps, firsts[:-1], firsts[1:], strict=True):
            numbers = picked[(picked >= first) & (picked < last)] - first
            sizes = np.diff(shard.tables.ends[tap], prepend=0)[numbers]
            # cut where the running sum passes a multiple of the unit
            cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // _UNIT_BYTES)) + 1
            for some, bytes_ in zip(np.split(numbers, cuts), np.split(sizes, cuts), strict=True):
                if len(some):
                    yield _Unit(name, shard, tap, some, int(bytes_.sum()))


def _check_payloads(
    queue: Iterator[_Unit], threads: int, report: CheckReport, progress: Progress | None, total: int
) -> list[Problem]:
    problems: dict[tuple[str, int], Problem] = {}
    running: set[Future[tuple[int, list[Problem]]]] = set()
    with ThreadPoolExecutor(threads, "headrace-check") as pool:
        while True:
            while len(running) < 2 * threads and (unit := next(queue, None)) is not None:
                running.add(pool.submit(_check_unit, unit))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                size, found = future.result()
                report.bytes_checked += size
                problems.update({(p.shard, p.slot): p for p in found})
            if progress is not None:
                progress(report.bytes_checked, total)
    return sorted(problems.values())


def _check_unit(unit: _Unit) -> tuple[int, list[Problem]]:
    found = unit.shard.damaged(unit.tap, unit.numbers)
    problems = [Problem("states", unit.name, slot, unit.shard.key(slot), message) for slot, message in found]
    return unit.nbytes, problems
