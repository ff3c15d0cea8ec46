"""The ``vllm`` engine: states through vLLM's own ``extract_hidden_states`` and a connector of ours, served or in this process.

With ``url`` it is a client of running OpenAI-compatible servers (:func:`server_command` gives the line that starts one), else it
runs vLLM offline, in a Python that has vLLM. Both send one request a row, many at once, and read one file a row.

vLLM's layer id k is boundary k, and id N is boundary N, not normed: the final state is normed on this side by the target's own
final norm. Prefix caching and chunked prefill stay on: states live in cache pages of their own.
"""

from __future__ import annotations

import json
import queue
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import Field

from headrace.config import ServerUrl
from headrace.engines.base import Check, Engine, EngineInfo, EngineOptions
from headrace.engines.feed import RowFeed
from headrace.engines.vllm_reply import Facts, too_long, wanted_layers
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.target import Target
from headrace.types import Capture, CaptureSpec, Failure, Row

_STEPS = 4
"""Of vLLM's, that are sent to a server ahead of their answers."""
Answer = Capture | Failure | BaseException
Deliver = Callable[[Row, Answer], None]


class VllmOptions(EngineOptions):
    """Options of the ``vllm`` engine. Those of the second group belong to a server's own command line when ``url`` is given."""

    url: list[ServerUrl] = Field(default_factory=list)
    """Base URLs of servers started with our connector; none: run vLLM here."""
    staging: Path | None = None
    """Folder the states pass through. Offline: where to make it (default /dev/shm). Server: its folder as seen from here,
    when that differs from what the server was told."""
    tokens_in_flight: int = Field(0, ge=0)
    """Tokens sent and not yet answered; 0 = four times what vLLM computes in one step, a server, shared by the clients."""
    clients: int = Field(1, ge=1)
    """Clients of the same servers at one time, this one included."""
    timeout_seconds: float = Field(600.0, gt=0)
    """Longest time for one row."""

    max_model_len: int = Field(0, ge=0)
    """Longest row plus one; 0 = what the model's config says."""
    max_num_batched_tokens: int = Field(0, ge=0)
    """Tokens of one step; 0 = vLLM's choice."""
    max_num_seqs: int = Field(0, ge=0)
    """Rows of one step; 0 = vLLM's choice."""
    gpu_memory_utilization: float = Field(0.0, ge=0, le=1)
    """Share of the device's memory to use; 0 = vLLM's choice."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Devices a layer is split over."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Refused unless 1: earlier stages' states never reach the last one."""
    enable_prefix_caching: bool = True
    """Compute common beginnings once."""
    enforce_eager: bool = False
    """No CUDA graphs or compilation."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vllm.LLM."""


class Backend(Protocol):
    """Where rows go. Every submitted row is delivered exactly once, by any thread, until :meth:`cancel`."""

    facts: Facts

    def submit(self, row: Row, deliver: Deliver) -> None:
        """Start one row."""

    def cancel(self) -> None:
        """Give up what is in flight; nothing of it is delivered."""

    def close(self) -> None:
        """Stop."""


