"""The fingerprint engine: states that spell out their own token, position and boundary.

It ships so that anyone can test a pipeline, a store or a trainer to the last value: one comparison with
:func:`fingerprint` catches a wrong row, request, layer, order or dtype.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from typing import Self

import numpy as np
import torch
from pydantic import Field

from headrace._version import __version__
from headrace.engines.base import Engine, EngineInfo, EngineOptions
from headrace.errors import ConfigError
from headrace.target import Target
from headrace.types import FINAL, Capture, CaptureSpec, Failure, Row

MIN_HIDDEN = 8
FINAL_CODE = 255


def fingerprint(ids: np.ndarray, spec: CaptureSpec) -> torch.Tensor:
    """The exact states of ``ids``: [taps, tokens, hidden] in the spec's dtype.

    Row r of boundary b is ``[id % 256, id // 256 % 256, r % 256, r // 256 % 256, b, id // 65536, 1, 0...]``; the final
    state has b = 255. Integers up to 256 are exact in bfloat16. The 1 keeps any row from being all zeros.
    """
    tokens = len(ids)
    values = np.asarray(ids, dtype=np.int64)
    positions = np.arange(tokens)
    base = np.zeros((tokens, spec.hidden_size), dtype=np.float32)
    base[:, 0] = values % 256
    base[:, 1] = values // 256 % 256
    base[:, 2] = positions % 256
    base[:, 3] = positions // 256 % 256
    base[:, 5] = values // 65536
    base[:, 6] = 1.0
    states = torch.from_numpy(base).to(getattr(torch, spec.dtype)).unsqueeze(0).repeat(len(spec.taps), 1, 1)
    for index, tap in enumerate(spec.taps):
        states[index, :, 4] = FINAL_CODE if tap == FINAL else int(tap)
    return states


class FingerprintOptions(EngineOptions):
    """Options of the ``fake`` engine."""

    tokens_in_flight: int = Field(65536, ge=1)
    """Tokens pulled before anything is answered."""
    seed: int = 0
    """Seed of the order in which pulled rows are answered."""
    tokens_per_second: float = Field(0.0, ge=0.0)
    """Pretended speed; 0 = as fast as it goes."""


class FingerprintEngine(Engine):
    """Answers rows in a shuffled order with :func:`fingerprint` states, at a pretended speed."""

    Options = FingerprintOptions

    def __init__(self, spec: CaptureSpec, options: FingerprintOptions) -> None:
        if spec.hidden_size < MIN_HIDDEN:
            raise ConfigError(
                f"the fake engine needs hidden_size >= {MIN_HIDDEN}, the target has {spec.hidden_size}"
            )
        self.spec = spec
        self.options = options
        self.info = EngineInfo(name="fake", version=__version__, tokens_in_flight=options.tokens_in_flight)

    @classmethod
    def open(cls, target: Target, spec: CaptureSpec, options: FingerprintOptions) -> Self:
        """Needs only the target's config."""
        return cls(spec, options)

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        """See :class:`Engine`."""
        rng = random.Random(self.options.seed)
        waiting: list[Row] = []
        tokens = 0
        due = time.monotonic()
        source = iter(rows)
        while True:
            while tokens < self.options.tokens_in_flight:
                row = next(source, None)
                if row is None:
                    break
                waiting.append(row)
                tokens += len(row)
            if not waiting:
                return
            index = rng.randrange(len(waiting))
            waiting[index], waiting[-1] = waiting[-1], waiting[index]
            row = waiting.pop()
            tokens -= len(row)
            if self.options.tokens_per_second:
                due = max(due, time.monotonic() - 0.1) + len(row) / self.options.tokens_per_second
                time.sleep(max(0.0, due - time.monotonic()))
            yield self.answer(row)

    def answer(self, row: Row) -> Capture | Failure:
        """The answer to one row; a subclass that injects faults overrides this."""
        return Capture(row.key, row.ids.copy(), fingerprint(row.ids, self.spec))
