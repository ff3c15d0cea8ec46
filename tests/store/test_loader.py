"""The loader: every document once an epoch, in an order that can be computed, resumed exactly, never over the budget."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, CorruptError, SpecMismatchError
from headrace.store import PackedLoader, Placement, Store, StoreDataset
from headrace.store.loader import pack
from headrace.store.shard import Shard
from headrace.testing.store import (
    flip_bit,
    make_row,
    make_spec,
    make_states,
    same_bits,
    shard_files,
    write_store,
)
from headrace.types import Row

SPEC = make_spec()
ROWS = [
    make_row(seed, length)
    for seed, length in enumerate([3, 50, 7, 100, 21, 64, 1, 33, 90, 12, 45, 45, 80, 5, 17])
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open(write_store(tmp_path_factory.mktemp("loader") / "s", ROWS))


def order(loader: PackedLoader) -> list[tuple[str, ...]]:
    return [batch.keys for batch in loader]


def test_batches_hold_whole_documents_in_their_places(store: Store) -> None:
    by_key = {row.key: row for row in ROWS}
    seen: list[str] = []
    for batch in PackedLoader(store, token_budget=128, taps=("final", 4)):
        starts = batch.starts.tolist()
        assert batch.states.shape == (2, starts[-1], 16) and starts[-1] <= 128
        assert (
            batch.documents.dtype == torch.int32
            and batch.positions.dtype == torch.int64
            and batch.mask.dtype == torch.bool
        )
        for number, key in enumerate(batch.keys):
            row, place = by_key[key], slice(starts[number], starts[number + 1])
            assert batch.ids[place].tolist() == row.ids.tolist()
            assert batch.mask[place].tolist() == row.mask.tolist()
            assert batch.documents[place].tolist() == [number] * len(row)
            assert batch.positions[place].tolist() == list(range(len(row)))
            assert same_bits(batch.states[:, place].contiguous(), make_states(row, SPEC)[[3, 1]])
        assert batch.final_kept.all()
        seen += batch.keys
    assert sorted(seen) == sorted(by_key)


def test_each_epoch_is_another_order_of_all_documents(store: Store) -> None:
    loader = PackedLoader(store, token_budget=128, seed=5, epochs=3)
    epochs: dict[int, list[tuple[str, ...]]] = {}
    for batch in loader:
        epochs.setdefault(batch.epoch, []).append(batch.keys)
    assert [sorted(k for keys in batches for k in keys) for batches in epochs.values()] == [store.keys()] * 3
    # not only the order of batches differs: other documents meet
    together = [{frozenset(keys) for keys in batches} for batches in epochs.values()]
    assert together[0] != together[1] != together[2]
    assert order(PackedLoader(store, token_budget=128, seed=5, epochs=3)) == [
        k for b in epochs.values() for k in b
    ]
    assert order(PackedLoader(store, token_budget=128, seed=6)) != epochs[0]
    plain = order(PackedLoader(store, token_budget=10_000, shuffle=False))
    assert plain == [tuple(store.keys())]


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_resumed_run_sees_the_same_batches(store: Store, stop: int) -> None:
    """Whatever was decoded ahead does not count; the state is plain JSON."""
    whole = order(PackedLoader(store, token_budget=128, seed=1, epochs=2))
    first = PackedLoader(store, token_budget=128, seed=1, epochs=2, placement=Placement(prefetch=5))
    seen = []
    batches = iter(first)
    for _ in range(stop):
        seen.append(next(batches).keys)
    state = json.loads(json.dumps(first.state_dict()))
    batches.close()  # type: ignore[attr-defined]
    second = PackedLoader(store, token_budget=128, seed=1, epochs=2)
    second.load_state_dict(state)
    assert seen + order(second) == whole
    assert order(second) == []


def test_a_place_in_other_data_is_refused(store: Store) -> None:
    state = PackedLoader(store, token_budget=128, seed=1).state_dict()
    for other in (
        PackedLoader(store, token_budget=129, seed=1),
        PackedLoader(store, token_budget=128, seed=2),
        PackedLoader(store, store.keys()[1:], token_budget=128, seed=1),
        PackedLoader(store, token_budget=128, seed=1, placement=Placement(world_size=2)),
    ):
        with pytest.raises(SpecMismatchError, match="resume with what the run was started with"):
            other.load_state_dict(state)


def test_ranks_share_an_epoch_evenly(store: Store) -> None:
    whole = order(PackedLoader(store, token_budget=128, seed=3, epochs=2))
    per_rank = [
        [
            (b.epoch, b.index, b.keys)
            for b in PackedLoader(
                store, token_budget=128, seed=3, epochs=2, placement=Placement(rank=r, world_size=2)
            )
        ]
        for r in range(2)
    ]
    assert len(per_rank[0]) == len(per_rank[1])
    together = sorted(per_rank[0] + per_rank[1])
    count = Counter(epoch for epoch, _, _ in together)
    for epoch in range(2):
        plan = PackedLoader(store, token_budget=128, seed=3).plan(epoch)
        assert count[epoch] == len(plan) - len(plan) % 2
    assert {keys for _, _, keys in together} <= set(whole)
    alone = PackedLoader(store, token_budget=128, seed=3)
    assert alone.batches_per_epoch() == len(order(alone))


def test_what_cannot_be_loaded_is_refused_at_the_start(store: Store) -> None:
    longest = max(ROWS, key=len)
    with pytest.raises(ConfigError, match=f"row {longest.key} has 100 tokens, more than the 99"):
        PackedLoader(store, token_budget=99)
    with pytest.raises(ConfigError, match="no captures"):
        PackedLoader(store, [], token_budget=99)
    with pytest.raises(KeyError, match="not in"):
        PackedLoader(store, ["0" * 32], token_budget=99)
    with pytest.raises(ConfigError, match="rank 2"):
        PackedLoader(store, token_budget=999, placement=Placement(rank=2, world_size=2))


def test_damage_stops_the_loader(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", ROWS[:3], codec="raw")
    file = shard_files(path)[0]
    flip_bit(file, file.stat().st_size - 5)
    assert len(Shard(Store.open(path).folder.open_shard(file.name))) == 3
    with pytest.raises(CorruptError, match="are damaged"):
        order(PackedLoader(Store.open(path), token_budget=64))


def test_final_states_left_out_are_zeros_and_marked(tmp_path: Path) -> None:
    store = Store.open(write_store(tmp_path / "s", ROWS, final_positions="supervised"))
    by_key = {row.key: row for row in ROWS}
    for batch in PackedLoader(store, token_budget=256):
        kept = np.concatenate([store.final_kept(key) for key in batch.keys])
        assert batch.final_kept.tolist() == kept.tolist()
        truth = torch.cat([make_states(by_key[key], SPEC) for key in batch.keys], dim=1)
        assert same_bits(batch.states[3][batch.final_kept], truth[3][batch.final_kept])
        assert not batch.states[3][~batch.final_kept].any()
        assert same_bits(batch.states[:3].contiguous(), truth[:3].contiguous())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(50, 120), st.integers(0, 9))
def test_packing(lengths: list[int], budget: int, seed: int) -> None:
    places = np.random.default_rng(seed).permutation(len(lengths))
    batches = pack(np.array(lengths)[places], places, budget)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= budget for batch in batches)


def test_packing_wastes_little_and_stays_local() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 20_000).clip(1, 8192).astype(int)
    places = np.arange(len(lengths))
    batches = pack(lengths, places, 8192)
    assert lengths.sum() / (8192 * len(batches)) > 0.97
    # documents that meet are near each other in the shuffled order
    assert np.median([batch.max() - batch.min() for batch in batches]) < 2000


@pytest.mark.slow
def test_dataset_items_and_worker_processes(store: Store) -> None:
    dataset = StoreDataset(store, taps=(2,))
    assert len(dataset) == len(ROWS)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    by_key = {row.key: row for row in ROWS}
    seen = []
    for capture in loader:
        seen.append(capture.key)
        assert same_bits(capture.states, make_states(by_key[capture.key], SPEC)[:1])
    assert seen == store.keys()


def test_pinned_memory_only_with_cuda(store: Store) -> None:
    batch = next(iter(PackedLoader(store, token_budget=256)))
    assert batch.states.is_pinned() == torch.cuda.is_available()


def test_one_document_of_each_length(tmp_path: Path) -> None:
    row = Row.make([7], [True])
    store = Store.open(write_store(tmp_path / "s", [row]))
    batch = next(iter(PackedLoader(store, token_budget=1)))
    assert batch.starts.tolist() == [0, 1] and batch.positions.tolist() == [0]
