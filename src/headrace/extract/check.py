"""The door of the store: one answer against the row it claims to answer. Nothing is mended here, only accepted or refused."""

from __future__ import annotations

import numpy as np
import torch

from headrace.extract.norms import tap_name
from headrace.types import DTYPE_BYTES, Capture, CaptureSpec, Failure, Row

_DTYPES = {name: getattr(torch, name) for name in DTYPE_BYTES}


def check_capture(capture: Capture, row: Row, spec: CaptureSpec) -> Failure | np.ndarray:
    """The norms of the capture's states, float32 [taps, tokens], or the reason why it must not be stored.

    Refused are: other ids than the row's (compared one by one), another shape or dtype than the spec's, NaN or
    infinity anywhere, and a state that is zero throughout (boundary 0 excepted: padding tokens may embed to zero).
    """
    if wrong := _wrong_ids(capture.ids, row.ids):
        return Failure(row.key, "ids_differ", wrong)
    states = capture.states
    expected = (len(spec.taps), len(row), spec.hidden_size)
    if tuple(states.shape) != expected:
        kind = "row_count" if states.dim() == 3 and states.shape[1] != len(row) else "shape"
        return Failure(
            row.key,
            kind,
            f"the engine gave states of shape {list(states.shape)}, expected [taps, tokens, hidden] = {list(expected)}",
        )
    if states.dtype != _DTYPES[spec.dtype]:
        return Failure(
            row.key,
            "dtype",
            f"the engine gave {str(states.dtype).removeprefix('torch.')} states, the store holds {spec.dtype}",
        )
    # One pass over the states gives both the statistics and the alarm: a norm is finite only if every value is.
    norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)
    return _wrong_values(states, norms, row, spec) or norms.numpy()


def _wrong_ids(got: np.ndarray, want: np.ndarray) -> str | None:
    if len(got) != len(want):
        return f"the engine used {len(got)} ids, the row has {len(want)}"
    if np.array_equal(got, want):
        return None
    place = int(np.flatnonzero(np.asarray(got) != want)[0])
    return f"the engine used id {int(got[place])} at position {place}, the row has {int(want[place])}"


def _wrong_values(states: torch.Tensor, norms: torch.Tensor, row: Row, spec: CaptureSpec) -> Failure | None:
    if not bool(torch.isfinite(norms).all()):
        # A norm may also overflow float32 where every value is finite; only the values themselves decide.
        for tap_index, position in (~torch.isfinite(norms)).nonzero().tolist():
            values = states[tap_index, position]
            if not bool(torch.isfinite(values).all()):
                what = "NaN" if bool(torch.isnan(values).any()) else "infinity"
                return Failure(
                    row.key, "non_finite", f"{what} at {tap_name(spec.taps[tap_index])}, position {position}"
                )
    if not bool(norms.all()):
        for tap_index, position in (norms == 0).nonzero().tolist():
            if spec.taps[tap_index] != 0:
                return Failure(
                    row.key,
                    "all_zero",
                    f"the state at {tap_name(spec.taps[tap_index])}, position {position} is zero throughout",
                )
    return None
