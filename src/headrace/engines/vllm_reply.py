"""From vLLM's reply and the file it names to a capture: everything that could be wrong is looked at, nothing is mended."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from headrace.errors import CaptureError
from headrace.target import Target
from headrace.types import FINAL, Capture, CaptureSpec, Failure, Row

if TYPE_CHECKING:
    import torch

PROTOCOL = 1


@dataclass(frozen=True)
class Facts:
    """What the connector says about the engine it runs in."""

    vllm: str = ""
    layers: tuple[int, ...] = ()
    dtype: str = ""
    num_layers: int = 0
    hidden_size: int = 0
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    chunked_prefill: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    """Everything it said."""

    @classmethod
    def parse(cls, text: str) -> Facts:
        """From the file's metadata. Raises CaptureError for another protocol."""
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, value: dict[str, Any]) -> Facts:
        """From the connector's own dict. Raises CaptureError for another protocol."""
        if value.get("protocol") != PROTOCOL:
            raise CaptureError(
                f"the vLLM server speaks capture protocol {value.get('protocol')}, this client {PROTOCOL}; "
                "run the same Headrace on both sides"
            )
        names = cls.__dataclass_fields__.keys() - {"settings"}
        return cls(
            **{**{k: v for k, v in value.items() if k in names}, "layers": tuple(value["layers"])},
            settings=value,
        )


def wanted_layers(spec: CaptureSpec) -> list[int]:
    """Layer ids to ask vLLM for: its id k is boundary k, and the final state is boundary N, normed on this side."""
    return sorted({spec.num_layers if tap == FINAL else int(tap) for tap in spec.taps})


def too_long(row: Row, facts: Facts) -> Failure | None:
    """A failure for a row this engine would refuse, or wait for for ever."""
    if facts.max_model_len and len(row) + 1 > facts.max_model_len:
        limit = f"max_model_len {facts.max_model_len} leaves room for {facts.max_model_len - 1} tokens"
    elif (
        facts.max_num_batched_tokens and not facts.chunked_prefill and len(row) > facts.max_num_batched_tokens
    ):
        limit = f"without chunked prefill at most max_num_batched_tokens = {facts.max_num_batched_tokens} tokens fit"
    else:
        return None
    return Failure(
        row.key, "too_long", f"row {row.key} has {len(row)} tokens; vLLM's {limit}", retryable=False
    )


def reply_path(row: Row, reply: dict[str, Any] | None, staging: Path | None) -> Path | Failure:
    """The file a reply names, as seen from here."""
    ours = (reply or {}).get("headrace")
    if not isinstance(ours, dict):
        message = "the server answered without hidden states; start it with the HeadraceConnector (see headrace.engines.vllm)"
        return Failure(row.key, "no_states", message, retryable=False)
    if "error" in ours:
        return Failure(row.key, "engine_error", f"vLLM gave no states for row {row.key}: {ours['error']}")
    if ours.get("key") != row.key:
        return Failure(row.key, "wrong_key", f"the reply to row {row.key} is about {ours.get('key')}")
    path = Path(ours["path"])
    return path if staging is None else staging / path.parent.name / path.name


class Pending:
    """A file that is being written. :meth:`ready` until true, then :meth:`read`."""

    def __init__(self, row: Row, path: Path, timeout: float) -> None:
        self.row = row
        self.path = path
        self._error = path.with_suffix(".error")
        self._deadline = time.monotonic() + timeout

    def ready(self) -> bool:
        """The file is whole, or there will be none: it appears by a rename, never half-written."""
        return self.path.exists() or self._error.exists() or time.monotonic() > self._deadline

    def read(self, target: Target, spec: CaptureSpec) -> Capture | Failure:
        """The capture; the file is deleted."""
        key = self.row.key
        if not self.path.exists():
            if not self._error.exists():
                return Failure(
                    key, "timeout", f"vLLM announced {self.path} for row {key} and did not write it in time"
                )
            message = self._error.read_text(encoding="utf-8")
            self._error.unlink(missing_ok=True)
            return Failure(key, "engine_error", f"vLLM could not write the states of row {key}: {message}")
        try:
            return self._capture(target, spec)
        except CaptureError as exc:
            return Failure(key, "broken_reply", str(exc))
        finally:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def facts(self) -> Facts | Failure:
        """Only what the file says of the engine; the file is deleted."""
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return Failure(self.row.key, "timeout", "there is no such file", retryable=False)
        try:
            with safe_open(self.path, framework="pt") as file:
                return Facts.parse(file.metadata()["facts"])
        except (SafetensorError, OSError, CaptureError) as exc:
            return Failure(
                self.row.key, "broken_reply", f"{self.path} cannot be read: {exc}", retryable=False
            )
        finally:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _capture(self, target: Target, spec: CaptureSpec) -> Capture:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                metadata, states, ids = file.metadata(), file.get_tensor("states"), file.get_tensor("ids")
        except (SafetensorError, OSError) as exc:
            raise CaptureError(f"{self.path} cannot be read ({exc})") from exc
        facts = Facts.parse(metadata["facts"])
        used = ids.numpy().astype(np.int32)
        self._check(metadata, states, used, facts, spec)
        return Capture(self.row.key, used, assemble(states, facts.layers, target, spec))

    def _check(
        self, metadata: dict[str, str], states: torch.Tensor, ids: np.ndarray, facts: Facts, spec: CaptureSpec
    ) -> None:
        """Raise CaptureError unless the file is this row's, whole, and of this spec."""
        key = self.row.key
        if metadata["key"] != key:
            raise CaptureError(f"{self.path} holds the states of {metadata['key']}, not of row {key}")
        if not np.array_equal(ids, self.row.ids):
            raise CaptureError(
                f"vLLM used {len(ids)} ids for row {key} that are not the {len(self.row)} sent"
            )
        want = (len(facts.layers), len(ids), spec.hidden_size)
        if tuple(states.shape) != want or str(states.dtype) != f"torch.{spec.dtype}":
            raise CaptureError(
                f"states of row {key} are {states.dtype} {tuple(states.shape)}, expected {spec.dtype} {want}"
            )
        if _checksum(states) != metadata["checksum"]:
            raise CaptureError(f"states of row {key} changed between vLLM and here (checksum)")


def assemble(
    states: torch.Tensor, layers: tuple[int, ...], target: Target, spec: CaptureSpec
) -> torch.Tensor:
    """[taps, tokens, hidden] in the spec's order from ``states`` [layers, tokens, hidden]; raises CaptureError for a missing layer."""
    import torch

    missing = set(wanted_layers(spec)) - set(layers)
    if missing:
        raise CaptureError(
            f"vLLM captures layers {list(layers)}; {sorted(missing)} are missing: start it with {wanted_layers(spec)}"
        )
    taps = []
    for tap in spec.taps:
        state = states[layers.index(spec.num_layers if tap == FINAL else int(tap))]
        taps.append(target.final_norm(state) if tap == FINAL and spec.final_normed else state)
    return torch.stack(taps)


def _checksum(states: torch.Tensor) -> str:
    import torch

    return xxhash.xxh3_64_hexdigest(states.contiguous().view(torch.uint8).numpy().data)
