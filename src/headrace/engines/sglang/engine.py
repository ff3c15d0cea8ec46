"""The ``sglang`` engine: captures through running SGLang servers with Headrace's plug-in, one or many."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator
from typing import Self

import httpx

from headrace.engines.base import Check, Engine, EngineInfo
from headrace.engines.sglang.options import SglangOptions
from headrace.engines.sglang.server import Server, probe
from headrace.engines.sglang.session import Link, Session
from headrace.engines.sglang.staged import StagingView
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.sglang_plugin.protocol import Facts
from headrace.target import Target
from headrace.types import FINAL, Capture, CaptureSpec, Failure, Row

_FORWARDS = 8
"""Forwards' worth of tokens kept in flight at each server, so that its scheduler never waits for the network, nor for the time
between a forward's end and its captures' release here: as much as two forwards of a large model, several of a small one."""
_LEAST_FORWARD = 8192
# What may change a number; everything else a server says about itself is for the doctor.
_SETTINGS = (
    "tp_size", "ep_size", "enable_dp_attention", "chunked_prefill_size", "enable_mixed_chunk",
    "quantization", "kv_cache_dtype", "attention_backend", "disable_cuda_graph", "device", "torch",
)  # fmt: skip


class SglangEngine(Engine):
    """Client of one or several capture servers (``headrace serve``).

    Sends token ids, keeps a budget of tokens in flight, takes results in any order and verifies each: ids element by element,
    one row of states an id, every checksum, finiteness. A dead server's rows go to the others; without the plug-in's proof
    in an answer its server is not used.
    """

    Options = SglangOptions

    def __init__(self, target: Target, link: Link, info: EngineInfo) -> None:
        self.target, self.spec, self.info = target, link.spec, info
        self._link = link

    @classmethod
    def open(cls, target: Target, spec: CaptureSpec, options: SglangOptions) -> Self:
        """Ask all servers for their facts. Raises EngineUnavailableError when none is up, PreflightError when one that
        is up cannot capture ``spec``."""
        if FINAL in spec.taps and not spec.final_normed:
            raise PreflightError(
                "SGLang gives the final state after the final norm; extract with final_normed (the default) or with engine hf"
            )
        servers = [Server(url) for url in options.url]
        staging = StagingView(options.staging)
        asyncio.run(_ask_all(servers, staging.owner))
        link = Link(spec, options, servers, staging, budget=0)
        up = [server.facts for server in servers if server.facts is not None]
        if not up:
            raise EngineUnavailableError("; ".join(server.reason for server in servers))
        for server in servers:
            if server.facts is not None:
                problem = link.acceptable(server.facts)
                if problem:
                    raise PreflightError(f"server {server.url} cannot be used: {problem}")
                staging.join(server.facts)
                server.room = _room(server.facts, spec, options.clients)
        budget = options.tokens_in_flight or sum(
            min(_appetite(facts, options.clients), _room(facts, spec, options.clients)) for facts in up
        )
        link = Link(spec, options, servers, staging, budget)
        return cls(target, link, _info(up, budget))

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        """See :class:`~headrace.engines.base.Engine`. Raises EngineUnavailableError when all servers stay away."""
        session = Session(self._link, rows)
        try:
            yield from session.results()
        finally:
            session.close()

    def preflight(self) -> list[Check]:
        """The doctor's table for every server."""
        from headrace.engines.sglang.preflight import examine

        return examine(self.target, self._link)

    def gauges(self) -> dict[str, float]:
        """Live figures of the servers and their staging folders."""
        servers = self._link.servers
        return {
            "servers_up": float(sum(server.healthy for server in servers)),
            "servers": float(len(servers)),
            "tokens_at_servers": float(sum(server.tokens_in_flight for server in servers)),
            "staging_bytes": float(sum(server.staging_used for server in servers)),
            "server_faults": float(sum(server.faults for server in servers)),
            "retractions": float(sum(server.retractions for server in servers)),
        }

    def close(self) -> None:
        """Delete captures nobody took and sign out of the staging folders."""
        self._link.staging.leave()


async def _ask_all(servers: list[Server], owner: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await asyncio.gather(*(_ask(client, server, owner) for server in servers))


async def _ask(client: httpx.AsyncClient, server: Server, owner: str) -> None:
    try:
        server.recovered(await probe(client, server, owner, uuid.uuid4().hex))
    except EngineUnavailableError as exc:
        server.rest(str(exc))


def _ranks(facts: Facts) -> int:
    return max(1, int(facts.settings.get("dp_size") or 1))


def _appetite(facts: Facts, clients: int) -> int:
    """Tokens in flight that keep a server busy, or one of several clients' part of them."""
    forward = max(_LEAST_FORWARD, int(facts.settings.get("chunked_prefill_size") or 0))
    return max(1, _FORWARDS // clients) * forward * _ranks(facts)


def _room(facts: Facts, spec: CaptureSpec, clients: int) -> int:
    """Tokens whose captures fit this client's part of a server's staging; some space is left for the unevenness of ranks.

    A full folder holds up the server's scheduler, and so all of its clients.
    """
    return max(1, int(0.8 * facts.staging_bytes * _ranks(facts) / (spec.bytes_per_token + 64)) // clients)


def _info(up: list[Facts], budget: int) -> EngineInfo:
    first = up[0]
    settings = {name: first.settings.get(name) for name in _SETTINGS if name in first.settings}
    settings.update(dtype=first.dtype, source=first.source, plugin=first.plugin)
    for facts in up[1:]:
        theirs = {**{name: facts.settings.get(name) for name in settings if name in facts.settings}}
        differ = [name for name, value in theirs.items() if settings[name] != value]
        if facts.engine != first.engine or facts.dtype != first.dtype or differ:
            raise PreflightError(
                f"the servers differ ({', '.join(differ) or 'version or dtype'}); states of one store come from one kind of server"
            )
    return EngineInfo(name="sglang", version=first.engine, tokens_in_flight=budget, settings=settings)
