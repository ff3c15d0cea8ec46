"""The reference: an engine that is believed, and every boundary of a row when something must be explained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from headrace.engines.base import Engine, open_engine
from headrace.engines.hf import HfEngine, HfOptions
from headrace.errors import EngineError
from headrace.target import Target
from headrace.types import FINAL, Capture, CaptureSpec, Failure, Row


@dataclass(frozen=True, slots=True)
class Everything:
    """Every state of one row, float32, and the final norm taken apart."""

    boundaries: torch.Tensor
    """[N + 1, tokens, hidden]"""
    final: torch.Tensor
    """[tokens, hidden], after the final norm."""

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return int(self.final.shape[0])


class Reference:
    """A reference engine for one spec. Use as a context manager."""

    def __init__(self, target: Target, engine: Engine) -> None:
        self.target = target
        self.engine = engine
        self.spec = engine.spec

    @classmethod
    def open(
        cls, name: str, target: Target, spec: CaptureSpec, options: dict[str, Any] | None = None
    ) -> Self:
        """Open the engine ``name`` for ``spec``. Raises what :func:`headrace.engines.open_engine` raises."""
        return cls(target, open_engine(name, target, spec, options))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def captures(self, rows: Iterable[Row]) -> Iterator[Capture]:
        """Captures of ``rows``, in any order. Raises EngineError on the first row the reference cannot do."""
        for answer in self.engine.capture(rows):
            if isinstance(answer, Failure):
                raise EngineError(
                    f"the reference engine {self.engine.info.name} failed on row {answer.key}: {answer.message}"
                )
            yield answer

    def one(self, row: Row) -> torch.Tensor:
        """States of one row alone, [taps, tokens, hidden]."""
        (capture,) = self.captures([row])
        return capture.states

    @functools.cached_property
    def _full_engine(self) -> HfEngine:
        """An ``hf`` engine of every boundary; it shares the model of an ``hf`` reference."""
        taps = (*range(self.spec.num_layers + 1), FINAL)
        spec = dataclasses.replace(self.spec, taps=taps, final_normed=True)
        if isinstance(self.engine, HfEngine):
            return HfEngine(self.target, spec, HfOptions.model_validate({}), self.engine.model)
        return HfEngine.open(self.target, spec, HfOptions.model_validate({}))

    def everything(self, ids: np.ndarray) -> Everything:
        """All boundaries and the final state of ``ids``, by transformers whatever the reference engine is."""
        row = Row.make(ids, np.ones(len(ids), dtype=bool))
        (answer,) = self._full_engine.capture([row])
        if isinstance(answer, Failure):
            raise EngineError(f"transformers failed on a row to be explained: {answer.message}")
        return Everything(answer.states[:-1].float(), answer.states[-1].float())

    def logits(self, ids: np.ndarray) -> torch.Tensor:
        """The target's own next-token logits, float32 [tokens, vocab], from its own forward pass (its head, not ours)."""
        model = self._full_engine.model
        inputs = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None].to(self._full_engine.device)
        with torch.inference_mode():
            out: torch.Tensor = model(input_ids=inputs, use_cache=False).logits
        return out[0].float().cpu()
