"""The part of a verification that needs no model: files, checksums, counts, and that every capture is its row's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import SpecMismatchError
from headrace.store.check import Problem, check_links, check_store
from headrace.store.folder import INDEX, Folder, Source
from headrace.store.index import ShardRow
from headrace.store.reader import open_shard
from headrace.types import Row, row_key
from headrace.verify.faults import Fault
from headrace.verify.journal import Journal
from headrace.verify.session import Session

EXAMPLES = 5


@dataclass
class Structure:
    """What was found. ``faults`` may hold anything of the catalogue's first part."""

    faults: list[Fault] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    """For people: what was checked, and the result."""
    complete: bool = True
    """Every shard was read; False when the time budget ended before."""
    can_compare: bool = True
    """The target is the store's, and there are captures to compare."""
    numbers: dict[str, Any] = field(default_factory=dict)

    def note(self, what: str, result: str) -> None:
        """One line of the table."""
        self.lines.append((what, result))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"complete": self.complete, "lines": [list(line) for line in self.lines], **self.numbers}


@dataclass
class _Damage:
    """What is wrong with the shards read so far: fault code → key or file → sentence."""

    found: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    """Captures whose states cannot be trusted."""

    def add(self, code: str, where: str, message: str) -> None:
        """One more."""
        self.found.setdefault(code, {})[where] = message

    @property
    def count(self) -> int:
        """Problems in all."""
        return sum(len(found) for found in self.found.values())


class _OneShard:
    """A store's folder as if it held one shard, so that the store's own check can be made shard by shard and go on later."""

    def __init__(self, folder: Folder, shard: str) -> None:
        self.name = folder.name
        self.remote, self.cache = folder.remote, folder.cache
        self._folder, self._shard = folder, shard

    def read_file(self, name: str) -> bytes | None:
        """The index is of all shards: it is compared by the caller."""
        return None if name == INDEX else self._folder.read_file(name)

    def shard_names(self) -> list[str]:
        """The one."""
        return [self._shard]

    def open_shard(self, name: str) -> Source:
        """As in the whole folder."""
        return self._folder.open_shard(name)


def check_structure(session: Session, journal: Journal) -> Structure:
    """Check target, rows and every shard; damaged captures are added to ``session.unreadable``."""
    structure = Structure()
    _check_target(session, structure)
    _check_coverage(session, structure)
    _check_shards(session, journal, structure)
    if not len(session.store):
        structure.can_compare = False
    return structure


def _check_target(session: Session, structure: Structure) -> None:
    try:
        session.target.require(session.spec, f"store {session.store.name}")
        structure.note("target, tokenizer and template", f"those of {session.target.name}")
    except SpecMismatchError as exc:
        structure.can_compare = False
        structure.faults.append(Fault("spec-mismatch", str(exc)))
        structure.note("target, tokenizer and template", "others than the store's")


def _check_coverage(session: Session, structure: Structure) -> None:
    """Every row has a capture and every capture a row."""
    store = session.store
    structure.numbers.update(captures=len(store), tokens=store.tokens, supervised=store.supervised)
    structure.note(
        "captures", f"{len(store):,} with {store.tokens:,} tokens, {store.supervised:,} supervised"
    )
    if not len(store):
        structure.faults.append(Fault("rows-missing", f"{store.name} holds no captures"))
    if session.rows is None:
        structure.note("rows", "not given: captures are only compared with their own keys")
        return
    rows = session.rows
    missing = [key for key in rows.keys() if key not in store]  # noqa: SIM118 - a row folder's iteration is of rows
    foreign = [key for key in store if key not in rows]
    structure.numbers.update(rows=len(rows), rows_missing=len(missing), foreign=len(foreign))
    structure.note(
        "rows", f"{len(rows):,}: {len(missing):,} without a capture, {len(foreign):,} captures without a row"
    )
    if len(missing) > session.config.missing_share * len(rows):
        detail = f"{len(missing):,} of {len(rows):,} rows have no capture, {missing[0]} is the first"
        structure.faults.append(Fault("rows-missing", detail, len(missing), tuple(missing[:EXAMPLES])))
    if foreign:
        detail = f"{len(foreign):,} captures are of no row, {foreign[0]} is the first"
        structure.faults.append(Fault("foreign-captures", detail, len(foreign), tuple(foreign[:EXAMPLES])))


