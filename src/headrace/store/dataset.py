"""``dataset.json``: what a store holds and how, written once when the store is made and never changed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from headrace._version import __version__
from headrace.errors import CorruptError, InputError, SpecMismatchError
from headrace.store.folder import DATASET, Folder, WritableFolder, open_folder
from headrace.store.format import FinalPositions
from headrace.types import CaptureSpec, hash_json

FORMAT = "headrace-store"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The content of ``dataset.json``."""

    spec: CaptureSpec
    codec: str
    final_positions: FinalPositions = "all"
    provenance: dict[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    version: str = __version__
    """Headrace version that made the store."""

    def to_json(self) -> dict[str, Any]:
        """The file's value; ``digest`` covers everything else in it."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "spec": self.spec.to_dict(),
            "codec": self.codec,
            "final_positions": self.final_positions,
            "provenance": self.provenance,
            "created": self.created,
            "headrace": self.version,
        }
        return {**value, "digest": hash_json(value)}

    @classmethod
    def parse(cls, data: bytes, name: str) -> Dataset:
        """Raises CorruptError naming the file for anything but what :meth:`to_json` gives."""
        mend = "restore it, or delete it and run headrace repair, which makes it again from the shards"
        try:
            value = json.loads(data)
            digest = value.pop("digest")
            found = hash_json(value)
        except (ValueError, AttributeError, KeyError) as exc:
            raise CorruptError(f"{name} is damaged ({type(exc).__name__}); {mend}") from exc
        if found != digest:
            raise CorruptError(f"{name} is damaged (digest {found}, expected {digest}); {mend}")
        if value["format"] != FORMAT or value["version"] != VERSION:
            raise InputError(
                f"{name} is {value['format']} version {value['version']}; this Headrace reads {FORMAT} version {VERSION}"
            )
        return cls(
            spec=CaptureSpec.from_dict(value["spec"]),
            codec=value["codec"],
            final_positions=value["final_positions"],
            provenance=value["provenance"],
            created=value["created"],
            version=value["headrace"],
        )

    def require_same(self, other: Dataset, name: str, *, any_taps: bool = False) -> None:
        """Raise SpecMismatchError unless what ``other`` writes may go into this store, which is called ``name``."""
        lines = [
            line for line in self.spec.differences(other.spec) if not (any_taps and line.startswith("taps:"))
        ]
        for key in ("codec", "final_positions"):
            if getattr(self, key) != getattr(other, key):
                lines.append(f"{key}: {getattr(self, key)!r} != {getattr(other, key)!r}")
        if lines:
            raise SpecMismatchError(
                f"{name} holds other states than these: {'; '.join(lines)}. Write to another folder, or capture what it holds"
            )


def read_dataset(folder: Folder) -> Dataset:
    """Read a store's ``dataset.json``. Raises InputError when the folder is no store, CorruptError when it is damaged."""
    data = folder.read_file(DATASET)
    if data is None:
        hint = (
            "run headrace repair, which makes it again from the shards"
            if folder.shard_names()
            else "give the folder that extract wrote"
        )
        raise InputError(f"{folder.name} is not a Headrace store (it has no {DATASET}); {hint}")
    return Dataset.parse(data, f"{folder.name}/{DATASET}")


def create_dataset(place: str | os.PathLike[str] | WritableFolder, dataset: Dataset) -> None:
    """Make the store's folders and its ``dataset.json``, unless another writer has just made it: the first one wins.

    Raises StoreError when the folder cannot be made or written.
    """
    folder = open_folder(place)
    folder.prepare()
    text = json.dumps(dataset.to_json(), indent=2, ensure_ascii=False) + "\n"
    folder.create_file(DATASET, text.encode())
