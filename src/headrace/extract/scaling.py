"""An extraction on many hosts, worked out: what each resource lets through, which one saturates first, hours and cost.

The model is one line a resource: units of it times what one unit moves a second, divided by the bytes a token puts through
it. The slowest is the rate. Every figure in it is a field of :class:`Machine`, with where it comes from, and an option.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.extract.config import Machine

GB = 1e9
HOURS_A_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Limit:
    """What one resource of the whole cluster lets through."""

    resource: str
    units: str
    tokens_per_second: float
    load: float
    """Share of it that is used at the cluster's rate; 1.0 for the one that saturates first."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The figures; :meth:`to_json` is the command's result."""

    nodes: int
    gpus: int
    workers: int
    tokens: int
    bytes_raw: int
    bytes_stored: int
    limits: list[Limit]
    """The one that saturates first comes first."""
    tokens_per_second: float
    hours: float
    unsealed: int
    """Bytes of raw states that a lost host costs at most, on average over its workers' open shards."""
    cost_gpus: float
    cost_storage_month: float
    cost_requests: float

    @property
    def first(self) -> str:
        """What saturates first."""
        return self.limits[0].resource

    @property
    def cost(self) -> float:
        """Of the extraction: GPUs and requests; storage is by the month."""
        return self.cost_gpus + self.cost_requests

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "saturates_first": self.first, "cost": round(self.cost, 2)}


def plan_cluster(
    machine: Machine, *, nodes: int, tokens: int, bytes_per_token: int, ratio: float, shard_bytes: int
) -> ClusterPlan:
    """Work out ``tokens`` tokens of ``bytes_per_token`` raw bytes, stored at ``ratio``, on ``nodes`` hosts.

    Raises ConfigError when the GPUs do not make one engine.
    """
    gpus = nodes * machine.gpus_per_node
    workers = gpus // machine.gpus_per_engine
    if not workers:
        raise ConfigError(
            f"{nodes} nodes of {machine.gpus_per_node} GPUs do not make one engine of {machine.gpus_per_engine}; raise --nodes or lower --machine.gpus-per-engine"
        )
    limits = _limits(machine, nodes, workers, bytes_per_token, ratio)
    rate = min(limit for _, _, limit in limits)
    seconds = tokens / rate
    raw = tokens * bytes_per_token
    stored = round(raw * ratio)
    requests = (
        stored / shard_bytes * (2 + shard_bytes / (machine.part_mb * 1e6))
    )  # parts, begin and end of each upload
    bucket = machine.destination == "bucket"
    return ClusterPlan(
        nodes=nodes,
        gpus=gpus,
        workers=workers,
        tokens=tokens,
        bytes_raw=raw,
        bytes_stored=stored,
        limits=sorted(
            (Limit(name, units, limit, rate / limit) for name, units, limit in limits),
            key=lambda limit: limit.tokens_per_second,
        ),
        tokens_per_second=rate,
        hours=seconds / 3600,
        unsealed=round(
            workers
            / nodes
            * min(shard_bytes / ratio, machine.seal_minutes * 60 * rate / workers * bytes_per_token)
        ),
        cost_gpus=gpus * seconds / 3600 * machine.gpu_hour,
        cost_storage_month=stored / GB * machine.storage_month if bucket else 0.0,
        cost_requests=requests / 1000 * machine.thousand_puts if bucket else 0.0,
    )


def _limits(
    machine: Machine, nodes: int, workers: int, raw: int, ratio: float
) -> list[tuple[str, str, float]]:
    """(resource, units, tokens a second) of each thing a token passes on its way."""
    stored = raw * ratio
    spread = 1.0 if workers == 1 else machine.ray_efficiency
    rows = [
        ("prefill", f"{workers} engines", workers * machine.prefill * machine.capture_ratio * spread),
        ("PCIe", f"{workers} GPUs that copy", workers * machine.pcie_gb * GB / raw),
        ("staging memory", f"{workers} servers", workers * machine.staging_gb * GB / raw),
        (
            "encoding",
            f"{workers * machine.encoders} cores",
            workers * machine.encoders * machine.encoder_gb * GB / raw,
        ),
    ]
    if machine.destination == "disk":
        return [*rows, ("disk", f"{nodes} disks", nodes * machine.disk_gb * GB / stored)]
    return [
        *rows,
        ("network", f"{nodes} interfaces", nodes * machine.network_gb * GB / stored),
        ("object store, a host", f"{nodes} clients", nodes * machine.bucket_host_gb * GB / stored),
        ("object store, the bucket", "1 bucket", machine.bucket_gb * GB / stored),
    ]
