"""The run's figures in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from headrace.monitor.status import Status

GAUGES = {
    # metric: (field of the snapshot, help)
    "headrace_tokens_done": ("tokens_done", "Tokens written to the store"),
    "headrace_tokens_total": ("tokens_total", "Tokens of all selected rows"),
    "headrace_captures_done": ("rows_done", "Captures written to the store"),
    "headrace_captures_total": ("rows_total", "Rows selected for capture"),
    "headrace_rows_set_aside": ("rows_failed", "Rows given up in this session"),
    "headrace_tokens_per_second": ("tokens_per_second", "Tokens a second over the last minute"),
    "headrace_eta_seconds": ("eta_seconds", "Seconds of work left"),
    "headrace_captures_in_flight": ("rows_in_flight", "Rows with the engine"),
    "headrace_tokens_in_flight": ("tokens_in_flight", "Tokens with the engine"),
    "headrace_captures_unwritten": ("rows_behind", "Answered rows not yet written"),
    "headrace_raw_bytes": ("bytes_raw", "Bytes of the captures before the codec"),
    "headrace_stored_bytes": ("bytes_stored", "Bytes of sealed shards"),
    "headrace_staging_bytes": ("staging_bytes", "Bytes in the staging folder"),
    "headrace_disk_free_bytes": ("disk_free", "Bytes free on the store's file system"),
}


class _StatusCollector:
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family a figure; figures that are not known are left out."""
        status = self._status
        yield GaugeMetricFamily(
            "headrace_up", "1 while the extraction runs", value=float(status.state in ("running", "paused"))
        )
        yield GaugeMetricFamily(
            "headrace_paused", "1 while admission is held back", value=float(status.state == "paused")
        )
        progress = status.progress or {}
        for metric, (name, text) in GAUGES.items():
            if progress.get(name) is not None:
                yield GaugeMetricFamily(metric, text, value=float(progress[name]))
        yield _labelled(
            "headrace_errors", "Failures seen, retried ones included", "kind", progress.get("errors", {})
        )
        norms = GaugeMetricFamily(
            "headrace_state_norm", "Norm of captured states", labels=["tap", "quantile"]
        )
        for tap in status.norms:
            for quantile, name in (("0.01", "low"), ("0.5", "median"), ("0.99", "high")):
                norms.add_metric([str(tap["tap"]), quantile], tap[name])
        yield norms


def _labelled(metric: str, text: str, label: str, values: dict[str, Any]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(metric, text, labels=[label])
    for name, value in values.items():
        family.add_metric([name], float(value))
    return family


def exposition(status: Status) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))
    return bytes(generate_latest(registry))
