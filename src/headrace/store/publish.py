"""Putting shards and the index in their place: the only code that makes a store's large files."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.errors import CorruptError, StorageFullError, StoreError
from headrace.files import atomic_write
from headrace.store.build import ShardBuilder
from headrace.store.dataset import Dataset
from headrace.store.folder import INDEX, SHARDS, LocalFolder
from headrace.store.reader import load_index

log = logging.getLogger(__name__)


def write_shard(path: Path, name: str, builder: ShardBuilder) -> None:
    """Write a shard durably under its final name, straight from the encoded buffers.

    Raises StorageFullError, or StoreError for any other fault of the disk; the shard is then not there at all.
    """
    prefix, buffers = builder.layout()
    try:
        with atomic_write(path / SHARDS / name) as file:
            file.write(prefix)
            for buffer in buffers:
                file.write(buffer)
    except StorageFullError:
        raise
    except OSError as exc:
        raise StoreError(
            f"cannot write {path / SHARDS / name} ({exc.strerror}); check the disk, then run again"
        ) from exc


def write_index(path: Path, dataset: Dataset) -> None:
    """Bring ``index.parquet`` up to date. It is derived: when there is no room for it, or a shard has been damaged since,
    the store stays as it is without it."""
    try:
        data = load_index(LocalFolder(path), dataset).to_parquet()
        with atomic_write(path / INDEX) as file:
            file.write(data)
    except (StorageFullError, CorruptError) as exc:
        log.warning("the index of %s was not written: %s", path, exc)
