"""Shards of a bucket on the local disk: blocks of fixed size, least recently used first to go, shared by any number of processes.

A block is a file that appears whole, so processes need no lock to read and write; only making room takes one. Each block
ends in a checksum: one that the disk damaged counts as not there and is fetched again. What a block holds is proven once
more by the store's own checksums when it is used, as if there were no cache.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.errors import InputError
from headrace.files import FULL_ERRNOS
from headrace.store.folder import Source

log = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 20
"""Size of a block; neighbours that are missing are fetched in one request."""
MAX_FETCH = 32
"""Blocks fetched in one request at most."""
MAPPED = 64
"""Blocks a process keeps mapped, so that neighbouring reads need not prove them again."""
_TRAILER = struct.Struct("<QQ")  # size of the whole shard, xxh3 of data and size
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class Cache:
    """A cache folder and how much it may hold."""

    folder: Path
    limit: int
    """Bytes; at least 16 blocks. Each process may go over it by a 64th until it looks again."""

    def __post_init__(self) -> None:
        if self.limit < 16 * BLOCK_BYTES:
            raise InputError(f"a cache of {self.limit} bytes is too small; give at least {16 * BLOCK_BYTES}")


class CachedFile:
    """A shard of which the blocks read are kept on disk. ``fetch`` opens the object itself, when a block is missing."""

    def __init__(self, cache: Cache, url: str, fetch: Callable[[], Source]) -> None:
        self.name = url
        self._blocks = blocks_of(cache)
        self._id = xxhash.xxh3_128_hexdigest(url.encode())
        self._fetch = fetch
        self._source: Source | None = None
        first = self._blocks.get(self._id, 0)
        self.size = first[1] if first is not None else self._remote().size

    def _remote(self) -> Source:
        if self._source is None:
            self._source = self._fetch()
        return self._source

    def read(self, start: int, stop: int) -> memoryview:
        stop = min(stop, self.size)
        if stop <= start:
            return memoryview(b"")
        numbers = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        parts = list(self._read_blocks(numbers))
        parts[-1] = parts[-1][: stop - numbers[-1] * BLOCK_BYTES]
        parts[0] = parts[0][start - numbers[0] * BLOCK_BYTES :]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def expect(self, start: int, stop: int) -> None:
        """Nothing is asked for ahead: the threads that read wait side by side."""

    def _read_blocks(self, numbers: range) -> Iterator[memoryview]:
        missing: list[int] = []
        for number in numbers:
            found = self._blocks.get(self._id, number)
            if found is None or found[1] != self.size:
                missing.append(number)
                if len(missing) == MAX_FETCH:
                    yield from self._load(missing)
                    missing = []
                continue
            yield from self._load(missing)
            missing = []
            yield found[0]
        yield from self._load(missing)

    def _load(self, numbers: list[int]) -> Iterator[memoryview]:
        """Neighbouring blocks from the bucket, each put into the cache."""
        if not numbers:
            return
        first = numbers[0] * BLOCK_BYTES
        data = self._remote().read(first, min(self.size, (numbers[-1] + 1) * BLOCK_BYTES))
        for number in numbers:
            block = data[number * BLOCK_BYTES - first : (number + 1) * BLOCK_BYTES - first]
            self._blocks.put(self._id, number, block, self.size)
            yield block


_open: dict[Cache, Blocks] = {}
_open_lock = threading.Lock()


def blocks_of(cache: Cache) -> Blocks:
    """This process's view of a cache: one, however many shards read through it."""
    with _open_lock:
        if cache not in _open:
            _open[cache] = Blocks(cache)
        return _open[cache]


class Blocks:
    """The block files. Threads may share it, and processes the folder. Raises InputError when the folder cannot be made."""

    def __init__(self, cache: Cache) -> None:
        self.folder = cache.folder.expanduser()
        self.limit = cache.limit
        self._lock = threading.Lock()
        self._mapped: collections.OrderedDict[str, tuple[memoryview, int]] = collections.OrderedDict()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as exc:
            raise InputError(
                f"cannot make the cache folder {self.folder} ({exc.strerror}); choose another one"
            ) from exc
        self._written = self.limit  # the first block written measures what is there
        self._said = False

    def get(self, shard: str, number: int) -> tuple[memoryview, int] | None:
        """A block and the size of its shard; None when it is not here, or damaged."""
        name = f"{shard}-{number:06d}"
        with self._lock:
            found = self._mapped.get(name)
            if found is not None:
                self._mapped.move_to_end(name)
                return found
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            os.utime(path)  # the time of last use, whatever the mount options say of reading times
        except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
            return None
        except OSError as exc:
            self._say(f"the cache {self.folder} cannot be read ({exc.strerror}); going on without it")
            return None
        data, trailer = view[: -_TRAILER.size], view[-_TRAILER.size :]
        if len(view) <= _TRAILER.size or xxhash.xxh3_64_intdigest(view[:-8]) != _TRAILER.unpack(trailer)[1]:
            log.warning("block %s of the cache is damaged; it is fetched again", path)
            path.unlink(missing_ok=True)
            return None
        found = data, int(_TRAILER.unpack(trailer)[0])
        with self._lock:
            self._mapped[name] = found
            while len(self._mapped) > MAPPED:
                self._mapped.popitem(last=False)
        return found

    def put(self, shard: str, number: int, data: memoryview, size: int) -> None:
        """Keep a block. A full or broken disk costs the cache, not the read."""
        name = f"{shard}-{number:06d}"
        path = self._path(name)
        tmp = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        body = b"".join([data, size.to_bytes(8, "little")])
        try:
            self._make_room(len(body) + 8)
            path.parent.mkdir(exist_ok=True)
            with open(tmp, "xb") as file:
                file.write(body)
                file.write(xxhash.xxh3_64_intdigest(body).to_bytes(8, "little"))
            os.replace(tmp, path)  # not synced: a block lost in a power cut is fetched again
        except OSError as exc:
            with contextlib.suppress(OSError):
                tmp.unlink()
            kind = "is on a full disk" if exc.errno in FULL_ERRNOS else f"cannot be written ({exc.strerror})"
            self._say(f"the cache {self.folder} {kind}; what does not fit is read from the bucket each time")

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _say(self, message: str) -> None:
        if not self._said:
            self._said = True
            log.warning("%s", message)

    # --- making room ------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        """Count what this process writes; when it may have become too much, measure all and drop the oldest."""
        with self._lock:
            self._written += size
            if self._written <= self.limit // 64:
                return
            self._written = size
        with open(self.folder / "lock", "ab") as lock:
            # one makes room, the others wait: they would only find out the same, and write over the limit meanwhile
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._drop_oldest(self.limit * 7 // 8)

    def _drop_oldest(self, keep: int) -> None:
        now, total, blocks = time.time(), 0, []
        for folder in self.folder.iterdir():
            if not folder.is_dir():
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat()
                        if entry.name.startswith("."):  # being written, or left by a killed process
                            if now - stat.st_mtime > _STALE_SECONDS:
                                Path(entry.path).unlink(missing_ok=True)
                            continue
                        blocks.append((stat.st_mtime_ns, stat.st_size, entry.path))
                        total += stat.st_size
        if total <= keep + self.limit // 16:
            return
        blocks.sort()
        for _, size, path in blocks:
            if total <= keep:
                return
            Path(path).unlink(missing_ok=True)
            total -= size
