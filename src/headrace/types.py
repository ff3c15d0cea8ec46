"""The nouns everything else shares. Imports nothing of ours, and torch only for type checkers.

One convention holds everywhere inside Headrace; engines convert at their edge, exports at theirs:

- **Boundary** ``b`` in 0..N for a target of N decoder layers: 0 is the embedding output, ``b`` the residual
  stream after ``b`` layers, residual added, before any norm; N is after the last layer, before the final norm.
- **The final state** is boundary N after the model's final norm: what ``lm_head`` reads.
- A **tap** is a boundary or ``"final"``.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xxhash

if TYPE_CHECKING:
    import torch

FINAL: Literal["final"] = "final"
Tap = int | Literal["final"]
NormKind = Literal["rms", "rms1p", "layernorm"]
NORM_KINDS: tuple[str, ...] = ("rms", "rms1p", "layernorm")
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


def parse_taps(value: str | list[Tap] | tuple[Tap, ...], num_layers: int) -> tuple[Tap, ...]:
    """Turn a preset name, ``"2,15,27,final"`` or a list into taps, checked against ``num_layers``.

    Presets: ``eagle3`` is boundaries [2, N//2, N-3] and the final state (the taps EAGLE-3 drafters are served
    with); ``dflash`` is five boundaries spread evenly over [2, N-2] and the final state; ``last`` is the final
    state alone.

    Raises ValueError for an unknown name, a duplicate, or a boundary outside 0..N.
    """
    taps: tuple[Tap, ...]
    if isinstance(value, str):
        name = value.strip().lower()
        if name == "eagle3":
            taps = (2, num_layers // 2, num_layers - 3, FINAL)
        elif name == "dflash":
            taps = (*(round(2 + i * (num_layers - 4) / 4) for i in range(5)), FINAL)
        elif name == "last":
            taps = (FINAL,)
        else:
            taps = tuple(_parse_tap(part) for part in value.split(","))
    else:
        taps = tuple(value)
    check_taps(taps, num_layers)
    return taps


def _parse_tap(text: str) -> Tap:
    text = text.strip().lower()
    if text == FINAL:
        return FINAL
    if text.isdigit():
        return int(text)
    raise ValueError(
        f"tap {text!r} is neither a boundary number, 'final', nor one of the presets eagle3, dflash, last"
    )


def check_taps(taps: tuple[Tap, ...], num_layers: int) -> None:
    """Raise ValueError unless ``taps`` are distinct and each is ``"final"`` or a boundary in 0..num_layers."""
    if not taps:
        raise ValueError("no taps given; name at least one boundary or 'final'")
    for tap in taps:
        if tap == FINAL:
            continue
        if isinstance(tap, bool) or not isinstance(tap, int) or not 0 <= tap <= num_layers:
            raise ValueError(
                f"tap {tap!r} is not 'final' or a boundary in 0..{num_layers} of this {num_layers}-layer target"
            )
    if len(set(taps)) != len(taps):
        raise ValueError(
            f"taps {list(taps)} repeat one; give distinct boundaries"
            + (f" (the presets need a deeper target than {num_layers} layers)" if num_layers < 7 else "")
        )


@dataclass(frozen=True, kw_only=True)
class CaptureSpec:
    """Everything that gives stored numbers their meaning. States may share a store only if their specs are equal.

    ``target`` is where the weights were found; it takes no part in equality, because the hashes do.
    A hash is ``""`` only where the thing it covers does not exist (dummy weights, no tokenizer).
    """

    target: str = field(compare=False)
    """Path or hub id of the target."""
    revision: str = ""
    """Hub revision, if the user pinned one."""
    config_hash: str
    """Hash of the target's config, without fields that do not change its numbers."""
    weights_hash: str = ""
    """Fingerprint of the weights (tensor names, shapes, dtypes and sampled bytes)."""
    quantization: str = ""
    """Quantization method of the weights, ``""`` for none."""
    num_layers: int
    """N: decoder layers of the target."""
    hidden_size: int
    """Width of every state."""
    dtype: str
    """dtype of the stored states: bfloat16, float16 or float32."""
    taps: tuple[Tap, ...]
    """Which states, in storage order."""
    final_normed: bool = True
    """Whether the ``final`` tap, if present, was stored after the final norm."""
    norm_kind: NormKind
    """The final norm: RMS with weight w, RMS with 1+w, or LayerNorm."""
    norm_eps: float
    """Epsilon of the final norm."""
    tokenizer_hash: str = ""
    """Fingerprint of the tokenizer: special ids and probe encodings."""
    template_hash: str = ""
    """Hash of the chat template text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        check_taps(self.taps, self.num_layers)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if self.norm_kind not in NORM_KINDS:
            raise ValueError(f"norm_kind {self.norm_kind!r} is not one of {list(NORM_KINDS)}")
        if self.hidden_size < 1 or self.num_layers < 1:
            raise ValueError("num_layers and hidden_size must be positive")

    @property
    def bytes_per_token(self) -> int:
        """Raw bytes of one token's states over all taps."""
        return len(self.taps) * self.hidden_size * DTYPE_BYTES[self.dtype]

    def tap_index(self, tap: Tap) -> int:
        """Place of ``tap`` on the first axis of a capture. Raises KeyError with the taps there are."""
        try:
            return self.taps.index(tap)
        except ValueError:
            raise KeyError(f"tap {tap!r} was not captured; this spec has {list(self.taps)}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, every field present."""
        out = dataclasses.asdict(self)
        out["taps"] = list(self.taps)
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CaptureSpec:
        """The inverse of :meth:`to_dict`. Raises ValueError on an unknown or missing field: none is guessed."""
        names = {f.name for f in dataclasses.fields(cls)}
        unknown, missing = sorted(set(data) - names), sorted(names - set(data))
        if unknown or missing:
            raise ValueError(f"capture spec has unknown fields {unknown} and lacks {missing}")
        return cls(**{**data, "taps": tuple(data["taps"])})

    def differences(self, other: CaptureSpec) -> list[str]:
        """One line a field in which the two specs differ, ``"field: ours != theirs"``; empty when equal."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} != {getattr(other, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.compare and getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row came from, for error messages and for splitting by conversation."""

    source: str = ""
    """File (or dataset) name as the user gave it."""
    line: int = 0
    """1-based line or record number, 0 if unknown."""
    conversation: str = ""
    """Identity of the conversation: rows fanned out of one conversation share it."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Token ids and loss mask of one training row. Its ``key`` is a hash of both, never a line number."""

    ids: np.ndarray
    """int32 [tokens]"""
    mask: np.ndarray
    """bool [tokens]; True where the token was produced by the model and is a training target."""
    key: str
    origin: Origin = Origin()

    @classmethod
    def make(cls, ids: Any, mask: Any, origin: Origin | None = None) -> Row:
        """Build a row and its key from anything array-like. Raises ValueError if the two lengths differ or are 0."""
        ids_array = np.ascontiguousarray(np.asarray(ids, dtype=np.int32))
        mask_array = np.ascontiguousarray(np.asarray(mask, dtype=bool))
        if ids_array.ndim != 1 or ids_array.shape != mask_array.shape or not len(ids_array):
            raise ValueError(
                f"ids {ids_array.shape} and mask {mask_array.shape} must be equal, non-empty vectors"
            )
        return cls(ids_array, mask_array, row_key(ids_array, mask_array), origin or Origin())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def supervised(self) -> int:
        """Number of tokens with loss."""
        return int(self.mask.sum())


def row_key(ids: np.ndarray, mask: np.ndarray) -> str:
    """32 hex digits: xxh3-128 over the length, the int32 little-endian ids and the packed mask bits."""
    digest = xxhash.xxh3_128(b"headrace row 1\0")
    digest.update(len(ids).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    digest.update(np.packbits(np.asarray(mask, dtype=bool), bitorder="little").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The states of one row: what an engine yields and what a store gives back."""

    key: str
    ids: np.ndarray
    """int32 [tokens]: the ids the engine really used, as it echoed them."""
    states: torch.Tensor
    """[taps, tokens, hidden], on the CPU, dtype of the spec."""
    mask: np.ndarray | None = None
    """bool [tokens]; a store fills it in, an engine leaves it None."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that gave no capture, and why."""

    key: str
    kind: str
    """Short machine-readable reason, such as ``timeout``, ``ids_differ``, ``non_finite``, ``engine_error``."""
    message: str
    """One sentence for a person."""
    retryable: bool = True
    """False when trying again cannot help."""


def hash_json(value: Any) -> str:
    """16 hex digits over the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return xxhash.xxh3_64_hexdigest(text.encode())
