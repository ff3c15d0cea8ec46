"""Where an extraction keeps its own records: a folder ``extract`` inside the store, found again from any path the user names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import InputError


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of the extraction that fills ``store``."""

    store: Path

    @property
    def folder(self) -> Path:
        """Holds everything below."""
        return self.store / "extract"

    @property
    def manifest(self) -> Path:
        """JSON: config, spec, engine, and one entry a session (start to end of one process)."""
        return self.folder / "manifest.json"

    @property
    def events(self) -> Path:
        """JSON lines: what happened, and a snapshot every few seconds; rotated."""
        return self.folder / "events.jsonl"

    @property
    def failures(self) -> Path:
        """JSON lines: rows that gave no capture, with the reason."""
        return self.folder / "failures.jsonl"

    @property
    def lock(self) -> Path:
        """JSON: the process that is filling the store, if one is."""
        return self.folder / "lock.json"

    @classmethod
    def find(cls, path: Path) -> RunFiles:
        """The run at ``path``: a store, a run folder with a ``store`` in it, or the records folder itself.

        Raises InputError when no extraction was ever started there.
        """
        for candidate in (path, path / "store", path.parent if path.name == "extract" else path):
            files = cls(candidate)
            if files.manifest.is_file():
                return files
        raise InputError(
            f"{path} holds no extraction (no extract/manifest.json in it); give the folder named by --out"
        )
