"""An evaluation for people: tables, and a plot when matplotlib is there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

Table = tuple[str, list[str], list[list[str]]]

_LOG = logging.getLogger(__name__)


def tables(report: dict[str, Any]) -> list[Table]:
    """Title, columns and rows of each table of a report."""
    out = []
    if any(d["parts"] for d in report["drafts"]):
        out += [_lengths(report), _positions(report)]
    if "served" in report:
        out.append(_served(report["served"]))
    return out


def _how(report: dict[str, Any]) -> str:
    settings = report["settings"]
    shape = f"chain of {settings['steps']}"
    if settings["topk"] > 1:
        shape = f"tree of {report['verify_tokens']} nodes, depth {settings['steps']}, top {settings['topk']}"
    heat = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']}"
    return f"{shape}, {heat}, {settings['dtype']}, {settings['max_new_tokens']} new tokens, {settings['batch_size']} at a time"


def _lengths(report: dict[str, Any]) -> Table:
    columns = [
        "drafter",
        "set",
        "answers",
        "acceptance length",
        "equal to plain",
        "tokens/s",
        "plain",
        "speed-up",
    ]
    rows = []
    for draft in report["drafts"]:
        for part in draft["parts"]:
            equal = f"{part['equal']}/{part['checked']}" if part["checked"] else "-"
            if part["ties"] or part["different"]:
                equal += f" ({part['ties']} at ties, {part['different']} wrong)"
            rows.append(
                [
                    draft["name"],
                    part["set"],
                    str(part["answers"]),
                    f"{part['acceptance_length']:.3f}",
                    equal,
                    _number(part["tokens_per_second"]),
                    _number(part.get("plain_tokens_per_second")),
                    _number(part.get("speedup"), 2),
                ]
            )
        if len(draft["parts"]) > 1:
            pooled = draft["all"]
            rows.append(
                [
                    draft["name"],
                    "all",
                    str(pooled["answers"]),
                    f"{pooled['acceptance_length']:.3f}",
                    str(pooled["equal"]),
                    "",
                    "",
                    "",
                ]
            )
    return f"acceptance: {_how(report)}", columns, rows


def _positions(report: dict[str, Any]) -> Table:
    steps = report["settings"]["steps"]
    columns = ["drafter", "set", *[f"position {i}" for i in range(1, steps + 1)]]
    rows = [
        [draft["name"], part["set"], *[f"{x:.3f}" for x in part["conditional"]]]
        for draft in report["drafts"]
        for part in draft["parts"]
    ]
    return "share of drafted tokens accepted, given that all before them were", columns, rows


def _served(served: dict[str, Any]) -> Table:
    columns = ["set", "verifications", "acceptance length", "offline", "gap", "equal to ours"]
    rows = []
    for part in served["parts"]:
        gap = part.get("gap")
        rows.append(
            [
                part["set"],
                str(part["verifications"]),
                f"{part['acceptance_length']:.3f}",
                _number(part.get("offline"), 3),
                "" if gap is None else f"{gap:+.1%}" + (" MISMATCH" if part["mismatch"] else ""),
                part.get("equal_to_offline", ""),
            ]
        )
    return f"served by {served['engine']} at {served['url']}", columns, rows


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def draw(report: dict[str, Any], folder: Path) -> Path | None:
    """Draw ``acceptance.png`` into ``folder``: acceptance length a set, and acceptance by position. None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        _LOG.info("no plot: matplotlib is not installed; pip install 'headrace[plot]'")
        return None
    if not any(d["parts"] for d in report["drafts"]):
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sets = [s["name"] for s in report["sets"]]
    width = 0.8 / len(report["drafts"])
    for number, draft in enumerate(report["drafts"]):
        at = [i + (number - (len(report["drafts"]) - 1) / 2) * width for i in range(len(sets))]
        bars = left.bar(at, [p["acceptance_length"] for p in draft["parts"]], width, label=draft["name"])
        left.bar_label(bars, fmt="%.2f", fontsize=8)
        for part in draft["parts"]:
            positions = range(1, len(part["conditional"]) + 1)
            right.plot(positions, part["conditional"], marker="o", label=f"{draft['name']}, {part['set']}")
    left.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    left.set_xticks(range(len(sets)), sets)
    left.set_ylabel("acceptance length (plain decoding: 1.0)")
    right.set_xlabel("drafted position")
    right.set_ylabel("accepted, given all before")
    right.set_ylim(0, 1)
    right.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.suptitle(_how(report), fontsize=10)
    path = folder / "acceptance.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
