"""One ``capture`` call: an event loop in a thread of its own that keeps many rows in flight at several servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import stamina

from headrace.engines.feed import RowFeed
from headrace.engines.sglang.options import SglangOptions
from headrace.engines.sglang.server import Server, generate_request, probe, read_reply
from headrace.engines.sglang.staged import Rejected, StagingView
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.sglang_plugin.protocol import Facts, Reply, Wish
from headrace.types import Capture, CaptureSpec, Failure, Row

_LOG = logging.getLogger(__name__)
_READERS = 4
"""Threads that read and verify staged files."""
_POISON = 5
"""A row that this many servers in a row did not survive is given up: it may be what kills them."""
_STAGING_PAUSE_S = 0.25
_ABORT_TIMEOUT_S = 5.0

Result = Capture | Failure


@dataclass(frozen=True)
class Link:
    """What a session shares with its engine."""

    spec: CaptureSpec
    options: SglangOptions
    servers: list[Server]
    staging: StagingView
    budget: int

    def acceptable(self, facts: Facts) -> str:
        """Why a server must not be used for this spec; empty when it may."""
        spec = self.spec
        if (facts.num_layers, facts.hidden_size) != (spec.num_layers, spec.hidden_size):
            return (
                f"its model has {facts.num_layers} layers of {facts.hidden_size}, the target {spec.num_layers} of "
                f"{spec.hidden_size}; start it with the target"
            )
        if facts.dtype != spec.dtype:
            return f"it computes in {facts.dtype}, the spec says {spec.dtype}; start it with --dtype {spec.dtype} or extract with --dtype {facts.dtype}"
        if not set(spec.taps) <= set(facts.taps):
            return f"it captures {list(facts.taps)}, asked are {list(spec.taps)}; start it with --taps {','.join(map(str, spec.taps))}"
        return ""


class _ServerFault(Exception):
    """The server, not the row, is to blame."""


class _Again(Exception):
    """The row's answer was wrong in a way that trying again may mend."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


