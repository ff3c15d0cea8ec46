"""The reading without a model: what is surely broken, what is odd, and that right captures are neither."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.target import Target
from headrace.testing.planted import Ground
from headrace.types import Capture, Row
from headrace.verify.measure import Noise, Tolerance
from headrace.verify.scan import Scan


@pytest.fixture
def scan(model: Path, ground: Ground) -> Scan:
    return Scan(Target.open(str(model)), ground.spec, Tolerance.derive(ground.spec, "raw", Noise.of([], ())))


def look(scan: Scan, row: Row, states: torch.Tensor, kept: np.ndarray | None = None) -> None:
    everywhere = np.ones(states.shape[:2], dtype=bool)
    scan.look(Capture(row.key, row.ids, states, row.mask), everywhere if kept is None else kept)


def test_right_captures_are_not_suspected(scan: Scan, ground: Ground) -> None:
    for row in ground.rows:
        look(scan, row, ground.states[row.key])
    assert scan.broken == {}
    assert scan.odd == {}
    assert scan.tokens == sum(map(len, ground.rows))


def test_repeated_tokens_are_right(scan: Scan, ground: Ground) -> None:
    """In a row of one id every state is the same, by mathematics: that is no repetition."""
    row = Row.make([7] * 20, [True] * 20)
    look(scan, row, ground.stack(ground.compute(row.ids)))
    assert scan.odd == {}


@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (-float("inf"), "infinity")]
)
def test_values_that_are_no_numbers(scan: Scan, ground: Ground, value: float, word: str) -> None:
    row = ground.rows[0]
    states = ground.states[row.key].clone()
    states[1, 4, 5] = value
    look(scan, row, states)
    assert list(scan.broken) == [row.key] and word in scan.broken[row.key]


def test_zeros_are_only_odd(scan: Scan, ground: Ground) -> None:
    """A token whose embedding is zero has a zero boundary 0: the reference decides."""
    row = ground.rows[0]
    states = ground.states[row.key].clone()
    states[1, 4] = 0
    look(scan, row, states)
    assert scan.broken == {} and "zeros" in scan.odd[row.key]


def test_states_the_store_leaves_out_are_not_broken(scan: Scan, ground: Ground) -> None:
    row = ground.rows[0]
    states = ground.states[row.key].clone()
    kept = np.ones(states.shape[:2], dtype=bool)
    kept[3, ::2] = False
    states[3, ::2] = float("nan")
    look(scan, row, states, kept)
    assert scan.broken == {} and scan.odd == {}


def test_a_repeated_stretch_is_odd(scan: Scan, ground: Ground) -> None:
    row = ground.rows[3]
    states = ground.states[row.key].clone()
    states[:, 20:24] = states[:, 8:12]
    look(scan, row, states)
    assert "repeat" in scan.odd[row.key]


def test_an_un_normed_final_state_is_odd(scan: Scan, ground: Ground) -> None:
    row = ground.rows[3]
    states = ground.states[row.key].clone()
    states[3] = 3 * ground.boundary(row.key, ground.spec.num_layers)
    look(scan, row, states)
    assert "not normed" in scan.odd[row.key]


def test_equal_beginnings_must_have_equal_states(scan: Scan, ground: Ground) -> None:
    """Rows 1, 3, 5, ... begin with the same tokens; the states of another row stand out there."""
    for row in ground.rows[1:8:2]:
        look(scan, row, ground.states[row.key])
    row, other = ground.rows[9], ground.rows[4]
    assert len(row) == len(other)
    look(scan, row, ground.states[other.key])
    assert "same beginning" in scan.odd[row.key]
