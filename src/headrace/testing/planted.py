"""Stores with one fault planted in each, as engines and disks have really made them: what a verifier must find and name.

Used by the tests and by ``bench/planted.py``. A plant changes the states (or the files) of a good store and says which names
are right for it. The states come from a reference through every boundary, so that a plant is the true wrong thing, not noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from headrace.target import Target
from headrace.types import FINAL, CaptureSpec, Row
from headrace.verify.reference import Everything, Reference

States = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Ground:
    """Everything true about a small set of rows."""

    spec: CaptureSpec
    rows: list[Row]
    everything: Mapping[str, Everything]
    """Every boundary of each row, by key."""
    states: Mapping[str, torch.Tensor]
    """The right states, dtype of the spec, by key."""
    norm: Callable[[torch.Tensor], torch.Tensor]
    """The target's final norm."""
    compute: Callable[[np.ndarray], Everything]
    """Every boundary of any ids, by the target."""
    other: Callable[[np.ndarray], Everything]
    """The same by a target of other weights."""

    @property
    def dtype(self) -> torch.dtype:
        """dtype of stored states."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    @classmethod
    def of(cls, target: Target, other: Target, spec: CaptureSpec, rows: list[Row]) -> Ground:
        """Compute it with transformers; ``other`` is a target of the same shape with slightly other weights."""
        reference = Reference.open("hf", target, spec)
        stranger = Reference.open("hf", other, other.spec(spec.taps, dtype=spec.dtype))
        return cls(
            spec=spec,
            rows=rows,
            everything={row.key: reference.everything(row.ids) for row in rows},
            states={capture.key: capture.states for capture in reference.captures(rows)},
            norm=target.final_norm,
            compute=reference.everything,
            other=stranger.everything,
        )

    def copy(self) -> States:
        """The right states, to be changed."""
        return {key: states.clone() for key, states in self.states.items()}

    def boundary(self, key: str, number: int) -> torch.Tensor:
        """Boundary ``number`` of a row, in the stored dtype."""
        return self.everything[key].boundaries[number].to(self.dtype)

    def stack(self, everything: Everything) -> torch.Tensor:
        """[taps, tokens, hidden] of the spec's taps."""
        taps = [everything.final if t == FINAL else everything.boundaries[int(t)] for t in self.spec.taps]
        return torch.stack(taps).to(self.dtype)

    def pick(self, rng: np.random.Generator, least: int = 24) -> Row:
        """A random row of at least ``least`` tokens."""
        rows = [row for row in self.rows if len(row) >= least]
        return rows[int(rng.integers(len(rows)))]


Change = Callable[[Ground, np.random.Generator], States]


@dataclass(frozen=True)
class Plant:
    """One planted fault of the states."""

    name: str
    codes: tuple[str, ...]
    """Names that are right for it; the first is the one meant."""
    change: Change


def _tap_shift(tap: int, by: int) -> Change:
    def change(ground: Ground, rng: np.random.Generator) -> States:
        states = ground.copy()
        for key, value in states.items():
            value[tap] = ground.boundary(key, int(ground.spec.taps[tap]) + by)
        return states

    return change


def _all_taps_shifted(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    for key, value in states.items():
        for k, tap in enumerate(ground.spec.taps):
            if tap != FINAL:
                value[k] = ground.boundary(key, int(tap) + 1)
    return states


def _final(make: Callable[[Ground, str], torch.Tensor]) -> Change:
    def change(ground: Ground, rng: np.random.Generator) -> States:
        states = ground.copy()
        for key, value in states.items():
            value[ground.spec.tap_index(FINAL)] = make(ground, key).to(ground.dtype)
        return states

    return change


def _un_normed(ground: Ground, key: str) -> torch.Tensor:
    return ground.boundary(key, ground.spec.num_layers)


def _normed_twice(ground: Ground, key: str) -> torch.Tensor:
    return ground.norm(ground.states[key][ground.spec.tap_index(FINAL)])


def _one_layer_early(ground: Ground, key: str) -> torch.Tensor:
    return ground.norm(ground.boundary(key, ground.spec.num_layers - 1))


def _unit(ground: Ground, key: str) -> torch.Tensor:
    last = ground.everything[key].boundaries[-1]
    return last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + ground.spec.norm_eps)


def _no_weight(ground: Ground, key: str) -> torch.Tensor:
    return _unit(ground, key)


def _other_weight_rule(ground: Ground, key: str) -> torch.Tensor:
    """1 + w where the target multiplies by w, or w where it multiplies by 1 + w."""
    by = 1 if ground.spec.norm_kind == "rms" else -1
    return _unit(ground, key) * (ground.norm(torch.ones(ground.spec.hidden_size)) + by)


