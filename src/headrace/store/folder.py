"""Where a store's bytes live: a local folder (memory-mapped) or an object store (ranged reads), behind one small seam."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any, Protocol

import xxhash

from headrace.errors import InputError, PreflightError, StoreError

SHARDS = "shards"
SUFFIX = ".safetensors"
INDEX = "index.parquet"
DATASET = "dataset.json"
# What files.atomic_write makes of a shard's name while it is being written.
_TEMPORARY = re.compile(r"^\.\d{20}-(?P<place>[^-]+)-(?P<pid>\d+)-\w+-\w+\.safetensors\.\d+\.\w+\.tmp$")


class Source(Protocol):
    """One immutable file, read by ranges."""

    name: str
    """For messages: a path or URL."""
    size: int

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start:stop``; fewer only past the end."""


class Folder(Protocol):
    """A store's folder."""

    name: str

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file, None when it is missing."""

    def shard_names(self) -> list[str]:
        """Names of the sealed shards, sorted."""

    def open_shard(self, name: str) -> Source:
        """Raises StoreError when it is gone."""


class MappedFile:
    """A local file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            # an empty file cannot be mapped; its size alone already tells that it is no shard
            self._view = (
                memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                if self.size
                else memoryview(b"")
            )

    def read(self, start: int, stop: int) -> memoryview:
        return self._view[start:stop]


class LocalFolder:
    """A store on a mounted file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def read_file(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def shard_names(self) -> list[str]:
        try:
            with os.scandir(self.path / SHARDS) as entries:
                return sorted(
                    e.name for e in entries if e.name.endswith(SUFFIX) and not e.name.startswith(".")
                )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def shard_path(self, name: str) -> Path:
        """Path of a shard."""
        return self.path / SHARDS / name

    def open_shard(self, name: str) -> Source:
        try:
            return MappedFile(self.shard_path(name))
        except FileNotFoundError:
            raise StoreError(
                f"{self.shard_path(name)} is gone since the store was opened; open it again"
            ) from None


class _RemoteFile:
    """An object, read by ranged requests."""

    def __init__(self, store: Any, path: str, url: str, size: int) -> None:
        self.name = url
        self.size = size
        self._store = store
        self._path = path

    def read(self, start: int, stop: int) -> memoryview:
        import obstore

        stop = min(stop, self.size)
        if stop <= start:
            return memoryview(b"")
        return memoryview(obstore.get_range(self._store, self._path, start=start, end=stop))


class RemoteFolder:
    """A store under a URL (``s3://bucket/run``, ``gs://…``, ``file:///…``), read through obstore."""

    def __init__(self, url: str, store: Any = None) -> None:
        self.name = url.rstrip("/")
        self._store = store if store is not None else _open_url(self.name)

    def read_file(self, name: str) -> bytes | None:
        import obstore

        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def shard_names(self) -> list[str]:
        import obstore

        names = [m["path"].split("/")[-1] for page in obstore.list(self._store, prefix=SHARDS) for m in page]
        return sorted(n for n in names if n.endswith(SUFFIX) and not n.startswith("."))

    def open_shard(self, name: str) -> Source:
        import obstore

        path = f"{SHARDS}/{name}"
        try:
            size = int(obstore.head(self._store, path)["size"])
        except FileNotFoundError:
            raise StoreError(
                f"{self.name}/{path} is gone since the store was opened; open it again"
            ) from None
        return _RemoteFile(self._store, path, f"{self.name}/{path}", size)


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """A local path or a URL as a Folder. Raises PreflightError when a URL needs an extra that is not installed."""
    text = os.fspath(path)
    return RemoteFolder(text) if "://" in text else LocalFolder(Path(text).expanduser())


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """``path`` as a local folder. Raises InputError for a URL: ``what`` can only be done in place."""
    if "://" in os.fspath(path):
        raise InputError(
            f"cannot {what} {os.fspath(path)}: only local stores can be changed; copy it to a folder first"
        )
    return Path(path).expanduser()


def _open_url(url: str) -> Any:
    try:
        from obstore.store import from_url
    except ImportError:
        raise PreflightError(f"reading {url} needs obstore; run: pip install 'headrace[remote]'") from None
    return from_url(url)


# --- names ------------------------------------------------------------------------------------------------------------


def place() -> str:
    """Host name plus a hash of boot and process namespace: equal only where process numbers mean the same processes."""
    words = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            words.append(Path(source).readlink().name if source.endswith("pid") else Path(source).read_text())
        except OSError:
            words.append("")
    host = re.sub(r"[^A-Za-z0-9]", "_", words[0])[:32] or "host"
    return f"{host}_{xxhash.xxh3_64_hexdigest(repr(words).encode())[:8]}"


def new_shard_name(sequence: int) -> str:
    """A name no other writer can choose; names sort by the time of sealing."""
    now = time.time_ns()
    stamp = (
        time.strftime("%Y%m%d%H%M%S", time.gmtime(now // 1_000_000_000)) + f"{now // 1000 % 1_000_000:06d}"
    )
    return f"{stamp}-{place()}-{os.getpid()}-{sequence:06d}-{secrets.token_hex(4)}{SUFFIX}"


def remove_leftovers(path: Path, older_than: float) -> list[str]:
    """Delete temporary shards of writers that are certainly dead, and of unknown ones older than ``older_than`` seconds.

    Certainly dead: named by this boot and process namespace, and its process is gone. Files of running writers, here or
    on other hosts, are never touched. Returns the names removed.
    """
    removed = []
    here, now = place(), time.time()
    for file in sorted([*(path / SHARDS).glob(".*.tmp"), *path.glob(".*.tmp")]):
        match = _TEMPORARY.match(file.name)
        try:
            dead = match is not None and match["place"] == here and not _alive(int(match["pid"]))
            if dead or now - file.stat().st_mtime > older_than:
                file.unlink()
                removed.append(file.name)
        except FileNotFoundError:  # another writer cleans up at the same moment
            continue
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
