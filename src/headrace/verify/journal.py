"""What a verification has found so far, one line a capture, so that it can be stopped and go on, in parts of any size."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CorruptError, SpecMismatchError
from headrace.files import read_json, write_json
from headrace.verify.measure import Noise, TapError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of one re-extracted capture."""

    key: str
    tokens: int
    taps: dict[str, TapError]

    @property
    def failed(self) -> bool:
        """Whether any token of any tap is beyond the tolerance."""
        return any(tap.bad for tap in self.taps.values())


class Journal:
    """A folder with ``manifest.json`` (what is verified and how) and ``captures.jsonl`` (one record a line)."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        self.identity = identity
        self.records: dict[str, Record] = {}
        self.state: dict[str, Any] = {
            "checked": [],
            "scanned": [],
            "suspects": {},
            "broken": {},
            "noise": None,
            "meaning": None,
        }

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any]) -> Journal:
        """Open or create. ``identity`` names the store, spec, reference and options: another one refuses the folder.

        Raises SpecMismatchError when the folder belongs to another verification.
        """
        journal = cls(folder, identity)
        manifest = folder / "manifest.json"
        if not manifest.exists():
            folder.mkdir(parents=True, exist_ok=True)
            journal.save()
            return journal
        saved = read_json(manifest)
        if saved.get("identity") != identity:
            theirs = saved.get("identity") or {}
            names = sorted(k for k in {*identity, *theirs} if identity.get(k) != theirs.get(k))
            raise SpecMismatchError(
                f"{folder} holds another verification (it differs in {', '.join(names)}); give another --out or delete the folder"
            )
        journal.state = saved["state"]
        journal._load()
        return journal

    @property
    def noise(self) -> Noise | None:
        """The noise measured by an earlier run."""
        return None if self.state["noise"] is None else Noise(**self.state["noise"])

    def save(self, **state: Any) -> None:
        """Update and durably write the manifest."""
        self.state.update(state)
        write_json(
            self.folder / "manifest.json", {"format": FORMAT, "identity": self.identity, "state": self.state}
        )

    def add(self, records: list[Record]) -> None:
        """Durably append records."""
        if not records:
            return
        lines = "".join(json.dumps(asdict(r)) + "\n" for r in records)
        with open(self.folder / "captures.jsonl", "ab") as file:
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        self.records.update((r.key, r) for r in records)

    def _load(self) -> None:
        """Read the records; a last line cut by a kill is dropped from the file, a broken line before it is an error."""
        path = self.folder / "captures.jsonl"
        if not path.exists():
            return
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                value = json.loads(line)
                taps = {tap: TapError(**error) for tap, error in value["taps"].items()}
                self.records[value["key"]] = Record(value["key"], value["tokens"], taps)
            except (ValueError, KeyError, TypeError) as exc:
                raise CorruptError(
                    f"{path} line {number} is broken ({exc}); delete the folder {self.folder} and verify again"
                ) from exc
