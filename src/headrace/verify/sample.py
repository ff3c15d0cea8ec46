"""Which captures are re-extracted, and what that proves: sample size from a stated confidence, spread over shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


def sample_size(population: int, confidence: float, fault_share: float) -> int:
    """Fewest captures to draw so that a fault in ``fault_share`` of them is hit with probability >= ``confidence``.

    Exact for drawing without replacement (hypergeometric): with d = ceil(share * population) faulty captures, the smallest
    n with C(population - d, n) / C(population, n) <= 1 - confidence.
    """
    if population <= 0:
        return 0
    faulty = max(1, math.ceil(fault_share * population - 1e-9))
    low, high = 1, population - faulty + 1
    while low < high:
        middle = (low + high) // 2
        if _miss(population, faulty, middle) <= 1 - confidence:
            high = middle
        else:
            low = middle + 1
    return low


def detectable_share(population: int, drawn: int, confidence: float) -> float:
    """The smallest share of faulty captures that a clean sample of ``drawn`` rules out with ``confidence``; 1.0 for none drawn."""
    if population <= 0 or drawn <= 0:
        return 1.0
    low, high = 1, population - drawn + 1
    while low < high:
        middle = (low + high) // 2
        if _miss(population, middle, drawn) <= 1 - confidence:
            high = middle
        else:
            low = middle + 1
    return low / population


def _miss(population: int, faulty: int, drawn: int) -> float:
    """Probability that none of ``drawn`` captures is one of the ``faulty``."""
    good = population - faulty
    if drawn > good:
        return 0.0
    log = (
        math.lgamma(good + 1)
        - math.lgamma(good - drawn + 1)
        - math.lgamma(population + 1)
        + math.lgamma(population - drawn + 1)
    )
    return math.exp(log)


def spread(shards: Mapping[str, Sequence[str]], seed: int) -> list[str]:
    """Every key once, in a seeded random order of which every prefix holds each shard in proportion to its captures.

    Inside a shard the order is uniform, so any prefix is a stratified random sample.
    """
    rng = np.random.default_rng(seed)
    places: list[tuple[float, str]] = []
    for name in sorted(shards):
        keys = sorted(shards[name])
        start = rng.random()
        for rank, index in enumerate(rng.permutation(len(keys))):
            places.append(((rank + start) / len(keys), keys[int(index)]))
    return [key for _, key in sorted(places)]
