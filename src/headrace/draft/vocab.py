"""The draft vocabulary: the target tokens a drafter can propose, chosen by how often the target itself produced them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.types import Row, hash_json


@dataclass(frozen=True)
class DraftVocab:
    """Target ids, ascending; draft id i is ``ids[i]``."""

    ids: np.ndarray
    """int64 [V]"""
    vocab_size: int
    coverage: float
    """Share of supervised training tokens that are in it."""

    @property
    def d2t(self) -> Tensor:
        """int64 [V] offsets: target id = i + d2t[i]."""
        return torch.from_numpy(self.ids - np.arange(len(self.ids)))

    @property
    def t2d(self) -> Tensor:
        """bool [vocab]: whether a target token is in it."""
        member = torch.zeros(self.vocab_size, dtype=torch.bool)
        member[torch.from_numpy(self.ids)] = True
        return member

    @property
    def hash(self) -> str:
        """16 hex digits over the ids: two drafters with one hash can be compared token by token."""
        return hash_json([self.vocab_size, *self.ids.tolist()])


def count_tokens(rows: Iterable[Row], vocab_size: int) -> np.ndarray:
    """How often each token is a training target, int64 [vocab]. Raises ConfigError for an id outside the vocabulary."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        if int(row.ids.max()) >= vocab_size or int(row.ids.min()) < 0:
            raise ConfigError(
                f"row {row.key} has token id {int(row.ids.max())}, the target's vocabulary ends at {vocab_size - 1}; "
                "prepare the rows with this target's tokenizer"
            )
        counts += np.bincount(row.ids[row.mask], minlength=vocab_size)
    return counts


def choose_vocab(size: int, vocab_size: int, counts: np.ndarray | None) -> DraftVocab:
    """The ``size`` most frequent tokens (ties: lower id first); 0 or ``vocab_size`` means all, with the identity as map.

    Raises ConfigError for a reduced vocabulary without frequencies: the first ``size`` ids would look fine in training
    and be wrong in serving.
    """
    if not 0 <= size <= vocab_size:
        raise ConfigError(
            f"draft vocabulary of {size} does not fit the target's {vocab_size}; give 0 (all) to {vocab_size}"
        )
    known = 0 if counts is None else int(counts.sum())
    if size in (0, vocab_size):
        return DraftVocab(np.arange(vocab_size, dtype=np.int64), vocab_size, 1.0)
    if counts is None or not known:
        raise ConfigError(
            f"a draft vocabulary of {size} of {vocab_size} tokens needs token frequencies, and there are no supervised training "
            "tokens to count; give rows with a loss mask, or 0 for the full vocabulary"
        )
    ids = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)
    return DraftVocab(ids, vocab_size, float(counts[ids].sum() / known))
