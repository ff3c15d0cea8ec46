"""A cluster whose workers are threads of this process: everything of a distributed extraction but Ray, quick and easy to disturb."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from headrace.engines.base import Engine
from headrace.errors import StoreError
from headrace.extract.config import ExtractConfig
from headrace.extract.crew import Handle, LostError
from headrace.extract.remote_worker import Order, RemoteWorker
from headrace.types import CaptureSpec

MakeEngine = Callable[[CaptureSpec, int], Engine]
"""Spec and the worker's number, from 0 → its engine."""


class ThreadHandle:
    """See :class:`headrace.extract.crew.Handle`."""

    def __init__(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.dead = ""
        self.host = False
        self._pool = ThreadPoolExecutor(1, "remote")
        self.call: Future[Any] = Future()

    def open(self) -> None:
        self.call = self._pool.submit(self.worker.open)

    def exchange(self, order: Order) -> None:
        self.call = self._pool.submit(self.worker.exchange, order)

    def result(self) -> Any:
        if self.dead:
            raise LostError(self.dead, self.host)
        return self.call.result()

    def crash(self, why: str, host: bool = False) -> None:
        """Die at once: nothing more is heard, and what is not sealed never is."""
        self.dead, self.host = why, host
        self.kill()

    def kill(self) -> None:
        worker = self.worker
        if worker._thread is not None and not worker._thread.ended:
            if hasattr(worker, "_writer"):
                worker._writer._failed = StoreError("killed")
            worker.pipeline.aborted = True
            worker.pipeline.limits = replace(
                worker.pipeline.limits, stall_seconds=0.0
            )  # a hung engine is not waited for
            worker.pipeline.stopping = "killed"
            worker._portions.close()
        self._pool.shutdown(wait=False)


class ThreadCluster:
    """See :class:`headrace.extract.crew.Cluster`. ``size`` may change at any time, as a cluster does."""

    hint = "look at the test"

    def __init__(self, make: MakeEngine, size: int) -> None:
        self.make, self.size = make, size
        self.handles: list[ThreadHandle] = []
        self.on_wait: Callable[[ThreadCluster], None] = lambda cluster: None
        """Called at every wait, by the driver: where a test kills."""

    def bind(
        self,
        config: ExtractConfig,
        setup: Callable[[dict[str, Any]], Any],
        options: dict[str, Any],
        worker: type[RemoteWorker] = RemoteWorker,
    ) -> Any:
        """Stands where the Ray cluster is made."""
        self.setup, self.options, self.worker = setup, options, worker
        return self

    def wanted(self) -> int:
        return self.size

    def start(self, place: int) -> Handle:
        worker, number = self.worker(self.setup(self.options)), len(self.handles)
        worker._open_engine = lambda target: self.make(worker.spec, number)  # type: ignore[method-assign]
        handle = ThreadHandle(worker)
        self.handles.append(handle)
        return handle

    def wait(self, handles: Collection[Handle], seconds: float) -> list[Handle]:
        self.on_wait(self)
        mine = [handle for handle in handles if isinstance(handle, ThreadHandle)]
        wait([handle.call for handle in mine], timeout=seconds, return_when="FIRST_COMPLETED")
        done = [handle for handle in mine if handle.call.done() or handle.dead]
        if done:
            time.sleep(0.001)
        return list(done)

    @property
    def alive(self) -> list[ThreadHandle]:
        """Handles of workers that have begun and are not dead."""
        return [
            h
            for h in self.handles
            if not h.dead and h.worker._thread is not None and not h.worker._thread.ended
        ]

    def close(self) -> None:
        for handle in self.handles:
            handle.kill()