def _boundary_normed(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    for value in states.values():
        value[1] = ground.norm(value[1])
    return states


def _residual_missing(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    tap = int(ground.spec.taps[1])
    for key, value in states.items():
        bounds = ground.everything[key].boundaries
        value[1] = (bounds[tap] - bounds[tap - 1]).to(ground.dtype)
    return states


def _tap_order(order: list[int]) -> Change:
    def change(ground: Ground, rng: np.random.Generator) -> States:
        return {key: value[order].clone() for key, value in ground.states.items()}

    return change


def _scaled(ground: Ground, rng: np.random.Generator) -> States:
    return {key: value * 0.5 for key, value in ground.states.items()}


def _swapped(ground: Ground, rng: np.random.Generator) -> States:
    """Two captures of equal length hold each other's states."""
    states = ground.copy()
    lengths: dict[int, str] = {}
    for index in rng.permutation(len(ground.rows)):
        row = ground.rows[int(index)]
        if len(row) in lengths:
            other = lengths[len(row)]
            states[row.key], states[other] = states[other], states[row.key]
            return states
        lengths[len(row)] = row.key
    raise ValueError("no two rows of equal length to swap")


def _all_rotated(ground: Ground, rng: np.random.Generator) -> States:
    """Every capture among those of its length holds the next one's states: a batch joined to its requests off by one."""
    states = ground.copy()
    lengths: dict[int, list[str]] = {}
    for row in ground.rows:
        lengths.setdefault(len(row), []).append(row.key)
    for keys in lengths.values():
        for key, other in zip(keys, [*keys[1:], keys[0]], strict=True):
            states[key] = ground.states[other].clone()
    return states


def _one_token_from_row(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    row = ground.pick(rng)
    token = int(rng.integers(12, len(row)))
    states[row.key][:, token] = states[row.key][:, token - 7].clone()
    return states


def _one_token_from_other(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    row, other = ground.pick(rng), ground.pick(rng)
    while other.key == row.key:
        other = ground.pick(rng)
    token = int(rng.integers(8, min(len(row), len(other))))
    states[row.key][:, token] = ground.states[other.key][:, token]
    return states


def _chunk_from_other(ground: Ground, rng: np.random.Generator) -> States:
    """A prefix cache gave the first tokens of another request."""
    states = ground.copy()
    row, other = ground.pick(rng), ground.pick(rng)
    while other.key == row.key:
        other = ground.pick(rng)
    states[row.key][:, :16] = ground.states[other.key][:, :16]
    return states


def _shifted(by: int) -> Change:
    def change(ground: Ground, rng: np.random.Generator) -> States:
        return {key: value.roll(by, dims=1) for key, value in ground.states.items()}

    return change


def _one_capture_shifted(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    row = ground.pick(rng)
    states[row.key] = states[row.key].roll(3, dims=1)
    return states


def _chunk_repeated(ground: Ground, rng: np.random.Generator) -> States:
    """A chunk of prefill written twice: tokens 8..15 stand where 16..23 belong."""
    states = ground.copy()
    row = ground.pick(rng)
    states[row.key][:, 16:24] = ground.states[row.key][:, 8:16]
    return states


def _chunk_repeated_one_tap(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    row = ground.pick(rng)
    states[row.key][1, 16:24] = ground.states[row.key][1, 8:16]
    return states


def _reversed(ground: Ground, rng: np.random.Generator) -> States:
    return {key: value.flip(1) for key, value in ground.states.items()}


def _context_lost(ground: Ground, rng: np.random.Generator) -> States:
    """The second chunk was computed as if the row began there."""
    states = ground.copy()
    row = ground.pick(rng)
    cut = len(row) // 2
    states[row.key][:, cut:] = ground.stack(ground.compute(row.ids[cut:]))
    return states


def _wrong_context(ground: Ground, rng: np.random.Generator) -> States:
    """The second half attends to keys and values of another row's first half."""
    states = ground.copy()
    row, other = ground.pick(rng), ground.pick(rng)
    while other.key == row.key:
        other = ground.pick(rng)
    cut = min(len(row), len(other)) // 2
    mixed = np.concatenate([other.ids[:cut], row.ids[cut:]])
    states[row.key][:, cut:] = ground.stack(ground.compute(mixed))[:, cut:]
    return states


def _bos(dropped: bool) -> Change:
    def change(ground: Ground, rng: np.random.Generator) -> States:
        states: States = {}
        for row in ground.rows:
            value = ground.stack(ground.compute(np.concatenate([[1], row.ids]).astype(np.int32)))
            states[row.key] = (value[:, 1:] if dropped else value[:, :-1]).clone()
        return states

    return change


def _other_weights(ground: Ground, rng: np.random.Generator) -> States:
    return {row.key: ground.stack(ground.other(row.ids)) for row in ground.rows}


def _coarse(ground: Ground, rng: np.random.Generator) -> States:
    """Values went through 4-bit integers with a scale a token."""
    states: States = {}
    for key, value in ground.states.items():
        scale = value.float().abs().amax(dim=-1, keepdim=True) / 7
        states[key] = ((value.float() / scale).round() * scale).to(ground.dtype)
    return states


def _half_zero(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    for value in states.values():
        value[..., value.shape[-1] // 2 :] = 0
    return states


def _halves_swapped(ground: Ground, rng: np.random.Generator) -> States:
    return {key: value.roll(value.shape[-1] // 2, dims=-1) for key, value in ground.states.items()}


def _transposed(ground: Ground, rng: np.random.Generator) -> States:
    """Written as [tokens, taps, hidden] under the shape [taps, tokens, hidden]."""
    return {key: value.transpose(0, 1).contiguous().view(value.shape) for key, value in ground.states.items()}


def _other_dtype(ground: Ground, rng: np.random.Generator) -> States:
    """float16 bytes under the name bfloat16."""
    return {
        key: value.float().clamp(-6e4, 6e4).half().view(torch.bfloat16)
        for key, value in ground.states.items()
    }


def _zero_tokens(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    row = ground.pick(rng)
    states[row.key][:, -4:] = 0
    return states


def _one_nan(ground: Ground, rng: np.random.Generator) -> States:
    states = ground.copy()
    states[ground.pick(rng).key][2, 7, 3] = float("nan")
    return states


STATES: tuple[Plant, ...] = (
    Plant("tap 1 one boundary late", ("boundary-shifted",), _tap_shift(0, 1)),
    Plant("tap 1 one boundary early", ("boundary-shifted",), _tap_shift(0, -1)),
    Plant("tap 2 one boundary late", ("boundary-shifted",), _tap_shift(1, 1)),
    Plant("tap 2 one boundary early", ("boundary-shifted",), _tap_shift(1, -1)),
    Plant("tap 3 one boundary late", ("boundary-shifted",), _tap_shift(2, 1)),
    Plant("tap 3 one boundary early", ("boundary-shifted",), _tap_shift(2, -1)),
    Plant("every tap one boundary late", ("boundary-shifted",), _all_taps_shifted),
    Plant("final state not normed", ("final-not-normed",), _final(_un_normed)),
    Plant("final state normed twice", ("final-normed-twice",), _final(_normed_twice)),
    Plant("final state one layer early", ("final-wrong-layer",), _final(_one_layer_early)),
    Plant("final norm without weight", ("norm-weight",), _final(_no_weight)),
    Plant("final norm with the other weight rule", ("norm-weight",), _final(_other_weight_rule)),
    Plant("a boundary normed", ("boundary-normed",), _boundary_normed),
    Plant("residual stream missing", ("residual-missing",), _residual_missing),
    Plant("two taps exchanged", ("tap-order",), _tap_order([1, 0, 2, 3])),
    Plant("taps rotated", ("tap-order",), _tap_order([3, 0, 1, 2])),
    Plant("states halved", ("scaled",), _scaled),
    Plant("two captures swapped", ("captures-swapped",), _swapped),
    Plant("captures joined to the next request", ("other-capture", "captures-swapped"), _all_rotated),
    Plant("one token replaced from its row", ("token-replaced",), _one_token_from_row),
    Plant("one token replaced from another capture", ("other-capture",), _one_token_from_other),
    Plant("first tokens of another capture", ("other-capture",), _chunk_from_other),
    Plant("tokens one place late", ("token-shift",), _shifted(1)),
    Plant("tokens one place early", ("token-shift",), _shifted(-1)),
    Plant("one capture three places late", ("token-shift",), _one_capture_shifted),
    Plant("a chunk written twice", ("chunk-repeated",), _chunk_repeated),
    Plant("a chunk written twice in one tap", ("chunk-repeated",), _chunk_repeated_one_tap),
    Plant("tokens reversed", ("token-order",), _reversed),
    Plant("second chunk without the first", ("context-lost",), _context_lost),
    Plant("second half after another row", ("wrong-context",), _wrong_context),
    Plant("BOS added, its state dropped", ("bos-added",), _bos(True)),
    Plant("BOS added, last state dropped", ("bos-added",), _bos(False)),
    Plant("another checkpoint", ("other-weights",), _other_weights),
    Plant("four-bit values", ("precision",), _coarse),
    Plant("half of the hidden dimension zero", ("hidden-partial",), _half_zero),
    Plant("halves of the hidden dimension exchanged", ("hidden-order",), _halves_swapped),
    Plant("taps and tokens transposed", ("layout",), _transposed),
    Plant("float16 bytes as bfloat16", ("dtype",), _other_dtype),
    Plant("last tokens zero", ("zero-rows",), _zero_tokens),
    Plant("one value NaN", ("non-finite",), _one_nan),
)
