"""Chunks converted by several processes, results in the order of the chunks.

Workers are spawned, never forked: a fork taken while tokenizer threads hold a lock hangs for good. Threads inside the
tokenizer are off in them, the processes are the parallelism. A worker that makes no progress, or dies, ends the run with
the record it was at.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from headrace.data.convert import Converted, Converter, ConvertOptions
from headrace.data.readers import Chunk
from headrace.errors import HeadraceError

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs to build its converter."""

    model: str
    revision: str
    date: str
    template_args: tuple[tuple[str, Any], ...]
    stop_ids: tuple[int, ...]
    options: ConvertOptions
    build: Callable[[WorkerSetup, Any], Converter] | None = None
    """How a worker builds its converter when not from ``model``; a function that can be imported there."""


class Pool:
    """Spawned workers; use as a context manager. Raises HeadraceError for a worker that died or stalls."""

    def __init__(self, workers: int, setup: WorkerSetup, stall_seconds: float) -> None:
        self._setup, self._stall = setup, stall_seconds
        self._context = multiprocessing.get_context("spawn")
        self._workers = [_Worker(self._context, setup) for _ in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.stop()

    def convert(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Converted]]:
        """Each chunk with its result, in order. At most three chunks a worker are held at a time."""
        waiting: dict[int, tuple[Chunk, Converted | None]] = {}
        sent = given = 0
        more = True
        while more or given < sent:
            for worker in self._workers:
                if worker.chunk_number is None and more and sent - given < 3 * len(self._workers):
                    chunk = next(chunks, None)
                    if chunk is None:
                        more = False
                        break
                    waiting[sent] = (chunk, None)
                    worker.send(sent, chunk)
                    sent += 1
            for worker in self._ready():
                number = worker.chunk_number
                assert number is not None  # only workers at work are waited for
                waiting[number] = (waiting[number][0], worker.receive(self._setup.options.names))
            while given < sent and waiting[given][1] is not None:
                chunk, result = waiting.pop(given)
                given += 1
                if result is not None:
                    yield chunk, result

    def _ready(self) -> list[_Worker]:
        """Workers whose result is there; waits for one."""
        busy = {w.connection: w for w in self._workers if w.chunk_number is not None}
        ready: list[_Worker] = []
        while busy and not ready:
            ready = [busy[c] for c in multiprocessing.connection.wait(list(busy), _POLL_SECONDS)]
            for worker in busy.values():
                if worker not in ready:
                    worker.check(self._stall, self._setup.options.names)
        return ready


class _Worker:
    """One process, what it is at, and since when."""

    def __init__(self, context: Any, setup: WorkerSetup) -> None:
        self.chunk_number: int | None = None
        self._at = context.RawArray("q", 2)  # source index and line
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(setup, theirs, self._at), daemon=True)
        self._process.start()
        theirs.close()
        self._seen: tuple[int, int] = (-1, -1)
        self._since = time.monotonic()

    def send(self, number: int, chunk: Chunk) -> None:
        self.chunk_number = number
        self._since = time.monotonic()
        with contextlib.suppress(OSError):  # it died; check() says where
            self.connection.send(chunk)

    def receive(self, names: tuple[str, ...]) -> Converted:
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise HeadraceError(self._died(names)) from None
        self.chunk_number = None
        if isinstance(result, HeadraceError):
            raise result
        assert isinstance(result, Converted)
        return result

    def check(self, stall_seconds: float, names: tuple[str, ...]) -> None:
        """Raise HeadraceError when the process is dead or has been at one record for too long."""
        if not self._process.is_alive() and not self.connection.poll():
            raise HeadraceError(self._died(names))
        at = (int(self._at[0]), int(self._at[1]))
        if at != self._seen:
            self._seen, self._since = at, time.monotonic()
        elif time.monotonic() - self._since > stall_seconds:
            raise HeadraceError(
                f"a worker makes no progress since {stall_seconds:g} s at {self._where(names)}; look at that record, "
                "or give it longer with --stall-seconds"
            )

    def _died(self, names: tuple[str, ...]) -> str:
        self._process.join(5)
        code = self._process.exitcode
        cause = "it ran out of memory, or was killed" if code == -9 else f"exit code {code}"
        return f"a worker died at {self._where(names)} ({cause}); run the command again, it goes on, with fewer --workers"

    def _where(self, names: tuple[str, ...]) -> str:
        source, line = int(self._at[0]), int(self._at[1])
        return f"{names[source]} line {line}" if line and source < len(names) else "its start"

    def stop(self) -> None:
        """End the process: closing its pipe asks it to, a signal tells it, and one that is stopped is killed."""
        self.connection.close()
        self._process.join(0.2 if self.chunk_number is None else 0)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(2.0)


def _serve(setup: WorkerSetup, connection: Any, at: Any) -> None:
    """A worker's life: build the converter, convert what comes, end when the other side closes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        converter = (setup.build or build_converter)(setup, at)
        while True:
            connection.send(converter(connection.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        return
    except HeadraceError as exc:
        connection.send(exc)


def build_converter(setup: WorkerSetup, at: Any = None) -> Converter:
    """The converter of a setup; ``at`` is told the source and line of each record."""
    from headrace.data.template import ChatTemplate
    from headrace.target import Target

    tokenizer = Target.open(setup.model, setup.revision).tokenizer
    template = ChatTemplate(tokenizer, setup.date, dict(setup.template_args), setup.stop_ids)
    return Converter(template, setup.options, None if at is None else teller(at))


def teller(at: Any) -> Callable[[int, int], None]:
    """What writes the source and line of the record begun into shared memory."""

    def tell(source: int, line: int) -> None:
        at[0], at[1] = source, line

    return tell
