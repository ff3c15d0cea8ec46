"""The part of a verification that needs no model: files, checksums, counts, and that every capture is its row's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import CorruptError, SpecMismatchError, StoreError
from headrace.store.reader import open_shard
from headrace.store.shard import Shard
from headrace.types import Row
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
    """What is wrong with the captures of the shards read so far: fault code → key or file → sentence."""

    found: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)

    def add(self, code: str, where: str, message: str, keys: list[str]) -> None:
        self.found.setdefault(code, {})[where] = message
        self.keys.update(keys)


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
    sizes = {shard.name: shard.bytes for shard in store.index.shards}
    checked: dict[str, str] = dict(journal.state["checked"])
    damage = _Damage()
    start, done, total = time.monotonic(), 0, sum(sizes.values())
    order = np.random.default_rng(session.config.seed).permutation(len(store.index.shards))
    shards = [store.index.shards[int(i)] for i in order]
    for shard in shards:
        if checked.get(shard.name) == shard.digest:
            continue
        if session.clock.half_over:
            structure.complete = False
            break
        if _check_shard(session, shard.name, damage):
            checked[shard.name] = shard.digest
            journal.save(checked=checked)
        done += shard.bytes
        session.progress_bytes("checking", done, total, start)
    session.unreadable |= damage.keys
    structure.numbers.update(shards=len(sizes), shards_checked=len(checked), bytes=total)
    wrong = sum(len(found) for found in damage.found.values())
    structure.note("shards", f"{len(checked):,} of {len(sizes):,} sound, {total:,} bytes, {wrong:,} problems")
    for code, found in damage.found.items():
        message = next(iter(found.values()))
        more = f"; {len(found) - 1:,} more of this kind" if len(found) > 1 else ""
        structure.faults.append(Fault(code, f"{message}{more}", len(found), tuple(found)[:EXAMPLES]))


def _check_shard(session: Session, name: str, damage: _Damage) -> bool:
    """Read one shard whole; whether it is sound."""
    store = session.store
    expected = next(s for s in store.index.shards if s.name == name)
    before = sum(len(found) for found in damage.found.values())
    try:
        shard = open_shard(store.folder, name, store.dataset)
    except (CorruptError, StoreError) as exc:
        damage.add(_file_fault(session, name, expected.bytes), name, str(exc), _keys_of(session, name))
        return False
    if shard.prefix.digest != expected.digest:
        message = f"{shard.name} is not the file that the index knows"
        damage.add("index-mismatch", name, message, _keys_of(session, name))
        return False
    for slot in range(len(shard)):
        _check_capture(session, shard, slot, damage)
    return before == sum(len(found) for found in damage.found.values())


def _file_fault(session: Session, name: str, size: int) -> str:
    """Which name a shard that cannot be opened gets."""
    try:
        source = session.store.folder.open_shard(name)
    except StoreError:
        return "shard-missing"
    return "checksum" if source.size == size else "shard-truncated"


def _keys_of(session: Session, name: str) -> list[str]:
    return [key for key in session.store if session.store.entry(key).shard == name]


def _check_capture(session: Session, shard: Shard, slot: int, damage: _Damage) -> None:
    """Identity and checksums of one capture."""
    key = shard.key(slot)
    try:
        shard.check_key(slot)
    except CorruptError as exc:
        for code in _identity_faults(session, shard, slot):
            damage.add(code, key, str(exc), [])
    try:
        for tap in shard.spec.taps:
            for chunk in shard.chunks(slot, tap):
                shard.verify(slot, tap, chunk)
    except CorruptError as exc:
        damage.add("checksum", key, str(exc), [key])


def _identity_faults(session: Session, shard: Shard, slot: int) -> Iterator[str]:
    """Whether ids or mask (or both) are not what the key says; without the row it cannot be told apart."""
    row = _row(session, shard.key(slot))
    if row is None or not np.array_equal(row.ids, shard.ids(slot)):
        yield "ids-differ"
    elif not np.array_equal(row.mask, shard.mask(slot)):
        yield "mask-differs"


def _row(session: Session, key: str) -> Row | None:
    return session.rows.get(key) if session.rows is not None and key in session.rows else None