class Session:
    """Runs one stream of rows. Made and used by one thread; its loop has another, its row feed a third."""

    def __init__(self, link: Link, rows: Iterable[Row]) -> None:
        self._link = link
        self._results: queue.SimpleQueue[tuple[Result, int] | BaseException | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._rows: asyncio.Queue[Row | None] = asyncio.Queue()
        self._free = asyncio.Condition()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="headrace-reader")
        self._main: asyncio.Task[None] | None = None
        self._client: httpx.AsyncClient
        self._thread = threading.Thread(target=self._run, name="headrace-sglang", daemon=True)
        self._thread.start()
        self._feed = RowFeed(rows, link.budget, self._pulled, self._ended)

    # --- the caller's side ------------------------------------------------------------------------------------

    def results(self) -> Iterator[Result]:
        """Results in the order they come. Raises what ended the session early."""
        while True:
            item = self._results.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            result, tokens = item
            self._feed.release(tokens)
            yield result

    def close(self) -> None:
        """Cancel what is in flight, here and at the servers; idempotent."""
        self._feed.close()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join()
        self._readers.shutdown()

    # --- the feed's thread ------------------------------------------------------------------------------------

    def _pulled(self, row: Row) -> None:
        self._tell(row)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            self._results.put(error)
        self._tell(None)

    def _tell(self, row: Row | None) -> None:
        with contextlib.suppress(RuntimeError):  # the session is over
            self._loop.call_soon_threadsafe(self._rows.put_nowait, row)

    # --- the loop's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._main = self._loop.create_task(self._serve())
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        except BaseExceptionGroup as group:
            self._results.put(group.exceptions[0])
        except BaseException as exc:  # noqa: BLE001 - raised again in the caller's thread
            self._results.put(exc)
        else:
            self._results.put(None)
        finally:
            self._loop.close()

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()

    async def _serve(self) -> None:
        # The servers close connections that were idle for five seconds: never be the one who finds out.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)
        timeout = httpx.Timeout(self._link.options.timeout_s, connect=10.0)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
            self._client = client
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                pending: set[asyncio.Task[None]] = set()
                while (row := await self._rows.get()) is not None:
                    task = group.create_task(self._answer(row))
                    pending.add(task)
                    task.add_done_callback(pending.discard)
                while pending:
                    await asyncio.wait(pending)
                watch.cancel()

    async def _watch(self) -> None:
        """Ask servers that rest whether they are back; give up when all have been gone for long."""
        since = time.monotonic()
        while True:
            late = time.monotonic() - since > self._link.options.patience_s
            due = [
                server for server in self._link.servers if server.probe_due or (late and not server.healthy)
            ]
            await asyncio.gather(*(self._probe(server) for server in due))
            if any(server.healthy for server in self._link.servers):
                since = time.monotonic()
            elif late:
                reasons = "; ".join(f"{s.url}: {s.reason}" for s in self._link.servers)
                raise EngineUnavailableError(
                    f"no server has answered for {self._link.options.patience_s:.0f} s ({reasons}); start them and run again, it resumes"
                )
            await asyncio.sleep(0.2)

    async def _probe(self, server: Server) -> None:
        try:
            facts = await probe(self._client, server, self._link.staging.owner, uuid.uuid4().hex)
            problem = self._link.acceptable(facts)
            if problem:
                server.rest(problem)
                return
            self._link.staging.join(facts)
            server.recovered(facts)
        except (EngineUnavailableError, PreflightError) as exc:
            server.rest(str(exc))
        await self._wake()

    async def _wake(self) -> None:
        async with self._free:
            self._free.notify_all()

    async def _answer(self, row: Row) -> None:
        result: Result
        try:
            result = await self._with_retries(row)
        except _Again as exc:
            bad = exc.rejected
            result = Failure(row.key, bad.kind, f"row {row.key}: {bad.message}", bad.retryable)
        except Rejected as bad:
            result = Failure(row.key, bad.kind, f"row {row.key}: {bad.message}", bad.retryable)
        self._results.put((result, len(row)))

    async def _with_retries(self, row: Row) -> Capture:
        """Raises _Again when the last try failed too, Rejected when no other try can help."""
        tries = stamina.retry_context(
            on=_Again, attempts=self._link.options.attempts, timeout=None, wait_max=2.0
        )
        async for attempt in tries:
            with attempt:
                if attempt.num > 1:
                    _LOG.info("row %s: try %d", row.key, attempt.num)
                return await self._once(row)
        raise AssertionError("stamina re-raises the last error")

    async def _once(self, row: Row) -> Capture:
        """One answer, from whichever server lives; what befalls servers is not held against the row, within reason."""
        failed: set[Server] = set()
        for _ in range(_POISON):
            server = await self._choose(len(row), failed)
            try:
                return await self._ask(server, row)
            except _ServerFault:
                failed.add(server)
            finally:
                server.tokens_in_flight -= len(row)
                await self._wake()
        raise Rejected("server_fault", f"{_POISON} servers in a row failed while they had it")

    async def _choose(self, tokens: int, failed: set[Server]) -> Server:
        """The healthy server that would be done first; waits for one. Its tokens in flight are counted up.

        One that has ``failed`` this row comes last: failing at once it always seems to be the first to be done, and may fail
        one row again and again before its breaker opens, which answers to other rows keep shut.
        """
        async with self._free:
            while True:
                fit = [s for s in self._link.servers if s.healthy and s.has_room(tokens)]
                if fit:
                    server = min(fit, key=lambda s: (s in failed, s.finish_time(tokens)))
                    server.tokens_in_flight += tokens
                    return server
                await self._free.wait()

    async def _ask(self, server: Server, row: Row) -> Capture:
        """Raises _ServerFault, _Again, or Rejected for what no other try can mend."""
        deadline = time.monotonic() + self._link.options.timeout_s
        while True:
            reply = await self._post(server, row)
            if reply.staged is not None:
                return await self._take(reply, row)
            refusal = reply.refusal
            if refusal is None:
                raise _Again(
                    Rejected("no_capture", "the server answered without a capture and without a reason")
                )
            if refusal.kind == "staging_full" and time.monotonic() < deadline:
                await asyncio.sleep(_STAGING_PAUSE_S)
                continue
            rejected = Rejected(refusal.kind, refusal.message, refusal.retryable)
            raise _Again(rejected) if refusal.retryable else rejected

    async def _take(self, reply: Reply, row: Row) -> Capture:
        assert reply.staged is not None
        link = self._link
        try:
            return await self._loop.run_in_executor(
                self._readers, link.staging.take, reply.facts, reply.staged, row, link.spec
            )
        except Rejected as bad:
            raise (_Again(bad) if bad.retryable else bad) from bad

    async def _post(self, server: Server, row: Row) -> Reply:
        rid = uuid.uuid4().hex
        wish = Wish(owner=self._link.staging.owner, taps=self._link.spec.taps)
        started = time.monotonic()
        try:
            response = await self._client.post(
                f"{server.url}/generate", json=generate_request(row.ids.tolist(), rid, wish)
            )
        except httpx.TransportError as exc:
            server.failed(f"{type(exc).__name__}: {exc}", at_once=isinstance(exc, httpx.ConnectError))
            raise _ServerFault from exc
        except asyncio.CancelledError:
            await self._abort(server, rid)
            raise
        if 400 <= response.status_code < 500:
            raise Rejected("refused", f"the server refused it: {response.text[:300]}", retryable=False)
        try:
            reply, meta = read_reply(server.url, response)
        except EngineUnavailableError as exc:
            server.failed(str(exc), at_once=False)
            raise _ServerFault from exc
        except PreflightError as exc:
            server.rest(str(exc))  # it was restarted without the plug-in: never go on without the proof
            raise _ServerFault from exc
        if server.facts is None or reply.facts.run != server.facts.run:
            self._meet_again(server, reply.facts)
        server.succeeded(len(row), time.monotonic() - started, reply)
        server.retractions += int(meta.get("num_retractions") or 0)
        return reply

    def _meet_again(self, server: Server, facts: Facts) -> None:
        """It was restarted between two answers: it must be as good as before. Raises _ServerFault when it is not."""
        problem = self._link.acceptable(facts)
        if problem:
            server.rest(problem)
            raise _ServerFault
        server.facts = facts

    async def _abort(self, server: Server, rid: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await self._client.post(
                f"{server.url}/abort_request", json={"rid": rid}, timeout=_ABORT_TIMEOUT_S
            )
