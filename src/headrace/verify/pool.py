"""Small signatures of every re-extracted state, to find which other capture a wrong state belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.types import Row

SIGNATURE = (
    24  # random directions a state is reduced to: distances keep within about 20 %, enough to name a suspect
)


@dataclass(frozen=True, slots=True)
class Match:
    """Where states were found in another capture."""

    key: str
    positions: np.ndarray
    """int64 [tokens asked for]: place in that capture of the nearest state; -1 where it lies in yet another one."""


class Pool:
    """Signatures of reference states, bounded by ``max_tokens``; captures beyond that are not searched."""

    def __init__(self, hidden_size: int, row_of: Callable[[str], Row], max_tokens: int = 400_000) -> None:
        self.row_of = row_of
        """Gives the row of a key that was added."""
        generator = torch.Generator().manual_seed(7)
        self._directions = torch.randn(hidden_size, SIGNATURE, generator=generator) / SIGNATURE**0.5
        self._max_tokens = max_tokens
        self._tokens = 0
        self._keys: list[str] = []
        self._signatures: list[torch.Tensor] = []
        self._joined: tuple[torch.Tensor, np.ndarray, np.ndarray] | None = None

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: str, states: torch.Tensor) -> None:
        """Remember the reference ``states`` [taps, tokens, hidden] of ``key``."""
        tokens = states.shape[1]
        if self._tokens + tokens > self._max_tokens:
            return
        self._tokens += tokens
        self._keys.append(key)
        self._signatures.append(self._sign(states))
        self._joined = None

    def find(self, states: torch.Tensor, taps: list[int], exclude: str) -> list[Match]:
        """Captures nearest to ``states`` [len(taps), tokens, hidden], the one that owns most tokens first, at most three."""
        if not self._signatures:
            return []
        pool, owners, places = self._join()
        asked = self._sign(states)
        distance = torch.zeros(asked.shape[1], pool.shape[1])
        for i, tap in enumerate(taps):
            distance += torch.cdist(asked[i], pool[tap])
        if exclude in self._keys:
            distance[:, torch.from_numpy(owners == self._keys.index(exclude))] = float("inf")
        nearest = distance.argmin(dim=1).numpy()
        found = owners[nearest]
        ranked, counts = np.unique(found, return_counts=True)
        order = ranked[np.argsort(-counts)][:3]
        return [
            Match(self._keys[o], np.where(found == o, places[nearest], -1))
            for o in order
            if self._keys[o] != exclude
        ]

    def _sign(self, states: torch.Tensor) -> torch.Tensor:
        values = torch.nan_to_num(states.float(), nan=0.0, posinf=0.0, neginf=0.0)
        signed: torch.Tensor = torch.nn.functional.normalize(values, dim=-1) @ self._directions
        return signed

    def _join(self) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        if self._joined is None:
            lengths = [s.shape[1] for s in self._signatures]
            owners = np.repeat(np.arange(len(lengths)), lengths)
            places = np.concatenate([np.arange(n) for n in lengths])
            self._joined = (torch.cat(self._signatures, dim=1), owners, places)
        return self._joined