class VllmEngine(Engine):
    """See the module docstring."""

    Options = VllmOptions

    def __init__(self, spec: CaptureSpec, backend: Backend, budget: int, settings: dict[str, Any]) -> None:
        self.spec = spec
        self.backend = backend
        self.info = EngineInfo(
            name="vllm", version=backend.facts.vllm, tokens_in_flight=budget, settings=settings
        )

    @classmethod
    def open(cls, target: Target, spec: CaptureSpec, options: VllmOptions) -> Self:
        """Connect to servers or start vLLM here.

        Raises PreflightError for what vLLM cannot capture, or a server that was not started for it; EngineUnavailableError
        when a server cannot be reached or vLLM cannot be imported or started.
        """
        target.require(spec, "the capture spec")
        refuse(target, spec, options)
        backend: Backend
        if options.url:
            from headrace.engines.vllm_server import ServerBackend

            backend = ServerBackend(target, spec, options)
        else:
            from headrace.engines.vllm_offline import OfflineBackend

            backend = OfflineBackend(target, spec, options)
        try:
            return cls._checked(spec, backend, options)
        except BaseException:
            backend.close()
            raise

    @classmethod
    def _checked(cls, spec: CaptureSpec, backend: Backend, options: VllmOptions) -> Self:
        facts = backend.facts
        wrong = [check for check in fact_checks(facts, spec) if not check.ok]
        if wrong:
            raise PreflightError(f"vLLM: {wrong[0].name} is {wrong[0].value}. {wrong[0].mend}")
        servers = max(1, len(options.url))
        settings = {
            **facts.settings,
            "mode": "server" if options.url else "offline",
            "servers": servers,
        }
        return cls(
            spec, backend, servers * (options.tokens_in_flight or _appetite(facts, options.clients)), settings
        )

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        """See :class:`Engine`. One capture at a time: the iterator must end (or be closed) before the next begins."""
        answers: queue.SimpleQueue[tuple[Row, Answer] | None] = queue.SimpleQueue()
        broken: list[BaseException] = []

        def ended(error: BaseException | None) -> None:
            if error is not None:
                broken.append(error)
            answers.put(None)

        def sink(row: Row) -> None:
            failure = too_long(row, self.backend.facts)
            if failure is not None:
                answers.put((row, failure))
            else:
                self.backend.submit(row, lambda row, answer: answers.put((row, answer)))

        feed = RowFeed(rows, self.info.tokens_in_flight, sink, ended)
        try:
            yield from self._results(feed, answers, broken)
        finally:
            feed.close()
            self.backend.cancel()

    def _results(
        self,
        feed: RowFeed,
        answers: queue.SimpleQueue[tuple[Row, Answer] | None],
        broken: list[BaseException],
    ) -> Iterator[Capture | Failure]:
        answered, over = 0, False
        while not (over and answered == feed.pulled):
            item = answers.get()
            if item is None:
                over = True
                if broken:
                    raise broken[0]
                continue
            row, answer = item
            if isinstance(answer, BaseException):
                raise answer
            answered += 1
            feed.release(len(row))
            yield answer

    def preflight(self) -> list[Check]:
        """What the server says of itself, and a row that fills several chunks, sent twice: the cached one must be the same."""
        return [*fact_checks(self.backend.facts, self.spec), *self._probe()]

    def _probe(self) -> list[Check]:
        import numpy as np

        facts = self.backend.facts
        longest = min(2 * facts.max_num_batched_tokens + 3, facts.max_model_len - 1, 4096)
        if not facts.chunked_prefill:
            longest = min(longest, facts.max_num_batched_tokens)
        ids = np.random.default_rng(0).integers(
            0, max(2, facts.settings.get("vocab_size", 2) - 1), max(1, longest)
        )
        rows = [
            Row.make(ids, np.ones(len(ids), dtype=bool)),
            Row.make(ids[: len(ids) // 2 + 1], np.ones(len(ids) // 2 + 1, dtype=bool)),
        ]
        name = f"a row of {len(ids)} tokens and its first half, twice"
        first = list(self.capture(rows))
        second = list(self.capture(rows))
        failed = [answer for answer in [*first, *second] if isinstance(answer, Failure)]
        if failed:
            return [Check(name, False, failed[0].message, "See the server's log")]
        worst = max(
            _difference(a, b)
            for a in first
            for b in second
            if isinstance(a, Capture) and isinstance(b, Capture)
        )
        mend = "The prefix cache or chunked prefill gives other states: switch enable_prefix_caching off"
        return [Check(name, worst < 0.2, f"they differ by at most {worst:.2g} (relative)", mend)]

    def close(self) -> None:
        """Disconnect, or stop the vLLM of this process."""
        self.backend.close()


def _difference(a: Capture, b: Capture) -> float:
    """Largest relative difference of a state over the tokens that both have (one is a prefix of the other)."""
    tokens = min(len(a.ids), len(b.ids))
    x, y = a.states[:, :tokens].float(), b.states[:, :tokens].float()
    return float(((x - y).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-30)).max())


def refuse(target: Target, spec: CaptureSpec, options: VllmOptions) -> None:
    """Raise PreflightError for what vLLM cannot capture rightly, before anything is started."""
    if options.pipeline_parallel_size > 1:
        raise PreflightError(
            "vLLM cannot capture with pipeline parallelism: states of earlier stages never reach the last one. "
            "Use tensor_parallel_size instead"
        )
    if 0 in spec.taps and "kv_lora_rank" in target.config:
        raise PreflightError(
            f"vLLM cannot capture boundary 0 of {target.model_type} (multi-head latent attention): its first layer has no "
            "residual yet. Take the embedding from the target's weights, or capture with another engine"
        )


def fact_checks(facts: Facts, spec: CaptureSpec) -> list[Check]:
    """Whether this vLLM captures what the spec says, from what its connector says."""
    wanted = wanted_layers(spec)
    restart = "Start it with the line that headrace.engines.vllm.server_command gives"
    layers = set(wanted) <= set(facts.layers)
    shape = (facts.num_layers, facts.hidden_size)
    return [
        Check("captured layers", layers, str(list(facts.layers)), f"{wanted} are needed. {restart}"),
        Check(
            "dtype",
            facts.dtype == spec.dtype,
            facts.dtype,
            f"The spec says {spec.dtype}: start it with --dtype {spec.dtype}",
        ),
        Check(
            "layers and hidden size",
            shape == (spec.num_layers, spec.hidden_size),
            f"{shape[0]} and {shape[1]}",
            f"The target has {spec.num_layers} and {spec.hidden_size}: it serves another model",
        ),
    ]


def _appetite(facts: Facts, clients: int) -> int:
    """Tokens in flight that keep a server busy, or one of several clients' part of them. What the server may hold in its staging
    folder is for all of them, and beyond it rows fail."""
    return max(1, _STEPS // clients) * max(2048, facts.max_num_batched_tokens)


def vllm_arguments(spec: CaptureSpec, staging: Path) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that make it capture, in any mode; the same as flags of its server."""
    return {
        "dtype": spec.dtype,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": wanted_layers(spec)}},
        },
        "kv_transfer_config": {
            "kv_connector": "HeadraceConnector",
            "kv_connector_module_path": "headrace.engines.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"staging": str(staging)},
        },
    }


def server_command(python: str, target: Target, spec: CaptureSpec, staging: Path, *more: str) -> list[str]:
    """The command that starts a vLLM server ready for capture; ``python`` is one that has vLLM and Headrace."""
    given = vllm_arguments(spec, staging.absolute())
    flags = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(target.path),
        "--dtype",
        given["dtype"],
    ]
    for name in ("speculative_config", "kv_transfer_config"):
        flags += [f"--{name.replace('_', '-')}", json.dumps(given[name], separators=(",", ":"))]
    return [*flags, *more]


def request_parameters(row: Row) -> tuple[str, dict[str, Any]]:
    """A name no other request has, and the parameters that ask for the states of ``row``."""
    name = f"{row.key}-{secrets.token_hex(4)}"
    return name, {"headrace": {"name": name, "key": row.key}}


def import_error(exc: ImportError) -> EngineUnavailableError:
    """vLLM is not here: say which Python would have it."""
    return EngineUnavailableError(
        f"vLLM cannot be imported here ({exc}); run this command with the Python of a vLLM environment that has Headrace "
        "installed, or start a server there and give its url"
    )
