"""From a forward's packed states to one staged file a request: the heart of the plug-in, without a name of SGLang's.

The scheduler hands over each prefill forward as segments (request, first position, rows) and packed states. Rows are told
apart by those numbers, read at the moment of the forward, and by nothing else: never by order of arrival, length or file time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.sglang_plugin.coverage import Coverage
from headrace.sglang_plugin.hostring import HostRing
from headrace.sglang_plugin.protocol import Facts, Refusal, Reply, Staged, Wish, taps_to_text
from headrace.sglang_plugin.stagedfile import Layout
from headrace.sglang_plugin.staging import Staging
from headrace.sglang_plugin.writer import Piece, StagedCapture, Writers

_LOG = logging.getLogger(__name__)
_LATE_S = 120.0
"""A reply is held back at most this long for its file; the writers need milliseconds."""


@dataclass(frozen=True)
class Segment:
    """Rows of one request in a forward: ``rows`` of them, for positions from ``start`` on. Requests follow each other."""

    request: Any
    """The engine's request object; only its identity is used."""
    rid: str
    wish: Any
    """The request's ``custom_params``, unread."""
    prompt: int
    """Tokens of the request's prompt."""
    start: int
    rows: int


@dataclass(frozen=True)
class ForwardStates:
    """What one forward computed for its rows, all segments packed in order."""

    ids: torch.Tensor
    """int64 [rows]"""
    parts: Sequence[torch.Tensor]
    """One [rows, hidden] tensor a tap of the server, in the server's order; may be views of buffers the engine uses again."""


class Request:
    """A request that wants something: what it wants, what has been captured, and why not if it cannot be."""

    def __init__(self, request: Any, rid: str, prompt: int) -> None:
        self.alive: Callable[[], Any] = weakref.ref(request)
        self.rid = rid
        self.coverage = Coverage(prompt)
        self.staged: StagedCapture | None = None
        self.sources: list[int] = []
        """For each tap of the file, its number among the server's taps."""
        self.reserved = 0
        self.refusal: Refusal | None = None


@dataclass(frozen=True)
class _Fresh:
    """Rows of a forward that a request still lacked: ``row`` is where they begin in the forward."""

    request: Request
    row: int
    start: int
    stop: int


