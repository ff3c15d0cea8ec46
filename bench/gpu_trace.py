"""Where ten steps of an SGLang server go, from a trace of torch's profiler that the server itself takes."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

STEPS = 10


def trace(url: str, folder: Path, work: Callable[[], object], wait: float = 60.0) -> dict[str, Any]:
    """Profile the next ten steps of the server at ``url`` while ``work`` runs. Raises TimeoutError when no trace appears."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"output_dir": str(folder), "num_steps": STEPS, "activities": ["CPU", "GPU"], "with_stack": False}
    httpx.post(f"{url}/start_profile", json=body, timeout=60).raise_for_status()
    work()
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        for file in folder.glob("*.trace.json.gz"):
            try:
                events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            except (EOFError, OSError, ValueError):
                continue  # still being written
            return summary(events)
        time.sleep(0.5)
    raise TimeoutError(f"the server at {url} wrote no trace into {folder} within {wait:.0f} s")


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of a trace: the span of its kernels, how much of it the device computed, and what copies to the host took beside that."""
    kernels, copies, names = [], [], Counter[str]()
    for event in events:
        begin, kind = float(event.get("ts", 0.0)), event.get("cat", "")
        span = (begin, begin + float(event.get("dur", 0.0)))
        if kind == "kernel":
            kernels.append(span)
            names[str(event["name"])[:60]] += int(span[1] - span[0])
        elif kind == "gpu_memcpy" and "DtoH" in event["name"]:
            copies.append(span)
    if not kernels:
        return {
            "span_ms": 0.0,
            "busy": 0.0,
            "copied_ms": 0.0,
            "exposed_ms": 0.0,
            "longest_gap_ms": 0.0,
            "kernels": "",
        }
    computed = union(kernels)
    first, last = computed[0][0], computed[-1][1]
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(computed)]
    inside = [c for c in copies if c[0] < last]
    return {
        "span_ms": (last - first) / 1e3,
        "busy": length(computed) / (last - first),
        "copied_ms": length(inside) / 1e3,
        # Time in which the device copied and computed nothing: what the copies cost.
        "exposed_ms": (length(union([*computed, *inside])) - length(computed)) / 1e3,
        "longest_gap_ms": max(gaps, default=0.0) / 1e3,
        "kernels": "; ".join(f"{name} {took / 1e3:.1f} ms" for name, took in names.most_common(6)),
    }


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans joined where they overlap, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(spans: list[tuple[float, float]]) -> float:
    """Sum of the spans' lengths."""
    return sum(end - begin for begin, end in spans)
