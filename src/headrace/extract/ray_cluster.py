"""Workers as Ray actors: the only file that knows Ray. It is imported when a run asks for Ray, and imports it then."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import EngineError, EngineUnavailableError, HeadraceError, PreflightError
from headrace.extract.config import ExtractConfig
from headrace.extract.crew import Handle, LostError, options_of
from headrace.extract.remote_worker import Order, RemoteWorker

LOOPBACK = ("localhost", "127.0.0.1", "::1")
REACH_SECONDS = 10.0


def import_ray() -> Any:
    """The ``ray`` package. Raises PreflightError when it is not installed."""
    # Ray reports its use to its makers unless told not to; that is for the user to switch on.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise PreflightError("--ray needs Ray; run: pip install 'headrace[ray]'") from None


class RayHandle:
    """One actor. See :class:`headrace.extract.crew.Handle`."""

    def __init__(self, ray: Any, actor: Any, group: Any) -> None:
        self._ray, self._actor, self._group = ray, actor, group
        self._node = ""
        self.call: Any = None

    def open(self) -> None:
        """See :class:`headrace.extract.crew.Handle`."""
        self.call = self._actor.open.remote()

    def exchange(self, order: Order) -> None:
        """See :class:`headrace.extract.crew.Handle`."""
        self.call = self._actor.exchange.remote(order)

    def result(self) -> Any:
        """See :class:`headrace.extract.crew.Handle`."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(self.call)
        except errors.RayTaskError as exc:
            if isinstance(exc.cause, HeadraceError):
                raise exc.cause from None
            raise EngineError(f"a worker failed:\n{exc}") from exc
        except errors.RayError as exc:
            raise LostError(_reason(exc), host="its node has died" in str(exc)) from None

    def kill(self) -> None:
        """See :class:`headrace.extract.crew.Handle`."""
        self._ray.kill(self._actor, no_restart=True)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None


class RayCluster:
    """A Ray cluster that was joined, or started here. See :class:`headrace.extract.crew.Cluster`.

    Raises PreflightError when Ray is not installed or no host could ever hold a worker, EngineUnavailableError when
    the cluster cannot be reached.
    """

    hint = "look at the cluster (ray status)"

    def __init__(
        self,
        config: ExtractConfig,
        setup: Callable[[dict[str, Any]], Any],
        options: dict[str, Any],
        worker: type[RemoteWorker] = RemoteWorker,
    ) -> None:
        """``setup`` makes what a ``worker`` is made from out of its engine options; ``options`` are those of all together."""
        self.config = config
        self._setup, self._options = setup, options
        self.ray = import_ray()
        self._started = not self.ray.is_initialized()
        if self._started:
            self._connect(config.ray)
        self._here = self.ray.get_runtime_context().get_node_id()
        self._actor = self.ray.remote(worker)
        try:
            self._require_room()
        except PreflightError:
            self.close()
            raise

    def _connect(self, address: str) -> None:
        try:
            _reach(address)
            self.ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False if address == "local" else None,
                configure_logging=False,
            )
        except (OSError, RuntimeError, ValueError) as exc:
            raise EngineUnavailableError(
                f"no Ray cluster at {address}: {_first_line(exc)}. Start one (ray start --head), or give --ray local"
            ) from exc

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _fits(self, node: dict[str, Any]) -> int:
        """Workers for which a host has room when it does nothing else."""
        has, config = node["Resources"], self.config
        counts = [has.get("GPU", 0) // config.ray_gpus] if config.ray_gpus else []
        counts += [has.get("CPU", 0) // config.ray_cpus] if config.ray_cpus else []
        return int(min(counts)) if counts else 1

    def _require_room(self) -> None:
        nodes = self._nodes()
        if not any(self._fits(node) for node in nodes):
            most = max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
            raise PreflightError(
                f"no host of the Ray cluster can hold a worker of {self.config.ray_gpus} GPUs and {self.config.ray_cpus:g} cores (its "
                f"{len(nodes)} hosts have up to {most} GPUs); lower --ray-gpus, or start an engine that spans hosts yourself and give its --url"
            )

    # --- see Cluster --------------------------------------------------------------------------------------------------------

    def wanted(self) -> int:
        """See :class:`headrace.extract.crew.Cluster`."""
        if self.config.ray_workers:
            return self.config.ray_workers
        if self.config.url:
            return len(self.config.url)
        fitting = [self._fits(node) for node in self._nodes()]
        # Without GPUs an engine uses all the cores it finds: one a host.
        return sum(fitting) if self.config.ray_gpus else sum(1 for count in fitting if count)

    def start(self, place: int) -> Handle:
        """See :class:`headrace.extract.crew.Cluster`."""
        urls = self.config.url
        workers = self.config.ray_workers or len(urls)
        options = options_of(self._options, urls, workers, place)
        group = None
        how: dict[str, Any] = {
            "num_cpus": self.config.ray_cpus,
            "num_gpus": self.config.ray_gpus,
            "max_restarts": 0,  # a new worker is hired instead: it must be told from the old one
            "max_task_retries": 0,
            "max_concurrency": 2,
            "scheduling_strategy": "SPREAD",
        }
        if self.config.ray_gpus:
            group = self.ray.util.placement_group(
                [{"GPU": self.config.ray_gpus, "CPU": self.config.ray_cpus}], strategy="STRICT_PACK"
            )
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            how["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(group)
        elif urls:
            how |= self._near(urls[place % len(urls)])
        return RayHandle(self.ray, self._actor.options(**how).remote(self._setup(options)), group)

    def _near(self, url: str) -> dict[str, Any]:
        """Options that put an actor on the host of ``url``, if that is one of the cluster: captures pass through its memory."""
        host = urlsplit(url).hostname or ""
        if host in LOOPBACK:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            return {"scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(self._here, soft=False)}
        try:
            address = socket.gethostbyname(host)
        except OSError:
            return {}
        there = any(node["NodeManagerAddress"] == address for node in self._nodes())
        return {"resources": {f"node:{address}": 0.001}} if there else {}

    def wait(self, handles: Collection[Handle], seconds: float) -> list[Handle]:
        """See :class:`headrace.extract.crew.Cluster`."""
        by_call = {handle.call: handle for handle in handles if isinstance(handle, RayHandle)}
        done, _ = self.ray.wait(list(by_call), num_returns=1, timeout=seconds)
        if done:  # and whoever else is ready by now
            done, _ = self.ray.wait(list(by_call), num_returns=len(by_call), timeout=0)
        return [by_call[call] for call in done]

    def close(self) -> None:
        """See :class:`headrace.extract.crew.Cluster`."""
        if self._started and self.ray.is_initialized():
            self.ray.shutdown()
        self._started = False


def _reach(address: str) -> None:
    """Raises OSError for a cluster that nobody answers for: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()


def _reason(error: BaseException) -> str:
    """The line of Ray's message about a dead actor that says why."""
    lines = str(error).splitlines()
    why = [line.strip() for line in lines if "is dead because" in line]
    return why[0].split(" Worker exit detail")[0] if why else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
