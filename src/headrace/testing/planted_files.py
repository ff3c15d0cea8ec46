"""Stores on disk with or without a planted fault: any states with true checksums, and faults of files and of membership."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.bits import bits_of
from headrace.files import atomic_write
from headrace.store import Store
from headrace.store.build import ShardBuilder
from headrace.store.codecs import chunk_rows, open_codec
from headrace.store.dataset import Dataset, create_dataset
from headrace.store.encode import encode_capture
from headrace.store.folder import INDEX, SHARDS, new_shard_name
from headrace.testing.planted import Ground, Plant
from headrace.types import CaptureSpec, Row


def write_store(
    path: Path,
    spec: CaptureSpec,
    captures: Sequence[tuple[Row, torch.Tensor]],
    *,
    codec: str = "bf16-planes",
    shards: int = 3,
) -> None:
    """Write a sound store of whatever it is given: no check at the door, true checksums, keys as the rows say."""
    codec = codec if spec.dtype == "bfloat16" or codec != "bf16-planes" else "raw"
    create_dataset(path, Dataset(spec=spec, codec=codec))
    encoder, rows = open_codec(codec, spec.dtype), chunk_rows(spec.hidden_size)
    for number in range(shards):
        builder = ShardBuilder(spec, encoder, rows, "all", {})
        for row, states in captures[number::shards]:
            builder.append(encode_capture(row, bits_of(states), spec, encoder, chunk_rows=rows, policy="all"))
        prefix, buffers = builder.layout()
        with atomic_write(path / SHARDS / new_shard_name(number)) as file:
            file.write(prefix)
            for buffer in buffers:
                file.write(buffer)
    with atomic_write(path / INDEX) as file:
        file.write(Store.open(path).index.to_parquet())


@dataclass(frozen=True)
class FilePlant:
    """One planted fault of a store's files or of who is in it."""

    name: str
    codes: tuple[str, ...]
    write: Callable[[Ground, Path, np.random.Generator], None]


def _pairs(ground: Ground) -> list[tuple[Row, torch.Tensor]]:
    return [(row, ground.states[row.key]) for row in ground.rows]


def _with_file(
    spoil: Callable[[Path, np.random.Generator], None],
) -> Callable[[Ground, Path, np.random.Generator], None]:
    """Write a good store, then spoil one shard file."""

    def write(ground: Ground, path: Path, rng: np.random.Generator) -> None:
        write_store(path, ground.spec, _pairs(ground))
        shards = sorted((path / SHARDS).iterdir())
        spoil(shards[int(rng.integers(len(shards)))], rng)

    return write


def _flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(bytes(data))


def _flip_state(file: Path, rng: np.random.Generator) -> None:
    size = file.stat().st_size
    _flip(file, int(rng.integers(size // 2, size)))


def _flip_header(file: Path, rng: np.random.Generator) -> None:
    _flip(file, 100)


def _truncate(file: Path, rng: np.random.Generator) -> None:
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1000)


def _zero_page(file: Path, rng: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    middle = len(data) * 3 // 4
    data[middle : middle + 4096] = bytes(min(4096, len(data) - middle))
    file.write_bytes(bytes(data))


def _remove(file: Path, rng: np.random.Generator) -> None:
    file.unlink()


def _replace_shard(ground: Ground, path: Path, rng: np.random.Generator) -> None:
    """A shard of another run under the name that the index knows."""
    write_store(path, ground.spec, _pairs(ground))
    write_store(path.with_name(path.name + ".other"), ground.spec, _pairs(ground)[:3], shards=1)
    (other,) = (path.with_name(path.name + ".other") / SHARDS).iterdir()
    sorted((path / SHARDS).iterdir())[1].write_bytes(other.read_bytes())


def _capture_missing(ground: Ground, path: Path, rng: np.random.Generator) -> None:
    pairs = _pairs(ground)
    del pairs[int(rng.integers(len(pairs)))]
    write_store(path, ground.spec, pairs)


def _capture_foreign(ground: Ground, path: Path, rng: np.random.Generator) -> None:
    ids = rng.permutation(ground.rows[0].ids)
    row = Row.make(ids, np.ones(len(ids), dtype=bool))
    write_store(path, ground.spec, [*_pairs(ground), (row, ground.stack(ground.compute(ids)))])


def _capture_twice(ground: Ground, path: Path, rng: np.random.Generator) -> None:
    """Two writers both sealed one row: its place in the order puts the copy into another shard."""
    pairs = _pairs(ground)
    write_store(
        path, ground.spec, [*pairs, *pairs[1:2]] if len(pairs) % 3 != 1 else [*pairs, pairs[0], pairs[1]]
    )


def _ids_changed(ground: Ground, path: Path, rng: np.random.Generator) -> None:
    pairs = _pairs(ground)
    row, states = pairs[0]
    ids = row.ids.copy()
    ids[5] += 1
    write_store(path, ground.spec, [(Row(ids, row.mask, row.key), states), *pairs[1:]])


def _mask_changed(ground: Ground, path: Path, rng: np.random.Generator) -> None:
    pairs = _pairs(ground)
    row, states = pairs[0]
    write_store(path, ground.spec, [(Row(row.ids, ~row.mask, row.key), states), *pairs[1:]])


def _other_target(ground: Ground, path: Path, rng: np.random.Generator) -> None:
    spec = dataclasses.replace(ground.spec, config_hash="0123456789abcdef")
    write_store(path, spec, _pairs(ground))


FILES: tuple[FilePlant, ...] = (
    FilePlant("a bit of a state flipped", ("checksum",), _with_file(_flip_state)),
    FilePlant("a bit of a shard's header flipped", ("checksum",), _with_file(_flip_header)),
    FilePlant("a page of a shard zero", ("checksum",), _with_file(_zero_page)),
    FilePlant("a shard cut off", ("shard-truncated",), _with_file(_truncate)),
    FilePlant("a shard gone", ("rows-missing", "shard-missing"), _with_file(_remove)),
    FilePlant("a shard of another run under its name", ("index-mismatch", "shard-truncated"), _replace_shard),
    FilePlant("a capture missing", ("rows-missing",), _capture_missing),
    FilePlant("a capture of no row", ("foreign-captures",), _capture_foreign),
    FilePlant("a capture stored twice", ("duplicate-key",), _capture_twice),
    FilePlant("a token id changed", ("ids-differ",), _ids_changed),
    FilePlant("a loss mask inverted", ("mask-differs",), _mask_changed),
    FilePlant("made for another target", ("spec-mismatch",), _other_target),
)


def write_planted(plant: Plant | FilePlant, ground: Ground, path: Path, seed: int) -> None:
    """Write a store with one planted fault."""
    rng = np.random.default_rng(seed)
    if isinstance(plant, FilePlant):
        plant.write(ground, path, rng)
        return
    states = plant.change(ground, rng)
    write_store(path, ground.spec, [(row, states[row.key]) for row in ground.rows])
