"""One TOML for a whole run: which keys are shared, and where each stage finds what the one before it wrote.

A recipe has three top-level keys (``model``, ``revision``, ``folder``) and a table for each stage. ``headrace run
recipe.toml`` runs all of it, ``headrace extract --config recipe.toml`` one stage of it; both read it through here, so a
stage run alone takes and writes the same places as in the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import read_toml
from headrace.errors import ConfigError

STAGES = ("prepare", "extract", "verify", "train", "evaluate", "export")
SHARED = ("model", "revision", "folder")


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe. Sections are checked by the schema of their command, not here."""

    path: Path
    model: str = ""
    revision: str = ""
    folder: Path | None = None
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a file. Raises ConfigError naming it and the key that is wrong."""
        document = read_toml(path)
        shared = {key: document.pop(key) for key in SHARED if key in document}
        for key, value in shared.items():
            if not isinstance(value, str):
                raise ConfigError(f"{path}: {key} must be a text")
        for key, value in document.items():
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: [{key}] must be a table, or {key} one of {list(SHARED)}")
        folder = shared.get("folder")
        return cls(
            path,
            shared.get("model", ""),
            shared.get("revision", ""),
            Path(folder) if folder else None,
            document,
        )

    def defaults(self, command: str, fields: set[str]) -> dict[str, Any]:
        """Values for the command's schema: its own table, the shared keys, and the places of the run's folder.

        Only names in ``fields`` (the schema's) are given, except those of the command's own table: a wrong one there
        must reach the schema and be refused.
        """
        values: dict[str, Any] = {"model": self.model, "revision": self.revision}
        values = {k: v for k, v in values.items() if v}
        if self.folder is not None:
            values |= self._places(command, self.folder)
        values = {k: v for k, v in values.items() if k in fields}
        return {**values, **self.sections.get(command.replace("-", "_"), {})}

    @staticmethod
    def _places(command: str, folder: Path) -> dict[str, Any]:
        rows, store, draft = folder / "rows", folder / "store", folder / "draft"
        places: dict[str, dict[str, Any]] = {
            "prepare": {"out": rows},
            "stats": {"rows": rows},
            "show": {"rows": rows},
            "plan": {"rows": rows, "out": store},
            "extract": {"rows": rows, "out": store},
            "verify": {"store": store, "rows": rows, "out": folder / "verify"},
            "train": {"store": store, "rows": rows, "out": draft},
            "evaluate": {"drafts": [draft], "out": folder / "evaluate"},
            "export": {"draft": draft, "out": folder / "export"},
        }
        return places.get(command, {})
