"""The layout of vLLM's speculators: ``hidden_states/hs_N.safetensors`` beside an Arrow dataset of ids and loss masks.

A file holds hidden_states [T, K+1, H], the last one the output of the last layer before the final norm, and token_ids [T].
The dataset is what ``datasets.save_to_disk`` writes; row N belongs to file N. Read in the sources:
``speculators/data_generation/offline.py`` and ``speculators/train/data.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.errors import InputError
from headrace.files import atomic_write, write_json
from headrace.store.foreign.base import ForeignLayout, Sample, natural, vector
from headrace.store.format import Array

_ARROW = "data-00000-of-00001.arrow"
_ROWS = 1024
"""Rows of an Arrow batch."""


class Speculators(ForeignLayout):
    """Its trainer applies the final norm to the last state itself."""

    name = "speculators"
    final_normed = False

    def __init__(self) -> None:
        self._tables: dict[Path, Any] = {}

    def find(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("hs_*.safetensors"), key=natural)

    def read(self, folder: Path, path: Path) -> Sample:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                missing = {"hidden_states", "token_ids"} - set(file.keys())
                if missing:
                    raise InputError(f"{path} has no tensor {sorted(missing)}")
                hidden, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
        except (SafetensorError, OSError) as exc:
            raise InputError(f"{path} cannot be read as safetensors ({exc})") from exc
        if hidden.dim() != 3 or len(hidden) != ids.numel():
            raise InputError(
                f"{path}: hidden_states {list(hidden.shape)} do not fit token_ids {list(ids.shape)}"
            )
        layers = [layer.contiguous() for layer in hidden.unbind(1)]
        token_ids = vector(path, ids, "token_ids", np.int32)
        mask = self._mask(folder, path, token_ids)
        return Sample(path.stem.removeprefix("hs_"), layers[:-1], layers[-1], token_ids, mask)

    def _mask(self, folder: Path, path: Path, ids: Array) -> Array | None:
        """The loss mask that the Arrow dataset has for a file, if there is one. Raises InputError when its ids are others."""
        home = folder if (folder / "state.json").exists() else folder.parent
        if home not in self._tables:
            self._tables[home] = _dataset(home)
        table = self._tables[home]
        if table is None:
            return None
        number = path.stem.removeprefix("hs_")
        if not number.isdigit() or int(number) >= table.num_rows:
            raise InputError(f"{path} has no row in the dataset of {table.num_rows} rows beside it")
        row = table.slice(int(number), 1)
        expected = np.array(row.column("input_ids")[0].as_py(), np.int32)
        if not np.array_equal(expected, ids):
            raise InputError(
                f"{path} holds other token ids than row {number} of the dataset beside it; the dataset has changed since"
            )
        return np.array(row.column("loss_mask")[0].as_py(), bool)

    def place(self, folder: Path, number: int, key: str) -> Path:
        return folder / "hidden_states" / f"hs_{number}.safetensors"

    def write(self, folder: Path, number: int, key: str, sample: Sample) -> None:
        from safetensors.torch import save

        assert sample.ids is not None
        path = self.place(folder, number, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            "hidden_states": torch.stack([*sample.aux, sample.final], dim=1),
            "token_ids": torch.from_numpy(sample.ids.astype(np.int64)),
        }
        with atomic_write(path) as file:
            file.write(save(tensors))

    def finish(self, folder: Path, rows: Iterator[tuple[Array, Array]]) -> None:
        import pyarrow as pa

        schema = pa.schema(
            [
                ("input_ids", pa.list_(pa.int64())),
                ("loss_mask", pa.list_(pa.int64())),
                ("seq_len", pa.int64()),
            ]
        )
        with atomic_write(folder / _ARROW) as file, pa.ipc.new_stream(file, schema) as writer:
            batch: list[dict[str, Any]] = []
            for ids, mask in rows:
                batch.append({"input_ids": ids, "loss_mask": mask.astype(np.int64), "seq_len": len(ids)})
                if len(batch) == _ROWS:
                    writer.write_table(pa.Table.from_pylist(batch, schema))
                    batch = []
            writer.write_table(pa.Table.from_pylist(batch, schema))
        _describe(folder)


def _describe(folder: Path) -> None:
    """The two JSON files by which ``datasets.load_from_disk`` knows an Arrow file."""

    def sequence(dtype: str) -> dict[str, Any]:
        return {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}

    features = {
        "input_ids": sequence("int64"),
        "loss_mask": sequence("int64"),
        "seq_len": {"dtype": "int64", "_type": "Value"},
    }
    write_json(folder / "dataset_info.json", {"features": features})
    write_json(
        folder / "state.json",
        {
            "_data_files": [{"filename": _ARROW}],
            "_fingerprint": "headrace",
            "_format_columns": ["input_ids", "loss_mask", "seq_len"],
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        },
    )


def _dataset(folder: Path) -> Any:
    """The Arrow files of a ``save_to_disk`` folder as one memory-mapped table, None when there are none."""
    import pyarrow as pa

    state = folder / "state.json"
    if not state.exists():
        return None
    try:
        names = [item["filename"] for item in json.loads(state.read_text())["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
        return pa.concat_tables(tables).select(["input_ids", "loss_mask"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as exc:
        raise InputError(
            f"{folder} looks like a saved dataset but cannot be read ({type(exc).__name__}: {exc})"
        ) from exc
