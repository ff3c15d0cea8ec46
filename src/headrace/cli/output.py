"""What a command prints: tables for people on stdout, or one JSON object with --json; logs and errors go to stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.errors import HeadraceError


class Output:
    """Handed to every command. In JSON mode tables and notes go to stderr and stdout carries the result alone."""

    def __init__(self, json_mode: bool = False) -> None:
        self.json_mode = json_mode
        self.result: dict[str, Any] = {}
        self._error: HeadraceError | None = None
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
            datefmt="%H:%M:%S",
        )
        for noisy in ("httpx", "httpcore", "urllib3", "filelock"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        logging.getLogger("stamina").setLevel(logging.ERROR)  # whoever retries says why in words of its own

    @property
    def stream(self) -> Any:
        """Where text for people goes."""
        return sys.stderr if self.json_mode else sys.stdout

    def set(self, **values: Any) -> None:
        """Add keys to the command's JSON result."""
        self.result.update(values)

    def say(self, text: str) -> None:
        """One line for a person, unbuffered."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table for a person. Numbers are right-aligned; wide terminals are not assumed."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        body = [[str(cell) for cell in row] for row in rows]
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            show_header=any(columns),
        )
        for index, column in enumerate(columns):
            numeric = bool(body) and all(
                r[index][:1].isdigit() or r[index][:1] in "-+." for r in body if r[index]
            )
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in body:
            table.add_row(*row)
        width = None if self.stream.isatty() else 120
        Console(file=self.stream, width=width, soft_wrap=False, highlight=False, markup=False).print(table)

    def error(self, error: HeadraceError) -> None:
        """Remember the error that ends the command, and say it on stderr as one sentence."""
        self._error = error
        text = str(error)
        sys.stderr.write(f"{text}\n" if text.startswith("headrace ") else f"headrace: {text}\n")

    def finish(self) -> None:
        """In JSON mode, write the one object: the result, ``ok``, and the error if there was one."""
        if not self.json_mode:
            return
        value: dict[str, Any] = {"ok": self._error is None, **self.result}
        if self._error is not None:
            value["error"] = {
                "kind": type(self._error).__name__,
                "message": str(self._error),
                "exit_code": self._error.exit_code,
            }
        sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()
