"""What the user named → the list of things to read, in a fixed order, with weights and limits.

A source is ``PATH`` or ``hf://DATASET`` with an optional ``?weight=0.5&limit=1000&head=100`` behind it:

- ``weight``: the share (0 to 1] of the source's conversations to keep, chosen by hash. More than 1 is refused: a row
  is stored once; what shall weigh more is repeated in training.
- ``limit``: keep at most so many rows of it, an unbiased sample. The whole source is read.
- ``head``: read its first records only. Fast, and as biased as the file's order.

A folder is every file in it whose name tells a known kind, sorted by path; weight, limit and head hold for all of it.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.data.readers import CHUNK_RECORDS, Chunk, arrow_chunk, file_kind, read_file
from headrace.errors import ConfigError, InputError

HUB = "hf://"
_CHOICES = {"weight", "limit", "head"}
_DATASET_CHOICES = {"split", "name", "revision"}


@dataclass(frozen=True)
class Group:
    """One source as the user named it."""

    spec: str
    path: str
    weight: float = 1.0
    limit: int = 0
    head: int = 0
    options: tuple[tuple[str, str], ...] = ()
    """split, name and revision of a dataset."""

    @property
    def is_dataset(self) -> bool:
        """Read through ``datasets``."""
        return self.path.startswith(HUB)


@dataclass(frozen=True)
class Source:
    """One file or dataset to read; ``index`` is its place in the order of reading."""

    index: int
    group: int
    name: str
    """As shown to people and kept with rows."""
    path: Path | None
    """None for a dataset."""
    size: int = 0
    """Bytes on disk, 0 if unknown."""


@dataclass(frozen=True)
class Sources:
    """Everything to read."""

    groups: tuple[Group, ...]
    items: tuple[Source, ...]
    ignored: tuple[str, ...] = ()
    """Files in folders that are of no known kind."""

    @property
    def size(self) -> int:
        """Bytes on disk of everything, 0 when some of it is not on disk."""
        return sum(item.size for item in self.items) if all(item.size for item in self.items) else 0

    def bytes_before(self, chunk: Chunk) -> int:
        """Bytes on disk read when ``chunk`` was, about."""
        return sum(item.size for item in self.items[: chunk.source]) + chunk.position

    def chunks(self, start: tuple[int, int] = (0, 0)) -> Iterator[Chunk]:
        """All chunks in order, from record ``start[1]`` (counted from 0) of source ``start[0]`` on."""
        left: list[int | None] = [group.head or None for group in self.groups]
        for item in self.items:
            limit = left[item.group]
            if limit == 0 or (limit is None and item.index < start[0]):
                continue
            for chunk in self._read(item):
                if limit is not None:
                    chunk = chunk.part(0, limit)
                    limit -= len(chunk)
                if item.index == start[0]:
                    chunk = chunk.part(start[1] - chunk.first, len(chunk))
                if item.index >= start[0] and len(chunk):
                    yield chunk
                if limit == 0:
                    break
            left[item.group] = limit

    def _read(self, item: Source) -> Iterator[Chunk]:
        if item.path is not None:
            return read_file(item.path, item.index, item.name)
        return _read_dataset(self.groups[item.group], item)


def find_sources(specs: Sequence[str]) -> Sources:
    """Parse and expand what the user named. Raises ConfigError for a wrong option, InputError for what is not there."""
    groups: list[Group] = []
    items: list[Source] = []
    ignored: list[str] = []
    for spec in specs:
        group = parse_source(spec)
        files: Sequence[Path | None] = [None]
        if not group.is_dataset:
            files, other = _expand(group)
            ignored += other
        for path in files:
            size = path.stat().st_size if path is not None else 0
            items.append(
                Source(len(items), len(groups), group.path if path is None else str(path), path, size)
            )
        groups.append(group)
    return Sources(tuple(groups), tuple(items), tuple(ignored))


def parse_source(spec: str) -> Group:
    """One source with its options. Raises ConfigError naming the option that is wrong."""
    path, _, query = spec.partition("?")
    if not query or Path(spec).exists():
        return Group(spec, spec.removesuffix("?"))
    values = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    known = _CHOICES | (_DATASET_CHOICES if path.startswith(HUB) else set())
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"source {spec}: {unknown[0]} is not one of {sorted(known)}")
    try:
        weight = float(values.pop("weight", 1.0))
        limit, head = int(values.pop("limit", 0)), int(values.pop("head", 0))
    except ValueError as exc:
        raise ConfigError(f"source {spec}: weight, limit and head are numbers ({exc})") from exc
    if not 0 < weight <= 1:
        raise ConfigError(
            f"source {spec}: weight is the share to keep, above 0 and at most 1; a row is stored once"
        )
    if limit < 0 or head < 0:
        raise ConfigError(f"source {spec}: limit and head are not negative")
    return Group(spec, path, weight, limit, head, tuple(sorted(values.items())))


def _expand(group: Group) -> tuple[list[Path], list[str]]:
    """The files of a path, and those in the folder that are left out."""
    path = Path(group.path).expanduser()
    if path.is_file():
        if file_kind(path) is None:
            raise InputError(
                f"{path}: its name tells no known kind; use .jsonl, .json or .parquet (also with .gz or .zst)"
            )
        return [path], []
    if not path.is_dir():
        raise InputError(f"{path} does not exist; check the path (datasets are written {HUB}NAME)")
    for mark, mend in (
        ("dataset_info.json", f"write {HUB}{path}"),
        ("dataset_dict.json", f"write {HUB}{path}?split=train"),
    ):
        if (path / mark).is_file():
            raise InputError(f"{path} is a saved dataset; {mend}")
    if (path / "manifest.json").is_file() and (path / "train.parquet").is_file():
        raise InputError(f"{path} is a row folder already; use headrace merge")
    visible = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
    files = [p for p in visible if file_kind(p)]
    if not files:
        raise InputError(f"{path} holds no .jsonl, .json or .parquet file; check the path")
    return files, [str(p) for p in visible if not file_kind(p)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


# --- datasets -----------------------------------------------------------------------------------------------------


def _read_dataset(group: Group, item: Source) -> Iterator[Chunk]:
    first = 0
    for table in open_dataset(group).with_format("arrow").iter(batch_size=CHUNK_RECORDS):
        yield arrow_chunk(item.index, first, table)
        first += table.num_rows


def open_dataset(group: Group) -> Any:
    """The dataset of a ``hf://`` source, streaming where it can. Raises ConfigError or InputError with the mend."""
    try:
        import datasets
    except ImportError as exc:
        raise ConfigError(f"{group.spec} needs the datasets package; pip install 'headrace[data]'") from exc
    name, options = group.path.removeprefix(HUB), dict(group.options)
    saved = Path(name)
    try:
        if (saved / "dataset_info.json").is_file() or (saved / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(
                name,
                options.get("name"),
                revision=options.get("revision"),
                split=options.get("split"),
                streaming=True,
            )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as exc:
        raise InputError(
            f"dataset {name} cannot be opened ({_first_line(exc)}); check name, split and network"
        ) from exc
    if isinstance(found, dict):
        split = options.get("split")
        if split not in found:
            raise InputError(
                f"dataset {name} has splits {sorted(found)}; choose one: {HUB}{name}?split={next(iter(found))}"
            )
        return found[split]
    return found


def dataset_identity(group: Group) -> str:
    """What tells one content of a dataset from another; ``""`` when nothing does (it is then read anew each time)."""
    import datasets

    found = open_dataset(group)
    if isinstance(found, datasets.Dataset):
        return str(found._fingerprint)
    name, options = group.path.removeprefix(HUB), dict(group.options)
    builder = datasets.load_dataset_builder(name, options.get("name"), revision=options.get("revision"))
    files = builder.config.data_files or {}
    return "|".join(f"{split}:{part.origin_metadata}" for split, part in sorted(files.items()))


def _first_line(exc: Exception) -> str:
    return str(exc).splitlines()[0] if str(exc) else type(exc).__name__
