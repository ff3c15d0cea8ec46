"""The reference engine: transformers, slow, obvious, and the truth that every other engine is compared with."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field

from headrace.engines import packing
from headrace.engines.base import Engine, EngineInfo, EngineOptions
from headrace.errors import EngineError
from headrace.modelfiles import load_errors
from headrace.taps import ResidualTaps
from headrace.target import Target
from headrace.types import Capture, CaptureSpec, Failure, Row

log = logging.getLogger(__name__)
# Two documents packed against each alone: half-precision noise is below 0.02, a leak between documents is far above.
PACKING_TOLERANCE = 0.05


class HfOptions(EngineOptions):
    """Options of the ``hf`` engine."""

    device: str = "auto"
    """cpu, cuda, cuda:1, or auto (CUDA when there is one)."""
    dtype: str = ""
    """dtype the model computes in; when empty the spec's, but float32 on a processor that has no instructions for 16-bit floats."""
    batch_tokens: int = Field(0, ge=0)
    """Most tokens of one forward, padding included; 0 = 2,048 on a CPU and 16,384 on CUDA. One longer row runs alone."""
    window: int = Field(8, ge=1)
    """How many batches' worth of rows are sorted by length together, so that batches hold little padding."""
    attention: str = "sdpa"
    """transformers' attn_implementation, when rows are padded."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Lay rows end to end instead of padding them: on CUDA when the model passes a check of it (auto), always, or never."""


class HfEngine(Engine):
    """Runs the target with transformers and reads the residual stream by hooks (:class:`headrace.taps.ResidualTaps`).

    Rows are batched by length under a token budget. They are padded on the right inside a forward, where causal attention
    keeps the padding from reaching any real token, or packed without any (:mod:`headrace.engines.packing`); no padding is
    ever yielded. On CUDA the states of one batch travel to pinned memory on a side stream while the next is computed.
    """

    Options = HfOptions

    def __init__(self, target: Target, spec: CaptureSpec, options: HfOptions, model: torch.nn.Module) -> None:
        import transformers

        self.spec = spec
        self.target = target
        self.model: Any = model
        self.device = next(model.parameters()).device
        self.batch_tokens = options.batch_tokens or (16384 if self.device.type == "cuda" else 2048)
        self.window_tokens = options.window * self.batch_tokens
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._taps = ResidualTaps(model, spec.num_layers, spec.taps, final_normed=spec.final_normed)
        self.packed = self._choose_packing(options)
        self.info = EngineInfo(
            name="hf",
            version=transformers.__version__,
            tokens_in_flight=self.window_tokens,
            settings={
                "device": self.device.type,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "attention": packing.NAME if self.packed else options.attention,
                "torch": torch.__version__,
            },
        )

    @classmethod
    def open(cls, target: Target, spec: CaptureSpec, options: HfOptions) -> Self:
        """Load the model. Raises EngineError when transformers cannot."""
        target.require(spec, "the capture spec")
        dtype = options.dtype or computing_dtype(target, spec.dtype, options.device)
        model = load_model(target, dtype, options.device, options.attention)
        return cls(target, spec, options, model)

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        """See :class:`Engine`. Rows of one window are answered longest first."""
        flying: deque[_Flying] = deque()
        for window in _windows(rows, self.window_tokens):
            for batch in _batches(window, self.batch_tokens, packed=self.packed):
                flying.append(self._forward(batch))
                if (
                    self._copies is None or len(flying) > 1
                ):  # on CUDA the next batch computes while this one is read
                    yield from flying.popleft().captures()
            while flying:  # a window ends with nothing in flight: the next row may be long in coming
                yield from flying.popleft().captures()

    def _forward(self, batch: list[Row]) -> _Flying:
        documents = [torch.from_numpy(row.ids) for row in batch]
        inputs = packing.pack(documents, self.device) if self.packed else _pad(documents, self.device)
        places = _places(batch, inputs["input_ids"].shape[1], self.packed)
        try:
            with torch.inference_mode(), self._attention(), self._taps as taps:
                self.model(**inputs, use_cache=False, logits_to_keep=1)
                states = [taps.states.pop(tap).flatten(0, 1) for tap in self.spec.taps]
            # Outside of inference mode: what is copied there could not be written to by whoever gets it.
            return self._fetch(batch, places, inputs["input_ids"].flatten(), states)
        except torch.OutOfMemoryError as exc:
            raise EngineError(
                f"out of memory on {self.device} with a batch of {inputs['input_ids'].numel()} tokens; "
                "lower the engine option batch_tokens"
            ) from exc

    def _fetch(
        self, batch: list[Row], places: list[int], ids: torch.Tensor, states: list[torch.Tensor]
    ) -> _Flying:
        """Start the copy of ``states``, [batch * tokens, hidden] a tap, to the host: row after row, from ``places`` on."""
        dtype = getattr(torch, self.spec.dtype)
        spans = [slice(place, place + len(row)) for place, row in zip(places, batch, strict=True)]
        if self._copies is None:
            own = [side_by_side(states, [span], dtype) for span in spans]  # memory of its own for each row
            rows = [rows_apart(one, [len(row)], len(states))[0] for one, row in zip(own, batch, strict=True)]
            return _Flying(batch, [ids[span] for span in spans], rows, None)
        moved = side_by_side(states, spans, dtype)
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            # Pinned memory comes from torch's caching allocator, which hands a block out again only when its last
            # capture is gone and its copy is over: a ring that grows to what the consumer really holds.
            host = torch.empty(moved.shape, dtype=dtype, pin_memory=True)
            host.copy_(moved, non_blocking=True)
            host_ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            host_ids.copy_(ids, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._copies)
        moved.record_stream(self._copies)
        ids.record_stream(self._copies)
        rows = rows_apart(host, [len(row) for row in batch], len(states))
        return _Flying(batch, [host_ids[span] for span in spans], rows, done)

    def _choose_packing(self, options: HfOptions) -> bool:
        """Whether to pack; with ``auto``, only after two documents packed gave what each gave alone."""
        if options.packing == "off" or (options.packing == "auto" and self.device.type != "cuda"):
            return False
        vocabulary = min(self.target.vocab_size, 1000)
        probes = [Row.make(torch.arange(n) * 7 % vocabulary, torch.ones(n)) for n in (23, 40)]
        self.packed = False
        alone = [self._forward([probe]).states()[0] for probe in probes]
        packing.register()
        self.packed = True
        try:
            together = self._forward(probes).states()
            error = max(
                float((got.float() - want.float()).norm() / want.float().norm())
                for got, want in zip(together, alone, strict=True)
            )
            reason = "" if error < PACKING_TOLERANCE else f"packed states differ by {error:.2g}"
        except EngineError as exc:
            reason = str(exc)
        if reason and options.packing == "on":
            raise EngineError(f"{self.target.name} cannot be packed: {reason}")
        if reason:
            log.info("rows are padded, not packed: %s", reason)
        return not reason

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """The model attends within packed rows while this lasts, and no longer: others may use it besides."""
        config = self.model.config
        before = config._attn_implementation
        if self.packed:
            config._attn_implementation = packing.NAME
        try:
            yield
        finally:
            config._attn_implementation = before


