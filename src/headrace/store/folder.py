"""Where a store's bytes live: a local folder (memory-mapped) or an object store (ranged requests), behind one small seam."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import xxhash

from headrace.errors import GoneError, StorageFullError, StoreError
from headrace.files import atomic_write, fsync_folder, write_through
from headrace.remote import is_url, tidy

if TYPE_CHECKING:
    from headrace.store.cache import Cache
    from headrace.store.codecs import Buffer

SHARDS = "shards"
SUFFIX = ".safetensors"
INDEX = "index.parquet"
DATASET = "dataset.json"
BROKEN = "broken"
EXPECTED_BYTES = 1 << 20
# What files.atomic_write makes of a shard's name while it is being written.
_TEMPORARY = re.compile(r"^\.\d{20}-(?P<place>[^-]+)-(?P<pid>\d+)-\w+-\w+\.safetensors\.\d+\.\w+\.tmp$")


class Source(Protocol):
    """One immutable file, read by ranges."""

    name: str
    """For messages: a path or URL."""
    size: int

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes ``start:stop``; fewer only past the end."""

    def expect(self, start: int, stop: int) -> None:
        """Say that these bytes will be read soon; returns at once. Without effect where nothing is gained."""


class Folder(Protocol):
    """A store's folder, to be read."""

    name: str
    remote: bool
    """Whether each read is a request over a network: then many are made at a time, and no more bytes than needed."""
    cache: Cache | None
    """Where what is read is kept on disk; None: nowhere."""

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file, None when it is missing."""

    def shard_names(self) -> list[str]:
        """Names of the sealed shards, sorted."""

    def open_shard(self, name: str) -> Source:
        """Raises GoneError when it is gone."""


class WritableFolder(Folder, Protocol):
    """A store's folder that can be changed.

    Whatever appears in it appears whole, and is durable when the call returns. Faults are StoreError; a full disk is
    StorageFullError.
    """

    def prepare(self) -> None:
        """Make the folder if it is not there."""

    def require_writable(self) -> None:
        """Raise StoreError when nothing can be written."""

    def create_file(self, name: str, data: bytes) -> bool:
        """Make a small file unless there is one of that name: of several writers the first wins. Whether it was this one."""

    def replace_file(self, name: str, data: bytes) -> None:
        """Write a small file over what is there."""

    def remove_file(self, name: str) -> None:
        """Delete a file, if it is there."""

    def put_shard(self, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write a shard of ``size`` bytes under a name that is not taken."""

    def set_aside(self, name: str) -> bool:
        """Move a file (path inside the folder) to ``broken/``; False when it is gone: another repair was faster."""

    def open_broken(self, name: str) -> Source:
        """A shard that was set aside."""

    def remove_leftovers(self, older_than: float) -> list[str]:
        """Delete what writers that are certainly dead left half-made, and unknown ones after ``older_than`` seconds."""


class MappedFile:
    """A local file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            # an empty file cannot be mapped; its size alone already tells that it is no shard
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
            self._view = memoryview(self._map if self._map is not None else b"")

    def read(self, start: int, stop: int) -> memoryview:
        return self._view[start:stop]

    def expect(self, start: int, stop: int) -> None:
        if self._map is None or not hasattr(mmap, "MADV_WILLNEED"):
            return
        # Otherwise each first touch of a page waits for the disk, with one read on its way at a time. In pieces: Linux
        # takes no more of a hint than it reads at a time, which depends on the disk.
        stop = min(stop, self.size)
        for at in range(start - start % mmap.PAGESIZE, stop, EXPECTED_BYTES):
            self._map.madvise(mmap.MADV_WILLNEED, at, min(EXPECTED_BYTES, stop - at))


class LocalFolder:
    """A store on a mounted file system."""

    remote = False
    cache: Cache | None = None

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
            raise GoneError(
                f"{self.shard_path(name)} is gone since the store was opened; open it again"
            ) from None

    # --- changing it ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        try:
            (self.path / SHARDS).mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise self._unmakeable(exc) from exc

    def require_writable(self) -> None:
        if not os.access(self.path / SHARDS, os.W_OK):
            raise StoreError(
                f"cannot write to {self.path / SHARDS}; make it writable or choose another folder"
            )

    def create_file(self, name: str, data: bytes) -> bool:
        temporary = self.path / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        made = True
        try:
            try:
                _write(temporary, data)
                # A hard link fails where the name is taken, a rename would replace a file that others have already read.
                os.link(temporary, self.path / name)
            except FileExistsError:
                made = False
            except OSError as exc:
                if exc.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                os.replace(temporary, self.path / name)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            fsync_folder(self.path)
        except StoreError:
            raise
        except OSError as exc:
            raise self._unmakeable(exc) from exc
        return made

    def _unmakeable(self, exc: OSError) -> StoreError:
        return StoreError(
            f"cannot make a store at {self.path} ({exc.strerror}); choose a folder that can be written"
        )

    def replace_file(self, name: str, data: bytes) -> None:
        _write(self.path / name, data)

    def remove_file(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def put_shard(self, name: str, buffers: Iterable[Buffer], size: int) -> None:
        try:
            with atomic_write(self.shard_path(name)) as file:
                write_through(file, buffers)
        except StorageFullError:
            raise
        except OSError as exc:
            raise StoreError(
                f"cannot write {self.shard_path(name)} ({exc.strerror}); check the disk, then run again"
            ) from exc

    def set_aside(self, name: str) -> bool:
        file, broken = self.path / name, self.path / BROKEN
        broken.mkdir(exist_ok=True)
        try:
            file.rename(broken / file.name)
        except FileNotFoundError:
            return False
        for folder in (file.parent, broken):
            fsync_folder(folder)
        return True

    def open_broken(self, name: str) -> Source:
        return MappedFile(self.path / BROKEN / name)

    def remove_leftovers(self, older_than: float) -> list[str]:
        return remove_leftovers(self.path, older_than)


def _write(path: Path, data: bytes) -> None:
    with atomic_write(path) as file:
        file.write(data)


def open_folder(place: str | os.PathLike[str] | WritableFolder, cache: Cache | None = None) -> WritableFolder:
    """A local path or a URL as a folder; a folder as it is. ``cache`` keeps on disk what is read of a URL's shards.

    Raises InputError for a URL that cannot be used, PreflightError when it needs an extra that is not installed.
    """
    if not isinstance(place, str | os.PathLike):
        return place
    text = tidy(place)
    if not is_url(text):
        return LocalFolder(Path(text).expanduser())
    from headrace.store.bucket import RemoteFolder

    return RemoteFolder(text, cache=cache)


def same_place(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    """Whether two paths or URLs name the same folder."""
    a, b = tidy(a), tidy(b)
    if is_url(a) or is_url(b):
        return a == b
    return Path(a).expanduser().resolve() == Path(b).expanduser().resolve()


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
