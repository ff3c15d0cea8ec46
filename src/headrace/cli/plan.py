"""``headrace plan``: what an extraction will take, and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.cli.output import Output
from headrace.errors import PreflightError
from headrace.extract.config import PlanConfig as Config

if TYPE_CHECKING:
    from headrace.extract.plan import Plan
    from headrace.extract.scaling import ClusterPlan

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Print the plan. Raises PreflightError when it does not fit."""
    from headrace.extract.plan import plan, plan_nodes

    if config.nodes:
        cluster = plan_nodes(config)
        output.set(**cluster.to_json())
        _print_cluster(cluster, output)
        return
    result = plan(config)
    output.set(**result.to_json())
    _print(result, output)
    if not result.fits:
        raise PreflightError(
            f"does not fit: {'; '.join(result.shortages())}. Free some, choose a smaller codec or fewer taps"
        )
    output.say("fits")


def _print(plan: Plan, output: Output) -> None:
    from headrace.extract.disk import gigabytes
    from headrace.extract.view import duration

    shape = plan.shape
    output.say(
        f"{plan.rows:,} captures, {plan.tokens:,} tokens (mean {plan.tokens / plan.rows:,.0f}, longest {plan.longest:,}); "
        f"taps {', '.join(map(str, shape.taps))}; {shape.hidden_size} × {shape.dtype}: {shape.bytes_per_token:,} bytes a token, "
        f"{gigabytes(plan.bytes_raw)} raw"
    )
    if plan.lengths:
        share = [f"{b.tokens / plan.tokens:.1%}" for b in plan.lengths]
        rows = [
            (f"{b.longest:,}", f"{b.rows:,}", f"{b.tokens:,}", s)
            for b, s in zip(plan.lengths, share, strict=True)
        ]
        output.table("By length", ["up to tokens", "captures", "tokens", "share"], rows)
    output.table(
        "Stored",
        ["codec", "of raw", "bytes", "shards", ""],
        [
            (
                c.codec,
                f"{c.ratio:.2f}",
                gigabytes(c.bytes),
                f"{c.shards:,}",
                "chosen" if c.codec == plan.codec else "",
            )
            for c in plan.codecs
        ],
    )
    places = [
        (p.what, p.path, gigabytes(p.need), gigabytes(p.free), "yes" if p.fits else "NO") for p in plan.places
    ]
    memory_fits = "yes" if plan.memory <= plan.memory_available else "NO"
    places.append(
        ("client memory", "", gigabytes(plan.memory), gigabytes(plan.memory_available), memory_fits)
    )
    output.table("Room", ["for", "on", "needed", "free", "fits"], places)
    if plan.hours is None:
        output.say(
            "time: give --rate in tokens a second, or --measured with a store extracted on this machine"
        )
    else:
        stored = next(c for c in plan.codecs if c.codec == plan.codec)
        write = stored.bytes / (plan.hours * 3600)
        by = f" with {plan.workers} workers" if plan.workers > 1 else ""
        output.say(
            f"time: {duration(plan.hours * 3600)} at {plan.rate:,.0f} tokens/s{by}; the disk takes {gigabytes(write)}/s"
        )
        _print_workers(plan, output)


def _print_workers(plan: Plan, output: Output) -> None:
    """Why there should be several processes, when there should."""
    from headrace.extract.disk import gigabytes
    from headrace.extract.plan import PROCESS_RATE, workers_for

    wanted = workers_for(plan.engine_rate, plan.shape)
    if wanted > 1:
        states = gigabytes(plan.engine_rate * plan.shape.bytes_per_token)
        output.say(
            f"{plan.engine_rate:,.0f} tokens/s are {states} of states a second and one process takes about {gigabytes(PROCESS_RATE)}: "
            f"headrace extract --workers {wanted}"
        )


def _print_cluster(plan: ClusterPlan, output: Output) -> None:
    from headrace.extract.disk import gigabytes
    from headrace.extract.view import duration

    output.say(
        f"{plan.nodes:,} hosts, {plan.gpus:,} GPUs, {plan.workers:,} workers; {plan.tokens:,} tokens, {gigabytes(plan.bytes_raw)} raw, "
        f"{gigabytes(plan.bytes_stored)} stored"
    )
    rows = [(x.resource, x.units, f"{x.tokens_per_second:,.0f}", f"{x.load:.1%}") for x in plan.limits]
    output.table("What lets through how much", ["resource", "units", "tokens/s", "used"], rows)
    output.say(
        f"time: {duration(plan.hours * 3600)} at {plan.tokens_per_second:,.0f} tokens/s; {plan.first} saturates first; "
        f"a lost host costs at most {gigabytes(plan.unsealed)} of states"
    )
    output.say(
        f"cost: {plan.cost_gpus:,.0f} for GPUs, {plan.cost_requests:,.0f} for requests, {plan.cost_storage_month:,.0f} a month for storage "
        "(see --machine.* for the prices and rates assumed)"
    )
