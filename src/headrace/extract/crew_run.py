"""Puts a distributed extraction together: its cluster (Ray, or processes of this host), its crew, and the pipeline that drives it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.engines.base import engine_class
from headrace.errors import ConfigError, PreflightError
from headrace.extract import checks
from headrace.extract.config import ExtractConfig
from headrace.extract.crew import CLOSE_SECONDS, Cluster, Crew
from headrace.extract.crew_engine import CrewEngine
from headrace.extract.crew_pipeline import CrewPipeline
from headrace.extract.disk import DiskGuard
from headrace.extract.parts import limits_of
from headrace.extract.processes import ProcessCluster
from headrace.extract.progress import Progress
from headrace.extract.ray_cluster import RayCluster
from headrace.extract.remote_worker import RemoteWorker, Setup
from headrace.extract.stream import Stream, StreamSetup, StreamWorker
from headrace.remote import absolute
from headrace.store.codecs import default_codec
from headrace.types import CaptureSpec, Row

log = logging.getLogger(__name__)
SEAL_SECONDS = 600.0


def open_crew(config: ExtractConfig, spec: CaptureSpec, codec: str, longest: int) -> CrewEngine:
    """Open the cluster and wait for the first worker. ``longest``: tokens of the longest row.

    Raises ConfigError for options that exclude each other, PreflightError or EngineUnavailableError when there is no
    cluster or no worker, and whatever the first worker's engine raises.
    """
    setup = _setup_maker(config, spec, codec, longest)
    return _open(config, spec, _cluster(config, setup))


def open_stream(
    config: ExtractConfig, spec: CaptureSpec, longest: int, get: Callable[[str], Row], *, keep: bool
) -> Stream:
    """A stream of captures from the cluster's workers, which also fill the store at ``config.out`` if told to ``keep``.

    ``get`` finds a row by its key. Raises as :func:`open_crew`, and PreflightError when the engine fails its checks.
    """
    base = _setup_maker(config, spec, config.codec or default_codec(spec.dtype), longest)

    def setup(options: dict[str, Any]) -> StreamSetup:
        return StreamSetup(base(options), keep)

    engine = _open(config, spec, _cluster(config, setup, StreamWorker))
    try:
        checks.check_engine(config, engine, log.info)
    except PreflightError:
        engine.close()
        raise
    # Kept captures are sealed at the end, which may take a slow disk or bucket its time.
    return Stream(engine, get, SEAL_SECONDS if keep else CLOSE_SECONDS)


def _cluster(
    config: ExtractConfig, setup: Callable[[dict[str, Any]], Any], worker: type[RemoteWorker] = RemoteWorker
) -> Cluster:
    options = _options(config)
    if config.ray:
        return RayCluster(config, setup, options, worker)
    return ProcessCluster(config, setup, options, worker)


def _options(config: ExtractConfig) -> dict[str, Any]:
    """Engine options of all workers. Raises ConfigError for options that exclude each other."""
    if config.workers > 1 and config.ray:
        raise ConfigError(
            f"--workers {config.workers} are processes of this host, --ray runs workers on a cluster; leave one out "
            "(--ray-workers is their number there)"
        )
    if config.url and config.ray_gpus:
        raise ConfigError(
            "--ray-gpus are for engines that workers start; with --url the servers have them already"
        )
    options = checks.engine_options(config.model_copy(update={"url": config.url[:1]}))
    workers, servers = config.workers or config.ray_workers, len(config.url)
    if workers > servers > 0 and "clients" in engine_class(config.engine).Options.model_fields:
        options.setdefault("clients", -(-workers // servers))
    return options


def _setup_maker(
    config: ExtractConfig, spec: CaptureSpec, codec: str, longest: int
) -> Callable[[dict[str, Any]], Setup]:
    # A worker's current folder is another one.
    places = {"rows": absolute(config.rows), "out": absolute(config.out)}
    if config.store:
        places["store"] = absolute(config.store)
    if Path(config.model).exists():
        places["model"] = absolute(config.model)
    moved = config.model_copy(update={name: type(getattr(config, name))(p) for name, p in places.items()})

    def setup(options: dict[str, Any]) -> Setup:
        return Setup(
            config=moved.model_dump(mode="json"),
            options=options,
            spec=spec.to_dict(),
            codec=codec,
            longest=longest,
        )

    return setup


def _open(config: ExtractConfig, spec: CaptureSpec, cluster: Cluster) -> CrewEngine:
    crew = Crew(cluster, patience=60 * config.engine_wait_minutes, silence=60 * config.lease_minutes)
    engine = CrewEngine(
        crew, spec, any_settings=config.allow_other_settings, skip_preflight=config.skip_preflight
    )
    try:
        engine.open()
    except BaseException:
        engine.close()
        raise
    return engine


def make_crew_pipeline(
    config: ExtractConfig, engine: CrewEngine, progress: Progress, tokens: int
) -> CrewPipeline:
    """The driver for ``tokens`` to do."""
    return CrewPipeline(
        engine,
        guard=DiskGuard(config.out, 0, lambda: 0),
        progress=progress,
        limits=limits_of(config),
        tokens=tokens,
        lease_seconds=60 * config.lease_minutes,
    )
