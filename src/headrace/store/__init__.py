"""The store: terabytes of hidden states as immutable, checksummed shards that resume and read fast.

Names are loaded on first use, so that importing this package brings neither torch nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.store.encode import Parent
    from headrace.store.loader import Batch, PackedLoader, Placement, StoreDataset
    from headrace.store.reader import Entry, Store
    from headrace.store.writer import StoreWriter, WriterOptions

_WHERE = {
    "Batch": "loader",
    "Entry": "reader",
    "PackedLoader": "loader",
    "Parent": "encode",
    "Placement": "loader",
    "Store": "reader",
    "StoreDataset": "loader",
    "StoreWriter": "writer",
    "WriterOptions": "writer",
}

__all__ = [
    "Batch",
    "Entry",
    "PackedLoader",
    "Parent",
    "Placement",
    "Store",
    "StoreDataset",
    "StoreWriter",
    "WriterOptions",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