def _check_shards(session: Session, journal: Journal, structure: Structure) -> None:
    """Read every shard not read yet, in a seeded order, until half of the time is gone."""
    store = session.store
    checked: dict[str, str] = dict(journal.state["checked"])
    damage = _Damage()
    done, total = 0, sum(shard.bytes for shard in store.index.shards)
    order = np.random.default_rng(session.config.seed).permutation(len(store.index.shards))
    with session.watch("checking", bytes_unit=True) as update:
        for about in (store.index.shards[int(i)] for i in order):
            if checked.get(about.name) == about.digest:
                continue
            if session.clock.half_over:
                structure.complete = False
                break
            if _check_shard(session, about, damage):
                checked[about.name] = about.digest
                journal.save(checked=checked)
            done += about.bytes
            update(done, total)
    if structure.complete:
        _check_links(session, checked, damage)
    session.unreadable |= damage.keys
    shards = len(store.index.shards)
    structure.numbers.update(shards=shards, shards_checked=len(checked), bytes=total)
    structure.note(
        "shards", f"{len(checked):,} of {shards:,} sound, {total:,} bytes, {damage.count:,} problems"
    )
    for code, found in damage.found.items():
        message = next(iter(found.values()))
        more = f"; {len(found) - 1:,} more of this kind" if len(found) > 1 else ""
        structure.faults.append(Fault(code, f"{message}{more}", len(found), tuple(found)[:EXAMPLES]))


def _check_shard(session: Session, about: ShardRow, damage: _Damage) -> bool:
    """Read one shard whole with the store's own check; whether it is sound."""
    before = damage.count
    report = check_store(_OneShard(session.store.folder, about.name))
    if not report.shards:
        damage.add("shard-missing", about.name, f"shard {about.name} is gone since the store was opened")
        damage.keys.update(_keys_of(session, about.name))
    for problem in report.problems:
        _add_problem(session, about, problem, damage)
    if damage.count == before and _digest(session, about.name) != about.digest:
        damage.add("index-mismatch", about.name, f"shard {about.name} is not the file that the index knows")
        damage.keys.update(_keys_of(session, about.name))
    return damage.count == before


def _add_problem(session: Session, about: ShardRow, problem: Problem, damage: _Damage) -> None:
    """Translate one problem of the store's check into faults."""
    if problem.kind == "shard":
        size = session.store.folder.open_shard(about.name).size
        damage.add("checksum" if size == about.bytes else "shard-truncated", about.name, problem.message)
        damage.keys.update(_keys_of(session, about.name))
    elif problem.kind == "key":
        for code in _identity_faults(session, about.name, problem):
            damage.add(code, problem.key, problem.message)
    elif problem.kind == "states":
        damage.add("checksum", problem.key, problem.message)
        damage.keys.add(problem.key)
    elif problem.kind == "dataset":
        damage.add("store-damaged", about.name, problem.message)
    # "parent" and "duplicate" are about several shards: see _check_links.


def _check_links(session: Session, names: Iterable[str], damage: _Damage) -> None:
    """Captures stored twice, and captures that take their first states from another one that is not there."""
    store = session.store
    known = {about.name for about in store.index.shards}
    sound = {name: open_shard(store.folder, name, store.dataset) for name in known & set(names)}
    for problem in check_links(store.index.without(known - set(sound)), sound):
        damage.add(
            "duplicate-key" if problem.kind == "duplicate" else "parent-missing", problem.key, problem.message
        )
        if problem.kind == "parent":
            damage.keys.add(problem.key)


def _digest(session: Session, name: str) -> str:
    return open_shard(session.store.folder, name, session.store.dataset).prefix.digest


def _keys_of(session: Session, name: str) -> list[str]:
    return [key for key in session.store if session.store.entry(key).shard == name]


def _identity_faults(session: Session, name: str, problem: Problem) -> Iterator[str]:
    """Whether ids or mask are not what the key says (without the row it cannot be told apart), or only counts are wrong."""
    shard = open_shard(session.store.folder, name, session.store.dataset)
    ids, mask = shard.ids(problem.slot), shard.mask(problem.slot)
    row = _row(session, problem.key)
    if row_key(ids, mask) == problem.key:
        yield "counts-differ"
    elif row is None or not np.array_equal(row.ids, ids):
        yield "ids-differ"
    else:
        yield "mask-differs"


def _row(session: Session, key: str) -> Row | None:
    return session.rows.get(key) if session.rows is not None and key in session.rows else None
