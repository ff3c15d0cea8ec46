"""The one contract every engine keeps, and how engines are found.

An engine is one method, :meth:`Engine.capture`, plus declared facts. Everything derivable (budgets of the whole run,
retries across runs, verification, storage) is written once above it, in ``headrace.extract``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

from headrace import plugins
from headrace.config import Section, build
from headrace.target import Target
from headrace.types import Capture, CaptureSpec, Failure, Row

ENTRY_POINT_GROUP = "headrace.engines"


class EngineOptions(Section):
    """Base of an engine's own typed options; unknown keys are refused."""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine declares about itself; written into the store's provenance."""

    name: str
    """Entry-point name: hf, sglang, vllm, ..."""
    version: str
    """Version of the inference library (transformers, sglang, ...)."""
    tokens_in_flight: int
    """How many tokens of rows it wants pulled and not yet answered; the pipeline sizes its queues by it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Anything that may change a number: device, attention backend, chunk size, parallelism, flags."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a preflight table."""

    name: str
    ok: bool
    value: str
    """What was measured, with its number."""
    mend: str = ""
    """What to do when it failed."""


class Engine(ABC):
    """Captures hidden states of rows.

    Contract of :meth:`capture`:

    - It pulls ``rows`` as it has room and yields exactly one :class:`Capture` or :class:`Failure` for each row pulled, in
      any order. ``next(rows)`` may block for as long as the pipeline holds back admission: an engine with work in flight
      pulls from a thread of its own, so that results keep flowing meanwhile.
    - A capture's ``ids`` are those the engine really used (echoed by a server, never a copy of what was sent where the
      engine can tell), ``states`` are ``[taps, tokens, hidden]`` on the CPU in the dtype and tap order of ``spec``, one
      row of states for each id, owning their memory: the engine never writes to them again.
    - It never pads, trims, reorders or falls back to another engine. What it cannot do right becomes a Failure with a
      reason and, if trying again is pointless, ``retryable=False``.
    - A fault of the engine itself (dead server, out of memory) raises an EngineError; rows pulled and not answered by then
      count as not done. Closing the iterator early cancels what is in flight.
    """

    Options: ClassVar[type[EngineOptions]] = EngineOptions
    spec: CaptureSpec
    """What this engine captures."""
    info: EngineInfo

    @classmethod
    @abstractmethod
    def open(cls, target: Target, spec: CaptureSpec, options: Any) -> Self:
        """Start or connect. Raises PreflightError for what it cannot capture rightly, EngineUnavailableError when down."""

    @abstractmethod
    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        """See the class docstring."""

    def preflight(self) -> list[Check]:
        """Checks made before a run trusts this engine; the run refuses to start when one fails."""
        return []

    def gauges(self) -> dict[str, float]:
        """Live figures for the progress line and the monitor (``staging_bytes``, ...); called from another thread, cheap."""
        return {}

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release what was opened; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def engine_names() -> list[str]:
    """Names of the installed engines, sorted."""
    return plugins.names(ENTRY_POINT_GROUP)


def engine_class(name: str) -> type[Engine]:
    """The engine registered as ``name``. Raises ConfigError for an unknown name or two packages claiming one name."""
    engine: type[Engine] = plugins.load(ENTRY_POINT_GROUP, name, Engine)
    return engine


def open_engine(
    name: str, target: Target, spec: CaptureSpec, options: dict[str, Any] | None = None
) -> Engine:
    """Open the engine registered as ``name`` with its own options.

    Raises ConfigError for an unknown name, two packages claiming one name, or options the engine does not have.
    """
    engine = engine_class(name)
    return engine.open(target, spec, build(engine.Options, options or {}, f"options of engine {name}"))
