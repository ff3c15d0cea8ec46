"""The door of the store: one answer against the row it claims to answer. Nothing is mended here, only accepted or refused."""

from __future__ import annotations

import numpy as np
import torch

from headrace.bits import TORCH_DTYPES, bits_of, first_bad_row, floats_of, norms_of
from headrace.extract.norms import tap_name
from headrace.types import Capture, CaptureSpec, Failure, Row

SAMPLED = 16
"""Every so many tokens the norm of a state is taken for the statistics: norms of all cost more than all else here."""


def check_capture(capture: Capture, row: Row, spec: CaptureSpec) -> Failure | None:
    """Why the capture must not be stored; None when it may.

    Refused are: other ids than the row's (compared one by one), another shape, dtype or device than the store takes, NaN
    or infinity anywhere, and a state that is zero throughout (boundary 0 excepted: padding tokens may embed to zero).
    """
    if wrong := _wrong_ids(capture.ids, row.ids):
        return Failure(row.key, "ids_differ", wrong)
    states = capture.states
    expected = (len(spec.taps), len(row), spec.hidden_size)
    if tuple(states.shape) != expected:
        kind = "row_count" if states.dim() == 3 and states.shape[1] != len(row) else "shape"
        message = f"the engine gave states of shape {list(states.shape)}, expected [taps, tokens, hidden] = {list(expected)}"
        return Failure(row.key, kind, message)
    if states.dtype != TORCH_DTYPES[spec.dtype] or states.device.type != "cpu":
        got = f"{str(states.dtype).removeprefix('torch.')} states on {states.device}"
        return Failure(row.key, "dtype", f"the engine gave {got}, the store takes {spec.dtype} on cpu")
    return _wrong_values(states, row, spec)


def sampled_norms(states: torch.Tensor) -> np.ndarray:
    """Norms of every 16th token's states, float32 [taps, tokens / 16]; the first token, an attention sink, is not among them
    unless the row is that short."""
    first = min(SAMPLED // 2, states.shape[1] // 2)
    sample = states[:, first::SAMPLED]
    values = floats_of(bits_of(sample), str(sample.dtype).removeprefix("torch."))
    norms = norms_of(values)
    # squares of large bf16 values overflow float32
    np.minimum(norms, np.finfo(np.float32).max, out=norms)
    return norms


def _wrong_ids(got: np.ndarray, want: np.ndarray) -> str | None:
    if len(got) != len(want):
        return f"the engine used {len(got)} ids, the row has {len(want)}"
    if np.array_equal(got, want):
        return None
    place = int(np.flatnonzero(np.asarray(got) != want)[0])
    return f"the engine used id {int(got[place])} at position {place}, the row has {int(want[place])}"


def _wrong_values(states: torch.Tensor, row: Row, spec: CaptureSpec) -> Failure | None:
    bits = bits_of(states.contiguous()).reshape(-1, spec.hidden_size)
    must_differ = np.repeat(np.array([tap != 0 for tap in spec.taps]), len(row))
    bad = first_bad_row(bits, spec.dtype, must_differ)
    if bad is None:
        return None
    place, what = bad
    tap_index, position = divmod(place, len(row))
    kind = "all_zero" if what == "only zeros" else "non_finite"
    return Failure(row.key, kind, f"{what} at {tap_name(spec.taps[tap_index])}, position {position}")
