"""``headrace info``: what a store holds."""

from __future__ import annotations

from typing import Any

from headrace.cli.output import Output
from headrace.store.config import InfoConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Print the spec, the counts and a table of the taps."""
    from headrace.store.info import store_info
    from headrace.store.reader import Store

    info = store_info(Store.open(config.store))
    output.set(**info)
    spec = info["spec"]
    output.table(config.store, ["", ""], _facts(info, spec))
    lossy = any(tap["relative_error_max"] for tap in info["taps"].values())
    columns = ["tap", "states", "stored", "norm mean", "norm min", "norm max"]
    rows = []
    for name, tap in info["taps"].items():
        norms = [f"{tap[key]:.3f}" for key in ("norm_mean", "norm_min", "norm_max")]
        rows.append([name, f"{tap['rows']:,}", _size(tap["bytes"]), *norms])
        if lossy:
            rows[-1] += [f"{tap['relative_error_mean']:.2e}", f"{tap['relative_error_max']:.2e}"]
    output.table(
        "Taps (norms of every 16th state)", [*columns, *(["error mean", "error max"] if lossy else [])], rows
    )


def _facts(info: dict[str, Any], spec: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        (
            "target",
            f"{spec['target']}, {spec['num_layers']} layers, hidden {spec['hidden_size']}, {spec['dtype']}",
        ),
        ("taps", ", ".join(str(tap) for tap in spec["taps"])),
        ("final state", "after the final norm" if spec["final_normed"] else "before the final norm"),
        ("codec", info["codec"]),
        ("captures", f"{info['captures']:,} in {info['shards']:,} shards"),
        ("tokens", f"{info['tokens']:,}, {100 * info['supervised_share']:.1f} % supervised"),
        (
            "length",
            f"mean {info['length_mean']:,.0f}, median {info['length_p50']:,.0f}, longest {info['length_max']:,}",
        ),
        (
            "bytes",
            f"{_size(info['bytes_raw'])} raw, {_size(info['bytes_stored'])} stored ({info['ratio']:.3f})",
        ),
    ]
    if info["final_positions"] != "all":
        facts.append(
            ("final kept", f"where the next token is supervised; {_size(info['bytes_left_out'])} not stored")
        )
    if len(info["passes"]) > 1:
        facts += [("pass", f"taps {part['taps']}: {part['captures']:,} captures") for part in info["passes"]]
    if info["shared_tokens"]:
        facts.append(("shared", f"{info['shared_tokens']:,} tokens take their states from a parent"))
    return facts


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
