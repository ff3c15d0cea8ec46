"""The file of regenerated conversations: a line each, appended as they come, read back to know what is done.

    answers.jsonl                 a finished conversation a line, in any order
    answers.jsonl.failed.jsonl    what failed, with reason; tried again by the next run
    answers.jsonl.manifest.json   endpoint and sampling settings, written before the first request

Done means: the conversation's key (a hash of its messages and tools) stands in a whole line. A line cut by a kill is
removed on opening. No key, header or environment variable is ever written.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from headrace._version import __version__
from headrace.errors import ConfigError, CorruptError, InputError
from headrace.files import read_json, write_json

KIND = "headrace.answers"
_SYNC_SECONDS = 5.0


class AnswerFile:
    """Opens or continues an output. Raises ConfigError when it cannot be written or was made with other settings."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.failed_path = path.with_name(path.name + ".failed.jsonl")
        self.manifest_path = path.with_name(path.name + ".manifest.json")
        self.settings = settings
        self.done: set[str] = set()
        self.usage: Counter[str] = Counter()
        self.providers: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.with_ids = 0
        self.spent = 0.0
        """US dollars spent on this file so far, failures included."""
        self.dearest = 0.0
        """Cost of the most expensive conversation so far."""
        self._synced = time.monotonic()
        self._out: IO[bytes] | None = None
        self._failed: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise ConfigError(f"--out {self.path} is a folder; name a .jsonl file")
            self._check_settings()
            self._read_done()
            self.spent = max(self.spent, float(self.usage.get("cost", 0.0)))
            self._out = open(self.path, "ab")
            self._failed = open(self.failed_path, "wb")
            self.write_manifest({})
        except OSError as exc:
            raise ConfigError(
                f"--out {self.path} cannot be written ({exc.strerror or exc}); give a writable place"
            ) from exc
        return self

    def _check_settings(self) -> None:
        if not self.manifest_path.is_file():
            if self.path.is_file() and self.path.stat().st_size:
                raise ConfigError(
                    f"--out {self.path} exists and was not made by headrace regenerate; give another file"
                )
            return
        theirs = read_json(self.manifest_path)
        if theirs.get("kind") != KIND:
            raise CorruptError(
                f"{self.manifest_path} is not a manifest of regenerated answers; remove it or give another --out"
            )
        self.spent = float(theirs.get("spent", 0.0))
        wrong = [
            f"{k} {theirs['settings'].get(k)!r} != {v!r}"
            for k, v in self.settings.items()
            if theirs["settings"].get(k) != v
        ]
        if wrong:
            raise ConfigError(
                f"--out {self.path} was begun with other settings ({'; '.join(wrong)}); use those or give another --out"
            )

    def _read_done(self) -> None:
        """Learn what is done; cut off a line that a kill left unfinished."""
        if not self.path.is_file():
            return
        good = 0
        with open(self.path, "rb+") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    key = record["key"]
                except (ValueError, KeyError, TypeError) as exc:
                    raise InputError(
                        f"{self.path} line {number} is broken; remove that line and run again"
                    ) from exc
                self.done.add(key)
                self._count(record)
                good += len(line)
            file.truncate(good)

    def _count(self, record: dict[str, Any]) -> None:
        facts = record.get("generation") or {}
        self.usage.update(facts.get("usage") or {})
        self.dearest = max(self.dearest, float((facts.get("usage") or {}).get("cost", 0.0)))
        self.providers.update(facts.get("providers") or [])
        self.finish_reasons.update(r for r in record.get("finish_reasons") or [] if r)
        self.with_ids += bool(record.get("sampled"))

    def add(self, record: dict[str, Any]) -> None:
        """Append a finished conversation: one write, synced now and then."""
        assert self._out is not None  # inside the with block
        self._out.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._out.flush()
        self.done.add(record["key"])
        self._count(record)
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._out.fileno())
            self._synced = time.monotonic()

    def fail(self, record: dict[str, Any]) -> None:
        """Append a failed conversation."""
        assert self._failed is not None  # inside the with block
        self._failed.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._failed.flush()

    def write_manifest(self, facts: dict[str, Any]) -> None:
        """Settings and totals, beside the file."""
        totals = {
            "conversations": len(self.done),
            "spent": round(self.spent, 6),
            "with_token_ids": self.with_ids,
            "usage": dict(sorted(self.usage.items())),
            "providers": dict(sorted(self.providers.items())),
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
        }
        write_json(
            self.manifest_path,
            {"kind": KIND, "version": __version__, "settings": self.settings, **totals, **facts},
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._out, self._failed):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        if self.failed_path.is_file() and not self.failed_path.stat().st_size:
            self.failed_path.unlink()
