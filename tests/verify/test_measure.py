"""Errors, noise and tolerances: right values on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.testing.planted import Ground
from headrace.types import CaptureSpec
from headrace.verify.measure import Noise, TapError, TokenErrors, Tolerance, bad_tokens, token_errors


def spec(dtype: str) -> CaptureSpec:
    return CaptureSpec(
        target="t",
        config_hash="c",
        num_layers=4,
        hidden_size=2,
        dtype=dtype,
        taps=(1, "final"),
        norm_kind="rms",
        norm_eps=1e-5,
    )


def test_errors_by_hand() -> None:
    reference = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    states = torch.tensor([[[3.0, 3.0], [0.0, 1.0]]])
    errors = token_errors(states, reference)
    np.testing.assert_allclose(errors.relative, [[0.2, np.sqrt(2)]], rtol=1e-6)
    np.testing.assert_allclose(errors.cosine, [[21 / (5 * np.sqrt(18)), 0.0]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_infinitely_wrong(value: float) -> None:
    errors = token_errors(torch.tensor([[[value, 1.0], [1.0, 1.0]]]), torch.ones(1, 2, 2))
    assert errors.relative[0, 0] == np.inf
    assert errors.relative[0, 1] == 0


def test_noise_is_that_of_the_worst_tap() -> None:
    errors = [
        TokenErrors(np.array([[0.1, 0.2, 0.3], [0.0, 0.0, 0.5]], np.float32), np.ones((2, 3), np.float32))
    ]
    noise = Noise.of(errors, (1, "final"))
    assert (noise.captures, noise.tokens) == (1, 3)
    assert noise.median == pytest.approx(0.2)
    assert noise.maximum == pytest.approx(0.5)
    assert noise.taps == {"1": pytest.approx(0.2), "final": 0.0}


def test_tolerance_follows_the_noise_within_limits() -> None:
    quiet, loud = Noise.of([], ()), Noise(1, 1, 0.5, 2.0, {})
    for dtype in ("float32", "float16", "bfloat16"):
        low, high = Tolerance.derive(spec(dtype), "raw", quiet), Tolerance.derive(spec(dtype), "raw", loud)
        assert low.median < high.median < 0.1, "no noise may excuse a neighbouring boundary"
        assert low.token < high.token < 0.5, "no noise may excuse another token"
    assert (
        Tolerance.derive(spec("float32"), "raw", quiet).median
        < Tolerance.derive(spec("bfloat16"), "raw", quiet).median
    )
    lossy = Tolerance.derive(spec("bfloat16"), "fp8", quiet)
    assert lossy.median > Tolerance.derive(spec("bfloat16"), "raw", quiet).median
    assert Tolerance.derive(spec("bfloat16"), "raw", quiet, 0.01).median == 0.01


def test_which_tokens_are_bad() -> None:
    tolerance = Tolerance(0.02, 0.2)
    # One token far off in a tap that is right: only that one.
    assert bad_tokens(np.array([0.01, 0.015, 0.9, 0.01]), tolerance).tolist() == [False, False, True, False]
    # A tap that is off as a whole by little: all of them.
    assert bad_tokens(np.array([0.05, 0.06, 0.05, 0.01]), tolerance).tolist() == [True, True, True, False]
    kept = np.array([True, True, False, False])
    assert bad_tokens(np.array([0.01, 0.9, 0.9, 0.9]), tolerance, kept).tolist() == [
        False,
        True,
        False,
        False,
    ]


def test_a_tap_with_no_kept_states_is_not_wrong() -> None:
    assert TapError.summarize(np.zeros(0), np.zeros(0), Tolerance(0.02, 0.2)) == TapError(0.0, 0.0, 1.0, 0)


def test_reference_noise_is_far_below_the_step_between_boundaries(ground: Ground) -> None:
    """What makes an off-by-one visible at all: a layer moves the states by much more than the tolerance."""
    for row in ground.rows[:4]:
        everything = ground.everything[row.key]
        steps = token_errors(everything.boundaries[3:7], everything.boundaries[2:6])
        assert np.median(steps.relative) > 0.2
