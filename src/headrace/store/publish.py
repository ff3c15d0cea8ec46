"""Putting shards and the index in their place: the only code that makes a store's large files."""

from __future__ import annotations

import itertools
import logging
import os

from headrace.errors import CorruptError, StorageFullError
from headrace.store.build import ShardBuilder
from headrace.store.dataset import Dataset
from headrace.store.folder import INDEX, WritableFolder, open_folder
from headrace.store.reader import load_index

log = logging.getLogger(__name__)


def write_shard(place: str | os.PathLike[str] | WritableFolder, name: str, builder: ShardBuilder) -> None:
    """Write a shard durably under its final name, straight from the encoded buffers.

    Raises StorageFullError, or StoreError for any other fault; the shard is then not there at all.
    """
    prefix, buffers = builder.layout()
    size = len(prefix) + sum(sum(tap.sizes) for capture in builder.captures for tap in capture.taps)
    open_folder(place).put_shard(name, itertools.chain([prefix], buffers), size)


def write_index(folder: WritableFolder, dataset: Dataset) -> None:
    """Bring ``index.parquet`` up to date. It is derived: when there is no room for it, or a shard has been damaged since,
    the store stays as it is without it."""
    try:
        folder.replace_file(INDEX, load_index(folder, dataset).to_parquet())
    except (StorageFullError, CorruptError) as exc:
        log.warning("the index of %s was not written: %s", folder.name, exc)