@dataclass(frozen=True)
class _Flying:
    """One batch whose states are on their way to the host."""

    batch: list[Row]
    ids: list[torch.Tensor]
    """Of each row, [tokens], as the model got them."""
    host: list[torch.Tensor]
    """Of each row, [taps, tokens, hidden], contiguous."""
    done: torch.cuda.Event | None

    def states(self) -> list[torch.Tensor]:
        """Those of each row, once they have arrived."""
        if self.done is not None:
            self.done.synchronize()
        return self.host

    def captures(self) -> Iterator[Capture]:
        """One a row."""
        for row, states, ids in zip(self.batch, self.states(), self.ids, strict=True):
            yield Capture(row.key, ids.cpu().numpy().astype(np.int32), states)


def side_by_side(states: list[torch.Tensor], spans: list[slice], dtype: torch.dtype) -> torch.Tensor:
    """Of ``states``, [positions, hidden] a tap, those of each span together: [taps * positions of all spans, hidden].

    On the device: whoever looked at a capture on the host would have to copy it, were it a view across taps.
    """
    return torch.cat([state[span] for span in spans for state in states]).to(dtype)


def rows_apart(states: torch.Tensor, lengths: list[int], taps: int) -> list[torch.Tensor]:
    """The inverse: contiguous views [taps, tokens, hidden], one a span."""
    return [part.unflatten(0, (taps, -1)) for part in states.split([taps * length for length in lengths])]


def _places(batch: list[Row], width: int, packed: bool) -> list[int]:
    """Where each row begins among the tokens of a forward, its lines of ``width`` laid end to end."""
    if packed:
        return [0, *itertools.accumulate(len(row) for row in batch[:-1])]
    return [line * width for line in range(len(batch))]


def _pad(documents: list[torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Model inputs for ``documents`` as one batch, padded on the right."""
    lengths = torch.tensor([len(document) for document in documents])
    ids = torch.nn.utils.rnn.pad_sequence([d.long() for d in documents], batch_first=True)
    inputs = {"input_ids": ids.to(device)}
    if int(lengths.min()) != int(lengths.max()):
        inputs["attention_mask"] = (torch.arange(ids.shape[1])[None, :] < lengths[:, None]).long().to(device)
    return inputs


def computing_dtype(target: Target, dtype: str, device: str = "auto") -> str:
    """The dtype in which states of ``dtype`` are computed: the same, or float32 where that is several times faster.

    An x86 processor of AVX2 multiplies 16-bit floats one at a time. States in float32 are nearer to the truth, and are rounded
    once. Twice the weights must leave half of the memory free; quantized ones are made for the dtype they name.
    """
    import psutil

    slow = _device(device) == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if not slow or dtype == "float32" or target.quantization:
        return dtype
    fits = 2 * target.weights_bytes <= psutil.virtual_memory().total / 2
    return "float32" if fits else dtype


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(target: Target, dtype: str, device: str = "auto", attention: str = "sdpa") -> torch.nn.Module:
    """The target as a transformers causal language model in eval mode. Raises EngineError when it cannot be loaded."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    device = _device(device)
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
    except load_errors() as exc:
        raise EngineError(f"transformers cannot load {target.path}: {' '.join(str(exc).split())}") from exc


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


def _batches(window: list[Row], batch_tokens: int, *, packed: bool) -> Iterator[list[Row]]:
    """Split a window sorted longest-first so that the tokens of a forward, padding included, stay within the budget."""
    batch: list[Row] = []
    tokens = 0
    for row in window:
        cost = len(row) if packed or not batch else len(batch[0])
        if batch and tokens + cost > batch_tokens:
            yield batch
            batch, tokens, cost = [], 0, len(row)
        batch.append(row)
        tokens += cost
    if batch:
        yield batch
