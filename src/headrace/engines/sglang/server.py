"""One SGLang server as the client sees it: health, circuit breaker, rate, what is in flight."""

from __future__ import annotations

import logging
import time
from typing import Any

import httpx

from headrace.errors import EngineUnavailableError, PreflightError
from headrace.sglang_plugin.protocol import Facts, Reply, Wish

_LOG = logging.getLogger(__name__)
_FAULTS = 3
"""Faults in a row that open the breaker; a refused connection opens it at once."""
_LONGEST_REST_S = 5.0
_PROBE_TIMEOUT = httpx.Timeout(120.0, connect=5.0)


class Server:
    """State of one URL. Used by the client's event loop; what it shows to other threads are plain numbers."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.facts: Facts | None = None
        self.tokens_in_flight = 0
        self.room = 1 << 62
        """Tokens that its staging folder has room for."""
        self.rate = 0.0
        """Tokens a second, smoothed."""
        self.answered = 0
        self.faults = 0
        """Faults since the start."""
        self.retractions = 0
        self.staging_used = 0
        self.reason = ""
        """Why it is not used, for people."""
        self._in_a_row = 0
        self._rest = 0.0
        self._open_until = 0.0

    @property
    def healthy(self) -> bool:
        """Whether rows may be sent to it."""
        return self.facts is not None and not self._rest

    @property
    def probe_due(self) -> bool:
        """Whether it rests and may be asked again."""
        return not self.healthy and time.monotonic() >= self._open_until

    def finish_time(self, tokens: int) -> float:
        """When it would be done with ``tokens`` more, in its own past speed."""
        return (self.tokens_in_flight + tokens) / max(self.rate, 1.0)

    def has_room(self, tokens: int) -> bool:
        """Whether ``tokens`` more fit its staging; a row longer than all of it goes alone."""
        return self.tokens_in_flight == 0 or self.tokens_in_flight + tokens <= self.room

    def succeeded(self, tokens: int, seconds: float, reply: Reply) -> None:
        """An answer of ``tokens`` came after ``seconds``."""
        # What was in flight beside it took its share of those seconds.
        speed = max(tokens, self.tokens_in_flight) / max(seconds, 1e-3)
        self.rate = speed if self.rate == 0 else 0.9 * self.rate + 0.1 * speed
        self.answered += 1
        self.staging_used = reply.staging_used
        self._in_a_row = 0

    def failed(self, reason: str, *, at_once: bool) -> None:
        """It did not answer, or not as a capture server does."""
        self.faults += 1
        self._in_a_row += 1
        if at_once or self._in_a_row >= _FAULTS:
            self.rest(reason)

    def rest(self, reason: str) -> None:
        """Open the breaker: send nothing for a while, twice as long each time."""
        if not self._rest:
            _LOG.warning("server %s is set aside: %s", self.url, reason)
        self.reason = reason
        self._rest = min(_LONGEST_REST_S, max(0.5, 2 * self._rest))
        self._open_until = time.monotonic() + self._rest

    def recovered(self, facts: Facts) -> None:
        """A probe was answered."""
        if self._rest:
            _LOG.warning("server %s is back", self.url)
        self.facts, self.reason = facts, ""
        self._in_a_row, self._rest = 0, 0.0


def generate_request(ids: list[int], rid: str, wish: Wish, *, max_new_tokens: int = 0) -> dict[str, Any]:
    """The body of a ``/generate`` request that captures."""
    return {
        "input_ids": ids,
        "rid": rid,
        # The same key in all releases: a prefix cache, if there is one, never serves two salts alike.
        "extra_key": rid,
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "custom_params": wish.to_params(),
        },
    }


def read_reply(url: str, response: httpx.Response) -> tuple[Reply, dict[str, Any]]:
    """The proof in an answer and its ``meta_info``. Raises EngineUnavailableError for a server fault, PreflightError without proof."""
    if response.status_code >= 500:
        raise EngineUnavailableError(f"{url} answered {response.status_code}: {response.text[:200]}")
    try:
        meta = response.json()["meta_info"]
        return Reply.from_meta(meta), meta
    except (ValueError, KeyError, TypeError) as exc:
        raise PreflightError(
            f"{url} answered without the capture plug-in's proof ({exc}); start it with headrace serve, "
            "in an environment with this version of Headrace"
        ) from exc


async def probe(client: httpx.AsyncClient, server: Server, owner: str, rid: str) -> Facts:
    """Ask a server for its facts. Raises EngineUnavailableError when it is down, PreflightError when it is no capture server."""
    body = generate_request([1], rid, Wish(owner=owner))
    try:
        response = await client.post(f"{server.url}/generate", json=body, timeout=_PROBE_TIMEOUT)
    except httpx.TransportError as exc:
        raise EngineUnavailableError(
            f"{server.url} cannot be reached ({type(exc).__name__}: {exc}); is the server up?"
        ) from exc
    if response.status_code == 404:
        raise PreflightError(f"{server.url} has no /generate: it is no SGLang server")
    reply, _ = read_reply(server.url, response)
    return reply.facts
