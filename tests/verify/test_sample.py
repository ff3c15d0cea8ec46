"""How many captures prove what, and that any beginning of the order is a fair sample of every shard."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.verify.sample import detectable_share, sample_size, spread


def miss(population: int, faulty: int, drawn: int) -> float:
    """By counting: the share of samples that hold none of the faulty ones."""
    clean = sum(1 for s in combinations(range(population), drawn) if all(i >= faulty for i in s))
    return clean / math.comb(population, drawn)


@pytest.mark.parametrize(
    ("population", "confidence", "share"), [(10, 0.9, 0.2), (12, 0.5, 0.1), (9, 0.99, 0.34), (1, 0.9, 0.5)]
)
def test_the_size_is_the_smallest_that_keeps_the_promise(
    population: int, confidence: float, share: float
) -> None:
    faulty = max(1, math.ceil(share * population))
    size = sample_size(population, confidence, share)
    assert miss(population, faulty, size) <= 1 - confidence
    assert size == 1 or miss(population, faulty, size - 1) > 1 - confidence


def test_known_sizes() -> None:
    assert sample_size(0, 0.99, 0.01) == 0
    assert sample_size(16, 0.99, 0.01) == 16, (
        "one faulty capture of 16 is only sure to be seen when all are drawn"
    )
    # Without replacement from a large store it nears log(0.01) / log(0.99) = 458.2.
    assert sample_size(1_000_000, 0.99, 0.01) == 459


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([0.5, 0.9, 0.99]))
def test_size_and_share_are_inverse(population: int, drawn: int, confidence: float) -> None:
    drawn = min(drawn, population)
    share = detectable_share(population, drawn, confidence)
    assert sample_size(population, confidence, share) <= drawn


def test_nothing_drawn_rules_out_nothing() -> None:
    assert detectable_share(100, 0, 0.99) == 1.0


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_spread_draws_each_shard_in_proportion(sizes: list[int], seed: int) -> None:
    shards = {f"s{i}": [f"{i}-{j}" for j in range(size)] for i, size in enumerate(sizes)}
    order = spread(shards, seed)
    assert sorted(order) == sorted(key for keys in shards.values() for key in keys)
    for stop in range(1, len(order) + 1):
        drawn = Counter(key.split("-")[0] for key in order[:stop])
        for i, size in enumerate(sizes):
            assert abs(drawn[str(i)] - stop * size / len(order)) <= len(sizes)


def test_spread_is_random_and_repeatable() -> None:
    shards = {"a": [str(i) for i in range(20)]}
    assert spread(shards, 1) == spread(shards, 1)
    assert spread(shards, 1) != spread(shards, 2)
    firsts = Counter(spread(shards, seed)[0] for seed in range(2000))
    assert min(firsts[str(i)] for i in range(20)) > 50, "each capture is first about 100 times in 2000"
