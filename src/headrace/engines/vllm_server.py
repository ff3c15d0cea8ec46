"""The ``vllm`` engine as a client: one HTTP request a row to an OpenAI-compatible server, its states through a staging folder."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from headrace.engines.vllm import Answer, Deliver, VllmOptions, request_parameters
from headrace.engines.vllm_reply import Facts, Pending, reply_path
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.target import Target
from headrace.types import CaptureSpec, Failure, Row

_POLL = 0.002
_ABORT_SECONDS = 0.3  # in which a server notices that a connection is gone
_ABANDONED_SECONDS = 60.0  # after which a cancelled row is not going to be written any more
MEET_SECONDS = 30.0
"""Longest wait for the states of the first token."""


class _Server:
    """One server and what is in flight with it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self.tokens = 0
        self.staging: Path | None = None
        """Where its states appear, as seen from here."""


class ServerBackend:
    """Sends rows to the least busy of its servers from one event loop in a thread of its own."""

    def __init__(self, target: Target, spec: CaptureSpec, options: VllmOptions) -> None:
        self._target, self._spec, self._options = target, spec, options
        self._servers = [_Server(url) for url in options.url]
        self._tasks: set[Future[None]] = set()
        self._abandoned: list[tuple[_Server, str, float]] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-vllm", daemon=True)
        self._thread.start()
        self._client = self._call(self._make_client())
        try:
            self.facts = self._agree([self._call(self._meet(server)) for server in self._servers])
        except BaseException:
            self.close()
            raise

    # --- meeting the servers ----------------------------------------------------------------------------------

    async def _make_client(self) -> httpx.AsyncClient:
        timeout = httpx.Timeout(self._options.timeout_seconds, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx.AsyncClient(timeout=timeout, limits=limits)

    async def _meet(self, server: _Server) -> Facts:
        """Learn the served model's name, then capture one token to learn the facts. Raises PreflightError without capture."""
        reply = await self._get(server, "/v1/models")
        server.model = str(reply["data"][0]["id"])
        row = Row.make(np.array([1]), np.array([True]))
        posted = await self._post(server, row, *request_parameters(row))
        path = reply_path(row, posted.get("kv_transfer_params"), self._options.staging)
        if isinstance(path, Failure):
            raise PreflightError(f"{server.url}: {path.message}")
        server.staging = path.parent.parent
        pending = Pending(row, path, MEET_SECONDS)
        await self._wait(pending)
        facts = await asyncio.to_thread(pending.facts)
        if isinstance(facts, Failure):
            raise PreflightError(
                f"{server.url} staged its states in {path.parent}, which cannot be read here ({facts.message}); "
                "give the option staging: the same folder as seen from this machine"
            )
        return facts

    def _agree(self, facts: list[Facts]) -> Facts:
        """All servers must be alike: states of one store come from one setting."""
        for server, other in zip(self._servers, facts, strict=True):
            names = [k for k, v in facts[0].settings.items() if other.settings.get(k) != v]
            if names:
                raise PreflightError(
                    f"{server.url} differs from {self._servers[0].url} in {', '.join(names)}; start both alike"
                )
        return facts[0]

    async def _get(self, server: _Server, path: str) -> Any:
        try:
            reply = await self._client.get(server.url + path)
            reply.raise_for_status()
            return reply.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise EngineUnavailableError(
                f"the vLLM server at {server.url} does not answer ({_said(exc)}); is it running?"
            ) from exc

    # --- rows -------------------------------------------------------------------------------------------------

    def submit(self, row: Row, deliver: Deliver) -> None:
        """Send one row; called from the feed's thread."""
        with self._lock:
            server = min(self._servers, key=lambda s: s.tokens)
            server.tokens += len(row)
            task = asyncio.run_coroutine_threadsafe(self._one(server, row, deliver), self._loop)
            self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: Future[None]) -> None:
        with self._lock:
            self._tasks.discard(task)

    async def _one(self, server: _Server, row: Row, deliver: Deliver) -> None:
        name, parameters = request_parameters(row)
        try:
            answer = await self._answer(server, row, name, parameters)
        except asyncio.CancelledError:
            self._abandoned.append((server, name, time.monotonic()))
            raise
        finally:
            with self._lock:
                server.tokens -= len(row)
        deliver(row, answer)

    def _sweep(self) -> None:
        """Delete what cancelled rows left: their states may be written after the connection is gone."""
        waiting, self._abandoned = self._abandoned, []
        for server, name, since in waiting:
            files = list(server.staging.glob(f"*/{name}.*")) if server.staging else []
            for file in files:
                file.unlink(missing_ok=True)
            if not files and time.monotonic() - since < _ABANDONED_SECONDS:
                self._abandoned.append((server, name, since))

    async def _answer(self, server: _Server, row: Row, name: str, parameters: dict[str, Any]) -> Answer:
        try:
            reply = await self._post(server, row, name, parameters)
        except httpx.TimeoutException:
            return Failure(
                row.key,
                "timeout",
                f"{server.url} gave no answer to row {row.key} in {self._options.timeout_seconds:g} s",
            )
        except httpx.HTTPStatusError as exc:
            status = exc.response.status_code
            message = f"{server.url} answered {status} to row {row.key}: {exc.response.text[:300]}"
            return Failure(row.key, "engine_error", message, retryable=status >= 500 or status == 429)
        except (httpx.TransportError, ValueError) as exc:
            return EngineUnavailableError(
                f"lost the vLLM server at {server.url} ({_said(exc)}); start it again and run the command again"
            )
        path = reply_path(row, reply.get("kv_transfer_params"), self._options.staging)
        if isinstance(path, Failure):
            return path
        pending = Pending(row, path, self._options.timeout_seconds)
        await self._wait(pending)
        return await asyncio.to_thread(pending.read, self._target, self._spec)

    async def _post(self, server: _Server, row: Row, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """One request for one row: its ids, no text anywhere, one token (which is not stored) because vLLM wants one."""
        body = {
            "model": server.model,
            "prompt": row.ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            "request_id": name,
            "kv_transfer_params": parameters,
        }
        reply = await self._client.post(f"{server.url}/v1/completions", json=body)
        reply.raise_for_status()
        value: dict[str, Any] = reply.json()
        return value

    async def _wait(self, pending: Pending) -> None:
        pause = _POLL
        while not pending.ready():
            await asyncio.sleep(pause)
            pause = min(0.1, 1.5 * pause)

    # --- ending -----------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Drop the connections of what is in flight, at which the server aborts it."""
        self._sweep()
        with self._lock:
            tasks = list(self._tasks)
        for task in tasks:
            task.cancel()

    def close(self) -> None:
        """Idempotent."""
        if self._loop.is_closed():
            return
        self.cancel()
        self._call(self._client.aclose())
        if self._abandoned:
            time.sleep(_ABORT_SECONDS)
            self._sweep()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _said(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