class Capturer:
    """One scheduler process's captures. All methods are called by its scheduler thread."""

    def __init__(
        self, facts: Facts, staging: Staging, *, writers: int, host_bytes: int, device: torch.device
    ) -> None:
        self.facts, self.staging = facts, staging
        self._requests: dict[str, Request] = {}
        self._writers = Writers(writers)
        self._ring = HostRing(host_bytes, pinned=device.type != "cpu")
        self._stream: Any = None

    # --- forwards ---------------------------------------------------------------------------------------------

    def forward(self, segments: Iterable[Segment], states: Callable[[int], ForwardStates]) -> None:
        """Take what requests want out of one forward. ``states`` is called with the number of rows, only when any is wanted;
        it raises ValueError when the engine computed something else than it was asked to."""
        fresh, rows = self._claim(segments)
        if not fresh:
            return
        try:
            computed = states(rows)
        except ValueError as exc:
            _LOG.error("headrace: %s", exc)
            for item in fresh:
                self._refuse(item.request, Refusal(kind="states_missing", message=str(exc), retryable=False))
            return
        blocks = self._blocks(fresh, computed)
        for item in (item for block in blocks for item in block):
            if item.request.staged is not None:
                item.request.staged.expect(item.start, item.stop)
        for item in fresh:
            if item.request.staged is not None and item.request.coverage.complete:
                item.request.staged.close()
        for block in blocks:
            self._copy(block, computed)

    def _claim(self, segments: Iterable[Segment]) -> tuple[list[_Fresh], int]:
        self._forget_dead()
        fresh: list[_Fresh] = []
        row = 0
        for segment in segments:
            request = self._request(segment)
            if request is not None and request.refusal is None and request.staged is not None:
                for start, stop in request.coverage.claim(segment.start, segment.start + segment.rows):
                    fresh.append(_Fresh(request, row + start - segment.start, start, stop))
            row += segment.rows
        return fresh, row

    def _request(self, segment: Segment) -> Request | None:
        """What is known about the segment's request; admits it when this is its first forward. None if it wants nothing."""
        known = self._requests.get(segment.rid)
        if known is not None:
            if known.alive() is segment.request:
                return known
            self._drop(known)  # the same id again: the first one was aborted
        try:
            wish = Wish.from_params(segment.wish)
        except ValueError as exc:
            request = Request(segment.request, segment.rid, segment.prompt)
            request.refusal = Refusal(kind="bad_wish", message=str(exc), retryable=False)
        else:
            if wish is None:
                return None
            request = self._admit(segment, wish)
        self._requests[segment.rid] = request
        return request

    def _admit(self, segment: Segment, wish: Wish) -> Request:
        request = Request(segment.request, segment.rid, segment.prompt)
        if not wish.taps:
            return request
        have = self.facts.taps
        if not set(wish.taps) <= set(have) or len(set(wish.taps)) != len(wish.taps):
            message = f"taps {list(wish.taps)} were asked, this server captures {list(have)}; start it with the taps wanted"
            request.refusal = Refusal(kind="bad_wish", message=message, retryable=False)
            return request
        layout = Layout(len(wish.taps), segment.prompt, self.facts.hidden_size, self.facts.dtype)
        # The segment table comes last and is small; prompts of one chunk a page are its worst case.
        size = layout.body_bytes + 8 * (2 + len(wish.taps)) * segment.prompt
        if size > self.staging.limit:
            message = f"{segment.prompt} tokens need {size} bytes of staging, there are {self.staging.limit}; raise --staging-bytes"
            request.refusal = Refusal(kind="too_large", message=message, retryable=False)
            return request
        if not self.staging.reserve(size):
            message = f"staging is full: {self.staging.reserved} of {self.staging.limit} bytes are held by captures not taken yet"
            request.refusal = Refusal(kind="staging_full", message=message)
            return request
        request.reserved = size
        request.sources = [have.index(tap) for tap in wish.taps]
        metadata = {
            "format": "headrace staged capture 1",
            "taps": taps_to_text(wish.taps),
            "rid": segment.rid,
            "run": self.facts.run,
            "rank": str(self.facts.rank),
            "engine": self.facts.engine,
            "plugin": self.facts.plugin,
        }
        request.staged = StagedCapture(self.staging.new_path(wish.owner), layout, metadata)
        return request

    def _blocks(self, fresh: list[_Fresh], computed: ForwardStates) -> list[list[_Fresh]]:
        """The rows in portions that fit the ring; nearly always one."""
        most = max(1, self._ring.capacity // 2 // self._row_bytes(computed) - 1)
        blocks: list[list[_Fresh]] = [[]]
        room = most
        for item in fresh:
            start = item.start
            while start < item.stop:
                if room == 0:
                    blocks.append([])
                    room = most
                stop = min(item.stop, start + room)
                blocks[-1].append(_Fresh(item.request, item.row + start - item.start, start, stop))
                room -= stop - start
                start = stop
        return blocks

    @staticmethod
    def _row_bytes(computed: ForwardStates) -> int:
        return 8 + sum(part.shape[1] * part.element_size() for part in computed.parts)

    # --- copies -----------------------------------------------------------------------------------------------

    def _copy(self, block: list[_Fresh], computed: ForwardStates) -> None:
        """Start the copy of a portion to the host and hand it to the writers."""
        rows = sum(item.stop - item.start for item in block)
        runs = _runs(block)
        taps, hidden, dtype = len(computed.parts), computed.parts[0].shape[1], computed.parts[0].dtype
        memory = self._ring.take(rows * self._row_bytes(computed))
        host_ids = memory.data[: 8 * rows].view(torch.int64)
        host_states = memory.data[8 * rows :].view(dtype).view(taps, rows, hidden)
        if computed.ids.device.type == "cpu":
            _gather(computed, runs, host_states, host_ids)
            kept: list[torch.Tensor] = []
            arrived: Callable[[], None] = _at_once
        else:
            kept, arrived = self._copy_from_device(computed, runs, host_states, host_ids)

        def done() -> None:
            kept.clear()  # the device memory may be used again only now
            self._ring.give_back(memory)

        pieces: list[Piece] = []
        row = 0
        for item in block:
            if item.request.staged is not None:
                pieces += [
                    Piece(item.request.staged, tap, source, row, item.start, item.stop)
                    for tap, source in enumerate(item.request.sources)
                ]
            row += item.stop - item.start
        self._writers.write(pieces, host_states, host_ids, arrived, done)

    def _copy_from_device(
        self,
        computed: ForwardStates,
        runs: list[tuple[int, int]],
        host_states: torch.Tensor,
        host_ids: torch.Tensor,
    ) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Gather on the stream of the forward, so before the engine can use its buffers again; copy on one of our own."""
        device = computed.ids.device
        module = torch.get_device_module(device)
        if self._stream is None:
            self._stream = module.Stream(device)
        gathered = torch.empty(host_states.shape, dtype=host_states.dtype, device=device)
        ids = torch.empty(host_ids.shape, dtype=torch.int64, device=device)
        _gather(computed, runs, gathered, ids)
        # Writers wait for the copy, and so for the whole forward before it: blocking, or each would spin on a core meanwhile.
        ready, copied = module.Event(), module.Event(blocking=True)
        ready.record()
        self._stream.wait_event(ready)
        with module.stream(self._stream):
            host_states.copy_(gathered, non_blocking=True)
            host_ids.copy_(ids, non_blocking=True)
            copied.record()
        return [gathered, ids], copied.synchronize

    # --- replies ----------------------------------------------------------------------------------------------

    def reply(self, rid: str, *, aborted: bool) -> Reply | None:
        """The proof for a finished request, its file in place; None for a request that wanted nothing."""
        request = self._requests.pop(rid, None)
        if request is None:
            return None
        if aborted:
            self._drop(request)
            return self._reply(refusal=Refusal(kind="aborted", message="the request was aborted"))
        if request.refusal is None and request.staged is not None and not request.coverage.complete:
            missing = request.coverage.missing()
            message = (
                f"positions {missing[0][0]} to {missing[0][1]} were not computed for this request"
                f" ({sum(b - a for a, b in missing)} in all), most likely taken from the prefix cache; "
                "send a cache_salt of its own with each request or start the server with --disable-radix-cache"
            )
            self._refuse(request, Refusal(kind="rows_missing", message=message))
        if request.refusal is not None:
            return self._reply(refusal=request.refusal)
        staged = request.staged
        if staged is None:
            return self._reply()
        if not staged.wait(_LATE_S):
            self._refuse(
                request, Refusal(kind="late", message=f"the capture was not written within {_LATE_S:.0f} s")
            )
            return self._reply(refusal=request.refusal)
        if staged.failure is not None:
            self._refuse(request, staged.failure)
            return self._reply(refusal=request.refusal)
        self.staging.release(request.reserved - staged.size)
        self.staging.finish(staged.path, staged.size)
        name = str(staged.path.relative_to(self.staging.root))
        return self._reply(
            staged=Staged(name=name, seal=staged.seal, size=staged.size, rows=staged.layout.rows)
        )

    def _reply(self, *, staged: Staged | None = None, refusal: Refusal | None = None) -> Reply:
        return Reply(facts=self.facts, staging_used=self.staging.used(), staged=staged, refusal=refusal)

    @property
    def busy(self) -> bool:
        """Whether any request in the engine wants a reply."""
        return bool(self._requests)

    # --- ends -------------------------------------------------------------------------------------------------

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        if request.refusal is None:
            request.refusal = refusal
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Give a capture up and take its bytes back; idempotent."""
        if request.staged is not None:
            request.staged.discard()
            request.staged = None
        if request.reserved:
            self.staging.release(request.reserved)
            request.reserved = 0

    def _forget_dead(self) -> None:
        """Requests that left the engine without a reply (aborted while they waited)."""
        for rid, request in list(self._requests.items()):
            if request.alive() is None:
                self._drop(self._requests.pop(rid))

    def close(self) -> None:
        """Finish the writers and delete the staging folder."""
        self._writers.close()
        self.staging.close()


def _runs(block: list[_Fresh]) -> list[tuple[int, int]]:
    """The rows of a portion as few ranges of the forward."""
    runs: list[tuple[int, int]] = []
    for item in block:
        begin, end = item.row, item.row + item.stop - item.start
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _gather(
    computed: ForwardStates, runs: list[tuple[int, int]], states: torch.Tensor, ids: torch.Tensor
) -> None:
    """Copy ``runs`` of rows into ``states`` [taps, rows, hidden] and ``ids`` [rows]."""
    at = 0
    for begin, end in runs:
        to = at + end - begin
        ids[at:to].copy_(computed.ids[begin:end])
        for tap, part in enumerate(computed.parts):
            states[tap, at:to].copy_(part[begin:end])
        at = to


def _at_once() -> None:
    """The rows are on the host already."""
