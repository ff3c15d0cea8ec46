"""Writes the generated pages of docs/: commands.md from the command line itself, performance.md from bench/results/*.json.

python tools/make_docs.py [--check]      with --check: fail when a page is stale
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from headrace.cli import COMMANDS, main, usage

ROOT = Path(__file__).parent.parent
DOCS, BENCH = ROOT / "docs", ROOT / "bench"
MOST_ROWS = 16


def help_of(command: str) -> str:
    """What ``headrace COMMAND --help`` prints, at a fixed width."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return text.getvalue().rstrip()


def commands_page() -> str:
    """docs/commands.md."""
    parts = [
        "# Commands",
        "",
        "Made from the commands' own schemas by `tools/make_docs.py`; `make check` fails when it is stale.",
        "",
        "```text",
        usage().rstrip(),
        "```",
    ]
    for command in COMMANDS:
        parts += ["", f"## {command}", "", "```text", help_of(command), "```"]
    return "\n".join(parts) + "\n"


def performance_page() -> str:
    """docs/performance.md: every result that is committed, and which benchmarks have none yet."""
    results = [(path, json.loads(path.read_text())) for path in sorted((BENCH / "results").glob("*.json"))]
    names = sorted(path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text())
    without = [name for name in names if name not in {result["benchmark"] for _, result in results}]
    parts = [
        "# Performance",
        "",
        "Every figure here is read from a file under `bench/results/`, which a benchmark wrote with `--json`; this page is made from them",
        "by `tools/make_docs.py`, and `make check` fails when it is stale. Comparisons ran interleaved in one process after a warm-up; spread is",
        "that of the repeats. To measure your machine: `python bench/NAME.py`, or `make bench` for all that it can run; `--quick` takes under a minute.",
    ]
    for path, result in results:
        parts += ["", *_section(path, result)]
    if without:
        parts += ["", "## No result kept yet", "", "| benchmark | what it measures |", "|---|---|"]
        parts += [f"| `bench/{name}.py` | {_purpose(name)} |" for name in without]
    return "\n".join(parts) + "\n"


def _section(path: Path, result: dict[str, Any]) -> list[str]:
    quick = " Quick mode: smaller work, not to be judged by." if result.get("quick") else ""
    source = path.relative_to(ROOT).as_posix()
    return [
        f"## {path.stem}",
        "",
        f"{_purpose(result['benchmark'])}{quick}",
        "",
        f"{result['machine']}; {result['date']}, commit {result['commit']}; `bench/{result['benchmark']}.py`, `{source}`.",
        *_targets(result.get("targets", [])),
        *_folded(_tables(result["rows"]), len(result["rows"])),
    ]


def _folded(lines: list[str], rows: int) -> list[str]:
    """Long tables open on a click, on the site and on a code host alike."""
    if rows <= MOST_ROWS:
        return lines
    return ["", '<details markdown="1">', f"<summary>all {rows} rows</summary>", *lines, "", "</details>"]


def _tables(rows: list[dict[str, Any]]) -> list[str]:
    """A table for each run of rows that share their columns."""
    out: list[str] = []
    columns: list[str] = []
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            out += ["", _line(column.replace("_", " ") for column in columns), _line("---" for _ in columns)]
        out.append(_line(_value(row[column]) for column in columns))
    return out


def _targets(targets: list[dict[str, Any]]) -> list[str]:
    if not targets:
        return []
    lines = ["", "| target | measured | wanted | |", "|---|---|---|---|"]
    return lines + [
        _line([t["name"], _value(t["value"]), _value(t["target"]), "met" if t["ok"] else "**missed**"])
        for t in targets
    ]


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value)
    return "" if value is None else str(value)


def _purpose(name: str) -> str:
    """The first paragraph of a benchmark's own docstring."""
    path = BENCH / f"{name}.py"
    if not path.is_file():
        return ""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


PAGES = {"commands.md": commands_page, "performance.md": performance_page}


def run() -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    os.environ["COLUMNS"] = "110"
    stale = 0
    for name, make in PAGES.items():
        page, text = DOCS / name, make()
        if page.is_file() and page.read_text() == text:
            continue
        if args.check:
            print(f"{page} is stale; run: python tools/make_docs.py")
            stale = 1
        else:
            page.write_text(text)
            print(f"wrote {page}")
    return stale


if __name__ == "__main__":
    sys.exit(run())
