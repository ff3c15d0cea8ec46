"""Workers as processes of this host: what one Python process can check, compress and write is limited, several do it side by side.

Each is a fresh interpreter that serves one pipe (:mod:`headrace.extract.process_worker`). None outlives the driver: the
pipe ends with it, however it ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from typing import Any

from headrace.child import Child
from headrace.cores import available_cores
from headrace.engines.base import engine_class
from headrace.errors import ConfigError
from headrace.extract.config import ExtractConfig
from headrace.extract.crew import Handle, LostError, options_of
from headrace.extract.process_worker import Answer
from headrace.extract.remote_worker import Order, RemoteWorker

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


class ProcessHandle:
    """One worker process. See :class:`headrace.extract.crew.Handle`."""

    def __init__(self, worker: type[RemoteWorker], setup: Any, environment: dict[str, str]) -> None:
        self.child = Child("headrace.extract.process_worker:main", environment=environment)
        self.connection, self.process = self.child.connection, self.child.process
        self._send((worker, setup))

    def open(self) -> None:
        """See :class:`headrace.extract.crew.Handle`."""
        self._send(("open", ()))

    def exchange(self, order: Order) -> None:
        """See :class:`headrace.extract.crew.Handle`."""
        self._send(("exchange", (order,)))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, and its result says so
            self.connection.send(message)

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        return self.child.dead

    def result(self) -> Any:
        """See :class:`headrace.extract.crew.Handle`."""
        try:
            if not self.connection.poll():
                raise EOFError
            answer: Answer = self.connection.recv()
        except (EOFError, OSError):
            raise LostError(f"worker process {self.process.pid} {self.child.end()}") from None
        returned, value = answer
        if returned:
            return value
        raise value

    def kill(self) -> None:
        """See :class:`headrace.extract.crew.Handle`. A server that it started ends with it (:mod:`headrace.extract.own_server`)."""
        self.child.kill()


class ProcessCluster:
    """This host. See :class:`headrace.extract.crew.Cluster`. Raises ConfigError when it has too few GPUs."""

    hint = "look at what the engine says, or wait longer (--engine-wait-minutes)"

    def __init__(
        self,
        config: ExtractConfig,
        setup: Callable[[dict[str, Any]], Any],
        options: dict[str, Any],
        worker: type[RemoteWorker] = RemoteWorker,
    ) -> None:
        """See :class:`headrace.extract.ray_cluster.RayCluster`."""
        self.config = config
        self._setup, self._options, self._worker = setup, options, worker
        self._workers = max(1, config.workers)
        self._gpus = share_gpus(config, options, self._workers)
        self._handles: list[ProcessHandle] = []

    def wanted(self) -> int:
        """See :class:`headrace.extract.crew.Cluster`."""
        return self._workers

    def start(self, place: int) -> Handle:
        """See :class:`headrace.extract.crew.Cluster`."""
        options = options_of(self._options, self.config.url, self._workers, place)
        handle = ProcessHandle(self._worker, self._setup(options), self._environment(place))
        self._handles = [other for other in self._handles if not other.dead] + [handle]
        return handle

    def _environment(self, place: int) -> dict[str, str]:
        """Its GPUs and its share of the cores: torch takes all of them in each process else."""
        own = {} if self._gpus is None else {VISIBLE: self._gpus[place]}
        if THREADS not in os.environ:
            own[THREADS] = str(max(1, available_cores() // self._workers))
        return own

    def wait(self, handles: Collection[Handle], seconds: float) -> list[Handle]:
        """See :class:`headrace.extract.crew.Cluster`."""
        mine = [handle for handle in handles if isinstance(handle, ProcessHandle)]
        pipes: list[Connection] = [handle.connection for handle in mine]
        ready = set(wait(pipes, seconds))
        return [handle for handle in mine if handle.connection in ready or handle.dead]

    def close(self) -> None:
        """See :class:`headrace.extract.crew.Cluster`."""
        for handle in self._handles:
            handle.kill()
        self._handles = []


def share_gpus(config: ExtractConfig, options: dict[str, Any], workers: int) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each worker; None to leave it as it is: for servers, on a CPU, without a GPU.

    Raises ConfigError when there are fewer GPUs than an engine that runs on them needs.
    """
    device = str(options.get("device", ""))
    if options.get("url") or device == "cpu":
        return None
    if ":" in device:
        raise ConfigError(
            f"--device {device}: each of the workers has GPUs of its own; leave it out, and choose the host's GPUs by {VISIBLE}"
        )
    gpus, each = visible_gpus(), max(1, config.ray_gpus)
    if len(gpus) < workers * each:
        # One that has neither option has no use for a GPU that we know of.
        must = config.ray_gpus or (
            gpus and {"device", "url"} & engine_class(config.engine).Options.model_fields.keys()
        )
        if not must:
            return None
        raise ConfigError(
            f"--workers {workers} with {each} GPU{'s' * (each > 1)} each need {workers * each} GPUs, and this host shows {len(gpus)}; "
            "give fewer workers, or --device cpu where the engine has it"
        )
    return [",".join(gpus[place * each : (place + 1) * each]) for place in range(workers)]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. CUDA is not started here."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get(VISIBLE)
    return (
        list(map(str, range(count))) if named is None else [name.strip() for name in named.split(",")][:count]
    )
