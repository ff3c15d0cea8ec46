"""Writes docs/commands.md from the command line itself; with --check, fails when the file is stale.

python tools/make_docs.py [--check]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path

from headrace.cli import COMMANDS, main, usage

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"


def help_of(command: str) -> str:
    """What ``headrace COMMAND --help`` prints, at a fixed width."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return text.getvalue().rstrip()


def page() -> str:
    """The whole page."""
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


def run() -> int:
    """Write or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    os.environ["COLUMNS"] = "110"
    text = page()
    if args.check:
        if not PAGE.is_file() or PAGE.read_text() != text:
            print(f"{PAGE} is stale; run: python tools/make_docs.py")
            return 1
        return 0
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(run())
