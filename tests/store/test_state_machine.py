"""Random writes, kills, reopenings, damage, checks and repairs, compared at every step with a dict that cannot fail."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
)

from headrace.errors import CorruptError, InputError
from headrace.store import Parent, Store, StoreWriter, WriterOptions
from headrace.store.check import check_store
from headrace.store.folder import LocalFolder
from headrace.store.repair import repair_store
from headrace.store.shard import Shard
from headrace.testing.store import flip_bit, make_spec, make_states, rows, same_bits, shard_files
from headrace.types import Row

pytestmark = pytest.mark.slow

SPEC = make_spec(hidden_size=9, taps=(2, "final"))
OPTIONS = WriterOptions(shard_captures=3, workers=1)


class StoreMachine(RuleBasedStateMachine):
    """``sealed`` is what must be in the store; ``waiting`` what may be; ``hurt`` is what was damaged and not yet repaired."""

    known: Bundle[Row] = Bundle("known")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="headrace-machine-"))
        self.store_path = self.path / "s"
        self.rows: dict[str, Row] = {}
        self.parents: dict[str, Parent] = {}
        self.sealed: set[str] = set()
        self.waiting: set[str] = set()
        self.hurt = False
        self.writer = self.open_writer()

    def open_writer(self) -> StoreWriter:
        return StoreWriter(self.store_path, SPEC, options=OPTIONS)

    def teardown(self) -> None:
        self.writer.close()
        shutil.rmtree(self.path)

    # --- writing --------------------------------------------------------------------------------------------------

    @rule(target=known, row=rows(max_tokens=12))
    def add(self, row: Row) -> Row:
        self.add_row(row, None)
        return row

    @precondition(lambda self: not self.hurt)  # a parent in a damaged shard is refused, and that is right
    @rule(row=known)
    def add_again(self, row: Row) -> None:
        parent = self.parents.get(row.key)
        if parent is None or parent.key in self.sealed | self.waiting:
            self.add_row(row, parent)

    @precondition(lambda self: not self.hurt)
    @rule(target=known, row=known, more=rows(max_tokens=5), data=st.data())
    def add_child(self, row: Row, more: Row, data: st.DataObject) -> Row | MultipleResults[Row]:
        if row.key not in self.sealed | self.waiting:
            return multiple()
        shared = data.draw(st.integers(1, len(row)))
        child = Row.make([*row.ids[:shared], *more.ids], [*row.mask[:shared], *more.mask])
        if child.key not in self.rows:
            self.parents[child.key] = Parent(row.key, shared)
        self.add_row(child, self.parents.get(child.key))
        return child

    def add_row(self, row: Row, parent: Parent | None) -> None:
        self.rows[row.key] = row
        states = make_states_wide(row)[:, parent.tokens if parent else 0 :]
        new = self.writer.add(row, states, parent=parent)
        assert new == (row.key not in self.sealed | self.waiting)
        self.waiting.add(row.key)
        self.waiting -= self.sealed

    @rule()
    def seal(self) -> None:
        self.writer.seal()
        self.sealed |= self.waiting
        self.waiting.clear()
        assert set(self.writer.done) == self.sealed

    @rule()
    def close_and_open(self) -> None:
        self.writer.close()
        self.sealed |= self.waiting
        self.waiting.clear()
        self.reopen()

    @rule()
    def kill(self) -> None:
        """What is not sealed is lost; shards that were being written are there whole or not at all."""
        self.writer._finish_seal()
        self.writer._closed = True
        self.writer._encoders.shutdown(wait=True, cancel_futures=True)
        self.writer._sealer.shutdown(wait=True)
        (self.store_path / "shards" / ".half.tmp").write_bytes(b"half")
        self.sealed = set(self.writer.done)
        self.waiting.clear()
        self.reopen()

    def reopen(self) -> None:
        """A writer sets broken shards aside on opening."""
        self.writer = self.open_writer()
        if self.writer.repaired is not None:
            assert self.hurt
            self.sealed -= set(self.writer.repaired.dropped)
        # a shard that cannot be read at all takes its captures along
        self.sealed &= set(self.writer.done)
        assert set(self.writer.done) == self.sealed
        self.hurt = False

    @rule()
    def lose_the_index(self) -> None:
        (self.store_path / "index.parquet").unlink(missing_ok=True)

    # --- damage -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sealed and not self.hurt)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Flip any bit of any shard, or cut it. Then either repair or a new writer takes out exactly what was hurt."""
        self.close_and_open()
        file = data.draw(st.sampled_from(shard_files(self.store_path)))
        size = file.stat().st_size
        start = Shard(LocalFolder(self.store_path).open_shard(file.name)).prefix.size
        if data.draw(st.booleans()):
            byte = data.draw(st.integers(start, size - 1) if size > start else st.integers(0, size - 1))
            flip_bit(file, byte, data.draw(st.integers(0, 7)))
        else:
            file.write_bytes(file.read_bytes()[: data.draw(st.integers(0, size - 1))])
        self.hurt = True
        assert not check_store(LocalFolder(self.store_path)).ok

    @precondition(lambda self: self.hurt)
    @rule()
    def repair(self) -> None:
        self.writer.close()
        self.sealed |= self.waiting
        self.waiting.clear()
        report = repair_store(self.store_path)
        left = set(Store.open(self.store_path))
        assert left <= self.sealed
        assert report.moved and not (set(report.dropped) & left)
        self.sealed = left
        self.hurt = False
        self.reopen()

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def store_is_the_dict(self) -> None:
        if self.hurt:
            return
        try:
            store = Store.open(self.store_path)
        except InputError:
            pytest.fail("the store vanished")
        self.sealed |= set(store) & self.waiting  # sealed in the background
        self.waiting -= self.sealed
        assert set(store) == self.sealed
        for key in self.sealed:
            assert same_bits(store[key].states, self.truth(key))
            assert store[key].ids.tolist() == self.rows[key].ids.tolist()

    @invariant()
    def damage_never_reads_as_states(self) -> None:
        if not self.hurt:
            return
        try:
            store = Store.open(self.store_path)
        except CorruptError:
            return
        for key in store:
            try:
                states = store[key].states
            except CorruptError:
                continue
            assert same_bits(states, self.truth(key))

    def truth(self, key: str):  # type: ignore[no-untyped-def]
        states = make_states_wide(self.rows[key])
        parent = self.parents.get(key)
        if parent is not None:
            states[:, : parent.tokens] = self.truth(parent.key)[:, : parent.tokens]
        return states


def make_states_wide(row: Row):  # type: ignore[no-untyped-def]
    return make_states(row, SPEC)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, phases=[Phase.generate]
)
TestStoreMachine = pytest.mark.slow(TestStoreMachine)
