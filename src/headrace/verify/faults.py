"""The catalogue of faults: a code for machines, what it means and the mend, and how a finding reads to a person."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    meaning: str
    mend: str


_REDO = "extract these captures again (headrace repair drops them, headrace extract makes them)"
_ENGINE = "fix the engine's capture and extract again; train nothing on this store"
_CONVENTION = (
    "correct the engine's layer convention (or the spec, if the data came from elsewhere) and extract again"
)

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        # structure
        "store-damaged": Kind("the store's own files cannot be read", "run headrace repair"),
        "shard-missing": Kind(
            "a shard that the index names does not exist",
            "restore it, or run headrace repair and extract again",
        ),
        "shard-truncated": Kind(
            "a shard is shorter or longer than its header says", "run headrace repair and extract again"
        ),
        "checksum": Kind(
            "bytes differ from those that were written", "run headrace repair and extract again"
        ),
        "index-mismatch": Kind(
            "the index and the shards disagree", "run headrace repair: it rebuilds the index"
        ),
        "duplicate-key": Kind("one row is stored twice", "run headrace repair"),
        "parent-missing": Kind(
            "a capture takes its first states from one that is not there",
            "run headrace repair and extract again",
        ),
        "counts-differ": Kind(
            "a capture's counts do not fit its mask", "run headrace repair and extract again"
        ),
        "spec-mismatch": Kind(
            "the store was made for another target, tokenizer or template", "use the model it was made with"
        ),
        "rows-missing": Kind("rows have no capture", "run headrace extract again: it goes on"),
        "foreign-captures": Kind(
            "captures belong to no row", "use the rows it was extracted from, or extract into a new store"
        ),
        "ids-differ": Kind("token ids of a capture are not those of its row", _REDO),
        "mask-differs": Kind("the loss mask of a capture is not that of its row", _REDO),
        # values
        "non-finite": Kind("NaN or infinity", _REDO),
        "zero-rows": Kind("states that are all zeros", _REDO),
        "boundary-shifted": Kind("a tap holds another boundary", _CONVENTION),
        "tap-order": Kind(
            "taps are stored in another order than the spec says",
            "convert the store with the right order, or extract again",
        ),
        "final-not-normed": Kind("the final state lacks the final norm", _CONVENTION),
        "final-normed": Kind("the final state is normed and the spec says it is not", _CONVENTION),
        "final-normed-twice": Kind("the final norm was applied twice", _CONVENTION),
        "final-wrong-layer": Kind("the final state was taken at an earlier layer", _CONVENTION),
        "norm-weight": Kind("the final norm was applied with the wrong weight (w, 1+w or none)", _CONVENTION),
        "boundary-normed": Kind("a boundary went through the final norm", _CONVENTION),
        "residual-missing": Kind(
            "a tap holds a layer's own contribution without the residual stream", _CONVENTION
        ),
        "scaled": Kind("states are the right ones times a constant", _CONVENTION),
        "token-shift": Kind("states belong to tokens at another place in the row", _ENGINE),
        "token-order": Kind("the tokens of a row are in another order", _ENGINE),
        "chunk-repeated": Kind("a stretch of a row repeats another stretch of it", _ENGINE),
        "token-replaced": Kind("single tokens hold the states of other tokens", _ENGINE),
        "captures-swapped": Kind("captures hold each other's states", _ENGINE),
        "other-capture": Kind("states of another capture", _ENGINE),
        "bos-added": Kind(
            "the engine put a BOS token before the row",
            "send ids, not text, and switch the engine's special tokens off",
        ),
        "context-lost": Kind("tokens were computed without the tokens before them", _ENGINE),
        "wrong-context": Kind("tokens are right but were computed with other tokens before them", _ENGINE),
        "other-weights": Kind(
            "states of another checkpoint or numeric setting",
            "use the weights that made the store, or extract again",
        ),
        "precision": Kind(
            "states are coarser than their dtype",
            "extract again without lossy storage or quantized activations",
        ),
        "hidden-partial": Kind(
            "only part of the hidden dimension is right",
            "check tensor parallelism: every rank's part and one all-reduce",
        ),
        "hidden-order": Kind(
            "the hidden dimension is in another order",
            "check tensor parallelism: the order in which ranks are joined",
        ),
        "layout": Kind("taps and tokens are transposed in memory", "write [taps, tokens, hidden]"),
        "dtype": Kind(
            "bytes are of another dtype than the spec says", "write the dtype of the tensor itself"
        ),
        "unexplained": Kind("states are not the target's, and nothing tried matches them", _ENGINE),
        # meaning
        "greedy-differs": Kind(
            "lm_head of the stored final state picks other tokens than the target", _ENGINE
        ),
        "perplexity-differs": Kind(
            "the rows' own tokens are less likely under the stored states than under the target", _ENGINE
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One named fault of a store, over everything it was found in."""

    code: str
    """Key of :data:`KINDS`."""
    detail: str
    """One sentence: what was found where, with its numbers."""
    captures: int = 0
    """Captures in which it was found."""
    examples: tuple[str, ...] = ()
    """Keys of some of them, or file names."""
    taps: tuple[str, ...] = ()
    """Taps concerned; empty for faults that are not about values."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Numbers for machines."""

    def __post_init__(self) -> None:
        if self.code not in KINDS:
            raise ValueError(f"fault code {self.code!r} is not in the catalogue")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the meaning and the mend."""
        kind = KINDS[self.code]
        return {
            "code": self.code,
            "meaning": kind.meaning,
            "detail": self.detail,
            "captures": self.captures,
            "examples": list(self.examples),
            "taps": list(self.taps),
            "values": dict(self.values),
            "mend": kind.mend,
        }
