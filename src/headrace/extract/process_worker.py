"""The inside of a worker process: takes calls out of the pipe to its driver, and ends when that pipe does.

It is imported before torch is, so that signals find it ready from its first moment on.
"""

from __future__ import annotations

import os
import queue
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.extract.worker import Worker

if TYPE_CHECKING:
    from headrace.extract.remote_worker import RemoteWorker

Call = tuple[str, tuple[Any, ...]]
"""Method of the worker, arguments."""
Answer = tuple[bool, Any]
"""Whether it returned, and what; else what it raised."""


def main(fd: int) -> None:
    """Serve the driver at the other end of ``fd``; never returns."""
    caught = Caught()
    with caught:
        _serve(Connection(fd))
    if not isinstance(caught.error, EOFError):  # which is a driver that was gone before it said anything
        sys.stderr.write("".join(traceback.format_exception(caught.error)))
    os._exit(1)  # without waiting for threads of an engine


def _serve(connection: Connection) -> None:
    kind, setup = connection.recv()  # imports torch
    worker: RemoteWorker = kind(setup)
    calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
    listener = Worker("calls", lambda: _listen(connection, calls, worker))
    listener.start()
    while True:
        name, args = calls.get()
        # In this thread: a server that is started here dies with the thread that started it.
        answer = _answer(worker, name, args)
        try:
            connection.send(answer)
        except OSError:
            listener.join()  # the driver is gone, and the listener ends this process


def _listen(connection: Connection, calls: queue.SimpleQueue[Call], worker: RemoteWorker) -> None:
    """Pass calls on until the driver is gone, however it went, then end the process whatever it does at the moment."""
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, OSError):
        worker.abandon()
    finally:
        os._exit(1)


def _answer(worker: RemoteWorker, name: str, args: tuple[Any, ...]) -> Answer:
    from headrace.errors import HeadraceError
    from headrace.extract.remote_worker import as_ours

    caught = Caught()
    with caught:
        return True, getattr(worker, name)(*args)
    error = as_ours(caught.error)
    assert error is not None
    travels = Caught()
    with travels:
        if isinstance(ForkingPickler.loads(ForkingPickler.dumps(error)), HeadraceError):
            return False, error
    # One of another package, made from more than its message.
    return False, as_ours(RuntimeError(f"{type(error).__name__}: {error}"))


class Caught:
    """Keeps whatever ends its block, for whoever must be told of it."""

    error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True
