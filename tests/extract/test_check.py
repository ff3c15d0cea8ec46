"""The door of the store: what is refused, why, and what must pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.engines.fake import fingerprint
from headrace.extract.check import check_capture, sampled_norms
from headrace.testing.faults import SPOILERS
from headrace.types import Capture, CaptureSpec, Failure, Row

from .conftest import make_rows


@pytest.fixture
def row() -> Row:
    return make_rows(1, low=15, high=16)[0]


@pytest.fixture
def good(row: Row, spec: CaptureSpec) -> Capture:
    return Capture(row.key, row.ids.copy(), fingerprint(row.ids, spec))


def refusal(capture: Capture, row: Row, spec: CaptureSpec) -> Failure:
    verdict = check_capture(capture, row, spec)
    assert isinstance(verdict, Failure)
    assert verdict.key == row.key
    return verdict


def test_right_capture_passes(good: Capture, row: Row, spec: CaptureSpec) -> None:
    assert check_capture(good, row, spec) is None
    strided = good.states.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous() and check_capture(replace(good, states=strided), row, spec) is None


@pytest.mark.parametrize(
    ("tokens", "positions"), [(1, [0]), (2, [1]), (15, [7]), (16, [8]), (60, [8, 24, 40, 56])]
)
def test_norms_of_every_16th_token(tokens: int, positions: list[int], spec: CaptureSpec) -> None:
    states = fingerprint(np.arange(tokens) * 1234, spec)
    norms = sampled_norms(states)
    np.testing.assert_allclose(norms, states.float().norm(dim=-1)[:, positions].numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("nan", "non_finite"),
        ("infinity", "non_finite"),
        ("zero_row", "all_zero"),
        ("one_row_too_few", "row_count"),
        ("one_row_too_many", "row_count"),
        ("one_tap_too_few", "shape"),
        ("wrong_id", "ids_differ"),
        ("wrong_request", "ids_differ"),
        ("bos_added", "ids_differ"),
        ("wrong_dtype", "dtype"),
    ],
)
def test_each_fault_is_refused_by_its_name(
    fault: str, kind: str, good: Capture, row: Row, spec: CaptureSpec
) -> None:
    assert refusal(SPOILERS[fault](good), row, spec).kind == kind


def test_every_spoiler_is_covered() -> None:
    marks = test_each_fault_is_refused_by_its_name.pytestmark[0]  # type: ignore[attr-defined]
    assert {fault for fault, _ in marks.args[1]} == set(SPOILERS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_message_names_layer_and_position(
    value: float, good: Capture, row: Row, spec: CaptureSpec
) -> None:
    """EX-20: a NaN at position 7 of layer slot 2 (boundary 5)."""
    states = good.states.clone()
    states[2, 7, 3] = value
    message = refusal(replace(good, states=states), row, spec).message
    assert "boundary 5" in message and "position 7" in message


def test_a_wrong_id_is_named_with_its_place(good: Capture, row: Row, spec: CaptureSpec) -> None:
    ids = row.ids.copy()
    ids[9] = 3
    message = refusal(replace(good, ids=ids), row, spec).message
    assert "id 3 at position 9" in message and str(int(row.ids[9])) in message


def test_equal_lengths_do_not_make_a_wrong_request_right(spec: CaptureSpec) -> None:
    """EX-02: two prompts of equal length swapped pass every shape check."""
    one, other = make_rows(2, low=15, high=16)
    swapped = Capture(one.key, other.ids, fingerprint(other.ids, spec))
    assert refusal(swapped, one, spec).kind == "ids_differ"


def test_a_zero_embedding_is_legitimate(row: Row, spec: CaptureSpec) -> None:
    """Padding tokens embed to zero: at boundary 0, and only there, a zero state is no fault."""
    at_zero = replace(spec, taps=(0, 4, 5, "final"))
    states = fingerprint(row.ids, at_zero)
    states[0, 3] = 0
    assert check_capture(Capture(row.key, row.ids, states), row, at_zero) is None
    states[1, 3] = 0
    assert refusal(Capture(row.key, row.ids, states), row, at_zero).kind == "all_zero"


def test_large_finite_values_pass(row: Row, spec: CaptureSpec) -> None:
    """bf16 holds values whose square overflows float32; they are finite and must not be taken for infinity (EX-21)."""
    states = fingerprint(row.ids, spec)
    states[1, 2, 5] = 1e30
    assert check_capture(Capture(row.key, row.ids, states), row, spec) is None
    assert np.isfinite(sampled_norms(states)).all()


def test_fp16_overflow_is_seen(row: Row, spec: CaptureSpec) -> None:
    """EX-21: 70000 in float16 is infinity, in bfloat16 it is 70144."""
    half = replace(spec, dtype="float16")
    states = fingerprint(row.ids, half)
    states[0, 0, 0] = torch.tensor(70000.0).to(torch.float16)
    assert refusal(Capture(row.key, row.ids, states), row, half).kind == "non_finite"
    assert float(torch.tensor(70000.0).to(torch.bfloat16)) == 70144.0
