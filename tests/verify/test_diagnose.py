"""Every planted fault of the states is explained by its right name, with the right place in the sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.target import Target
from headrace.testing.planted import STATES, Ground, Plant
from headrace.types import Row
from headrace.verify.diagnose import Diagnoser
from headrace.verify.elsewhere import Elsewhere
from headrace.verify.explain import faults_of
from headrace.verify.faults import KINDS, Fault
from headrace.verify.measure import Noise, Tolerance, bad_tokens, token_errors
from headrace.verify.pool import Pool
from headrace.verify.reference import Reference


@pytest.fixture(scope="module")
def diagnoser(model: Path, ground: Ground) -> Diagnoser:
    reference = Reference.open("hf", Target.open(str(model)), ground.spec)
    rows = {row.key: row for row in ground.rows}
    pool = Pool(ground.spec.hidden_size, rows.__getitem__)
    for key, states in ground.states.items():
        pool.add(key, states)
    tolerance = Tolerance.derive(ground.spec, "raw", Noise.of([], ()))
    return Diagnoser(
        reference,
        tolerance,
        Elsewhere(reference, pool, lambda key: [r for r in ground.rows if r.key != key][:8]),
    )


def everywhere(states: torch.Tensor) -> np.ndarray:
    return np.ones(states.shape[:2], dtype=bool)


def named(
    diagnoser: Diagnoser, ground: Ground, states: dict[str, torch.Tensor], most: int = 4
) -> list[Fault]:
    """The faults of ``states``, from at most ``most`` of the captures that differ."""
    wrong: list[Row] = []
    for row in ground.rows:
        relative = token_errors(states[row.key], ground.states[row.key]).relative
        if any(bad_tokens(tap, diagnoser.tolerance).any() for tap in relative):
            wrong.append(row)
    findings = [
        f
        for row in wrong[:most]
        for f in diagnoser.diagnose(row, states[row.key], everywhere(states[row.key]))
    ]
    return faults_of(findings, ground.spec, f"{len(wrong)} of {len(ground.rows)}")


@pytest.mark.parametrize("plant", STATES, ids=lambda plant: plant.name)
def test_planted_fault_is_named(plant: Plant, diagnoser: Diagnoser, ground: Ground) -> None:
    faults = named(diagnoser, ground, plant.change(ground, np.random.default_rng(1)))
    assert faults and faults[0].code in plant.codes, [fault.detail for fault in faults]


def detail(diagnoser: Diagnoser, ground: Ground, name: str) -> str:
    plant = next(plant for plant in STATES if plant.name == name)
    return named(diagnoser, ground, plant.change(ground, np.random.default_rng(1)))[0].detail


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tap 2 one boundary late", "tap 4 holds boundary 5"),
        ("every tap one boundary late", "taps 2, 4, 6 each hold the boundary 1 later"),
        ("final state one layer early", "the final state holds boundary 7 after the final norm"),
        ("taps rotated", "the taps hold final, 2, 4, 6 where the spec says 2, 4, 6, final"),
        ("states halved", "times 0.5"),
        ("tokens one place late", "every token holds the state of the token 1 earlier"),
        ("a chunk written twice in one tap", "tokens 16..23 repeat tokens 8..15"),
        ("second chunk without the first", "as if the row began there"),
        (
            "half of the hidden dimension zero",
            "values 32..63 of the 64 of each state are zero",
        ),
        ("taps and tokens transposed", "written as [tokens, taps, hidden]"),
    ],
)
def test_the_sentence_says_where(name: str, words: str, diagnoser: Diagnoser, ground: Ground) -> None:
    assert words in detail(diagnoser, ground, name)


def test_right_captures_have_no_findings(diagnoser: Diagnoser, ground: Ground) -> None:
    for row in ground.rows:
        states = ground.states[row.key]
        assert diagnoser.diagnose(row, states, everywhere(states)) == []
        assert diagnoser.nearest_is_claimed(row, states, everywhere(states)) == []


def test_foreign_numbers_are_unexplained(diagnoser: Diagnoser, ground: Ground) -> None:
    """Values of nothing that could be tried are not given a name by luck."""
    states = ground.copy()
    row = ground.rows[2]
    noise = torch.randn(states[row.key].shape, generator=torch.Generator().manual_seed(0))
    states[row.key] = (noise * states[row.key].float().std()).to(torch.bfloat16)
    assert [fault.code for fault in named(diagnoser, ground, states)] == ["unexplained"]


def test_nearness_decides_below_the_tolerance(diagnoser: Diagnoser, ground: Ground) -> None:
    """A deep model's neighbouring boundaries differ by less than the noise: the nearer one still tells."""
    row = ground.rows[0]
    everything = ground.everything[row.key]
    right, next_one = everything.boundaries[4], everything.boundaries[5]
    states = ground.states[row.key].clone()
    states[1] = (right + 0.9 * (next_one - right)).to(torch.bfloat16)
    found = diagnoser.nearest_is_claimed(row, states, everywhere(states))
    assert [(f.code, f.holds) for f in found] == [("boundary-shifted", 5)]


def test_states_left_out_are_not_looked_at(diagnoser: Diagnoser, ground: Ground) -> None:
    row = ground.rows[0]
    states = ground.states[row.key].clone()
    kept = everywhere(states)
    kept[3] = row.mask
    states[3][torch.from_numpy(~row.mask)] = float("nan")
    assert diagnoser.diagnose(row, states, kept) == []
    states[1] = ground.boundary(row.key, 5)
    assert [f.code for f in diagnoser.diagnose(row, states, kept)] == ["boundary-shifted"]


def test_experts_may_route_a_token_elsewhere(
    diagnoser: Diagnoser, ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token far off and still nearest to itself: noise of a mixture of experts, a fault of any other model."""
    row = ground.rows[3]
    states = ground.states[row.key].clone()
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(states[1, 9].shape, generator=generator)
    states[1, 9] += (0.4 * states[1, 9].float().norm() * noise / noise.norm()).to(states.dtype)
    replaced = ground.states[row.key].clone()
    replaced[:, 9] = replaced[:, 20]
    assert diagnoser.diagnose(row, states, everywhere(states)) != []
    config = {**diagnoser.reference.target.config, "num_experts": 8}
    monkeypatch.setattr(diagnoser.reference.target, "config", config)
    assert diagnoser.diagnose(row, states, everywhere(states)) == []
    assert [f.code for f in diagnoser.diagnose(row, replaced, everywhere(states))] == ["token-replaced"]


def test_every_plant_means_a_known_fault() -> None:
    assert {code for plant in STATES for code in plant.codes} <= set(KINDS)
    with pytest.raises(ValueError, match="catalogue"):
        Fault("no-such-fault", "")
