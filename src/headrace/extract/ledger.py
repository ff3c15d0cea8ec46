"""What became of every row: the selection before the run, the failures kept between runs, the sum that must add up after it."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, IncompleteError
from headrace.files import atomic_write
from headrace.types import Failure

ALREADY = "already_stored"
DUPLICATE = "duplicate"
NOT_SELECTED = "not_selected"
LIMIT = "beyond_limit"


@dataclass(slots=True)
class Selection:
    """Which rows this run extracts, and why each of the others is not. Built by :func:`select`."""

    todo: dict[str, int] = field(default_factory=dict)
    """key → tokens, in the order of the rows."""
    rows: int = 0
    """Rows looked at; always ``len(todo) + skipped + set aside``."""
    skipped: Counter[str] = field(default_factory=Counter)
    """reason → rows."""
    set_aside: dict[str, Failure] = field(default_factory=dict)
    """Rows whose failure an earlier run found final."""
    tokens_done: int = 0
    """Tokens of selected rows that were in the store before."""

    @property
    def tokens(self) -> int:
        """Tokens to do."""
        return sum(self.todo.values())


def select(
    keys: Iterable[str],
    lengths: Iterable[int],
    *,
    stored: Collection[str],
    set_aside: dict[str, Failure],
    only: list[str],
    limit: int,
) -> Selection:
    """Sort rows into to do, skipped and set aside.

    ``limit`` counts distinct selected rows in the rows' order, stored ones included, so that a resumed run selects
    the same ones. Raises ConfigError for an ``only`` that fits no key or several.
    """
    out = Selection()
    keys = list(keys)
    wanted = _expand(only, keys) if only else None
    seen: set[str] = set()
    for key, tokens in zip(keys, lengths, strict=True):
        out.rows += 1
        if key in seen:
            out.skipped[DUPLICATE] += 1
        elif wanted is not None and key not in wanted:
            out.skipped[NOT_SELECTED] += 1
        elif limit and len(seen) >= limit:
            out.skipped[LIMIT] += 1
        else:
            seen.add(key)
            if key in stored:
                out.skipped[ALREADY] += 1
                out.tokens_done += int(tokens)
            elif key in set_aside:
                out.set_aside[key] = set_aside[key]
            else:
                out.todo[key] = int(tokens)
    return out


def _expand(only: list[str], keys: list[str]) -> set[str]:
    wanted = set()
    for start in only:
        matches = {key for key in keys if key.startswith(start)}
        if len(matches) != 1:
            found = f"fits {len(matches)} keys" if matches else "fits no key"
            raise ConfigError(
                f"--only {start} {found} of the rows; give the key of one row, or a beginning that only it has"
            )
        wanted |= matches
    return wanted


@dataclass(frozen=True, slots=True)
class FailedRow:
    """One line of ``failures.jsonl``."""

    failure: Failure
    tries: int
    tokens: int
    origin: str = ""
    """Where the row came from, for a person."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        f = self.failure
        return {
            "key": f.key,
            "kind": f.kind,
            "message": f.message,
            "retryable": f.retryable,
            "tries": self.tries,
            "tokens": self.tokens,
            "origin": self.origin,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FailedRow:
        """The inverse of :meth:`to_json`; raises KeyError or TypeError for anything else."""
        failure = Failure(str(data["key"]), str(data["kind"]), str(data["message"]), bool(data["retryable"]))
        return cls(failure, int(data["tries"]), int(data["tokens"]), str(data["origin"]))


class FailureFile:
    """``failures.jsonl``: appended while rows fail, rewritten at the end without the rows that were stored since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = {row.failure.key: row for row in _read_failures(path)}

    def add(self, row: FailedRow) -> None:
        """Record that a row failed for this run, durably."""
        self.rows[row.failure.key] = row
        with open(self.path, "ab") as file:
            if file.tell() and _torn(self.path):
                file.write(b"\n")
            file.write(json.dumps(row.to_json(), ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def settle(self, stored: Collection[str]) -> None:
        """Forget rows that are in the store now, and make the file hold each failed row once."""
        self.rows = {key: row for key, row in self.rows.items() if key not in stored}
        if not self.rows:
            self.path.unlink(missing_ok=True)
            return
        with atomic_write(self.path) as file:
            for row in self.rows.values():
                file.write(json.dumps(row.to_json(), ensure_ascii=False).encode() + b"\n")

    def final(self) -> dict[str, Failure]:
        """Rows that are not tried again unless asked: trying again cannot help."""
        return {key: row.failure for key, row in self.rows.items() if not row.failure.retryable}


def _torn(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _read_failures(path: Path) -> list[FailedRow]:
    rows = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        # A line cut off by a kill names no row; that row was not recorded as failed and is simply tried again.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            rows.append(FailedRow.from_json(json.loads(line)))
    return rows


@dataclass(frozen=True, slots=True)
class Account:
    """rows = stored + skipped + failed + not reached, by reason; made from keys, not from counters."""

    rows: int
    stored: int
    skipped: dict[str, int]
    failed: dict[str, int]
    not_reached: int

    @classmethod
    def close(
        cls, selection: Selection, stored: Collection[str], failed: dict[str, Failure], *, finished: bool
    ) -> Account:
        """Settle the account of a run.

        Raises IncompleteError when a finished run left rows that are neither stored nor failed: a fault of ours or
        of the engine that must never pass as success.
        """
        kinds: Counter[str] = Counter(failure.kind for failure in selection.set_aside.values())
        now = 0
        left = []
        for key in selection.todo:
            if key in stored:
                now += 1
            elif key in failed:
                kinds[failed[key].kind] += 1
            else:
                left.append(key)
        account = cls(selection.rows, now, dict(selection.skipped), dict(kinds), len(left))
        total = (
            account.stored
            + sum(account.skipped.values())
            + sum(account.failed.values())
            + account.not_reached
        )
        if total != account.rows:
            raise IncompleteError(
                f"the account does not add up: {account} sums to {total}; please report this"
            )
        if finished and left:
            raise IncompleteError(
                f"{len(left)} rows are neither stored nor failed (first: {left[0]}); run the command again, it goes on"
            )
        return account

    def to_json(self) -> dict[str, Any]:
        """Plain values; the keys of the command's result."""
        return {
            "rows": self.rows,
            "stored": self.stored,
            "skipped": sum(self.skipped.values()),
            "skipped_by_reason": self.skipped,
            "failed": sum(self.failed.values()),
            "failed_by_kind": self.failed,
            "not_reached": self.not_reached,
        }
