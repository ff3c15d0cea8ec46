"""The reference engine: transformers, slow, obvious, and the truth that every other engine is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field

from headrace.engines.base import Engine, EngineInfo, EngineOptions
from headrace.errors import EngineError
from headrace.taps import ResidualTaps
from headrace.target import Target
from headrace.types import Capture, CaptureSpec, Failure, Row


class HfOptions(EngineOptions):
    """Options of the ``hf`` engine."""

    device: str = "auto"
    """cpu, cuda, cuda:1, or auto (CUDA when there is one)."""
    dtype: str = ""
    """dtype the model computes in; the spec's dtype when empty."""
    batch_tokens: int = Field(0, ge=0)
    """Most tokens of one forward, padding included; 0 = 2,048 on a CPU and 16,384 on CUDA. One longer row runs alone."""
    window: int = Field(8, ge=1)
    """How many batches' worth of rows are sorted by length together, so that batches hold little padding."""
    attention: str = "sdpa"
    """transformers' attn_implementation."""


class HfEngine(Engine):
    """Runs the target with transformers and reads the residual stream by hooks (:class:`headrace.taps.ResidualTaps`).

    Rows are batched by length under a token budget and padded on the right inside a forward only; causal attention
    keeps the padding from reaching any real token, and no padding is ever yielded.
    """

    Options = HfOptions

    def __init__(self, target: Target, spec: CaptureSpec, options: HfOptions, model: torch.nn.Module) -> None:
        import transformers

        self.spec = spec
        self.target = target
        self.model = model
        self.device = next(model.parameters()).device
        self.batch_tokens = options.batch_tokens or (16384 if self.device.type == "cuda" else 2048)
        self.window_tokens = options.window * self.batch_tokens
        self.info = EngineInfo(
            name="hf",
            version=transformers.__version__,
            tokens_in_flight=self.window_tokens,
            settings={
                "device": self.device.type,
                "dtype": options.dtype or spec.dtype,
                "attention": options.attention,
                "torch": torch.__version__,
            },
        )

    @classmethod
    def open(cls, target: Target, spec: CaptureSpec, options: HfOptions) -> Self:
        """Load the model. Raises EngineError when transformers cannot."""
        target.require(spec, "the capture spec")
        return cls(
            target,
            spec,
            options,
            load_model(target, options.dtype or spec.dtype, options.device, options.attention),
        )

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        """See :class:`Engine`. Rows of one window are answered longest first."""
        for window in _windows(rows, self.window_tokens):
            for batch in _batches(window, self.batch_tokens):
                yield from self._forward(batch)

    def _forward(self, batch: list[Row]) -> Iterator[Capture]:
        lengths = [len(row) for row in batch]
        ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, : len(row)] = torch.from_numpy(row.ids)
        padded = min(lengths) != max(lengths)
        inputs: dict[str, Any] = {"input_ids": ids.to(self.device)}
        if padded:
            mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
            inputs["attention_mask"] = mask.long().to(self.device)
        try:
            with (
                torch.inference_mode(),
                ResidualTaps(
                    self.model, self.spec.num_layers, self.spec.taps, final_normed=self.spec.final_normed
                ) as taps,
            ):
                self.model(**inputs, use_cache=False, logits_to_keep=1)
        except torch.OutOfMemoryError as exc:
            raise EngineError(
                f"out of memory on {self.device} with a batch of {ids.numel()} tokens; lower the engine option batch_tokens"
            ) from exc
        dtype = getattr(torch, self.spec.dtype)
        for i, row in enumerate(batch):
            states = torch.stack([taps.states[tap][i, : len(row)] for tap in self.spec.taps]).to(
                "cpu", dtype, copy=True
            )
            used = inputs["input_ids"][i, : len(row)].cpu().numpy().astype(np.int32)
            yield Capture(row.key, used, states.contiguous())


def load_model(target: Target, dtype: str, device: str = "auto", attention: str = "sdpa") -> torch.nn.Module:
    """The target as a transformers causal language model in eval mode. Raises EngineError when it cannot be loaded."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(target.path),
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            local_files_only=True,
        )
        return model.to(device).eval()  # type: ignore[no-any-return]
    except torch.OutOfMemoryError as exc:
        raise EngineError(
            f"{target.name} does not fit on {device}; use another device or a serving engine"
        ) from exc
    except (OSError, ValueError, KeyError, ImportError) as exc:
        raise EngineError(f"transformers cannot load {target.path}: {exc}") from exc


def _windows(rows: Iterable[Row], window_tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows of about ``window_tokens`` tokens, longest first inside each."""
    window: list[Row] = []
    tokens = 0
    for row in rows:
        if window and tokens + len(row) > window_tokens:
            yield sorted(window, key=len, reverse=True)
            window, tokens = [], 0
        window.append(row)
        tokens += len(row)
    if window:
        yield sorted(window, key=len, reverse=True)


def _batches(window: list[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Split a window sorted longest-first so that ``rows * longest`` stays within ``batch_tokens``."""
    start = 0
    while start < len(window):
        size = max(1, batch_tokens // len(window[start]))
        yield window[start : start + size]
        start += size
