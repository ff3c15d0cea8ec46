"""The disk guard: admission pauses while the store's file system is too full, says so, and goes on when there is room again."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import StoreError
from headrace.remote import is_url
from headrace.store.bucket import RemoteFolder
from headrace.store.folder import SHARDS


@dataclass(frozen=True, slots=True)
class Space:
    """What a file system has left."""

    free: int
    """Bytes available to this user."""
    total: int
    inodes: int
    """Files that can still be made; -1 where the file system does not count them."""


def space(path: Path) -> Space:
    """Free space of the file system that ``path`` (or its nearest existing parent) is on."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    stat = os.statvfs(path)
    return Space(usage.free, usage.total, stat.f_favail if stat.f_files else -1)


class FolderSize:
    """Bytes of the files in a folder whose files never change: each is looked at once, so asking again is cheap."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}

    def measure(self) -> int:
        """The sum now; names that begin with a dot are on their way and do not count."""
        try:
            with os.scandir(self.folder) as entries:
                names = {entry.name: entry for entry in entries if not entry.name.startswith(".")}
        except FileNotFoundError:
            return 0
        self._sizes = {name: self._sizes.get(name) or entry.stat().st_size for name, entry in names.items()}
        return sum(self._sizes.values())


class BucketSize:
    """Bytes of the shards under a URL, asked for once a minute; what it was, while the bucket does not answer."""

    SECONDS = 60.0

    def __init__(self, url: str) -> None:
        self._folder = RemoteFolder(url, retry={"max_retries": 0})
        self._asked = -self.SECONDS
        self._bytes = 0

    def measure(self) -> int:
        """The sum, at most a minute old."""
        if time.monotonic() - self._asked >= self.SECONDS:
            self._asked = time.monotonic()
            with contextlib.suppress(StoreError):
                self._bytes = self._folder.shard_bytes()
        return self._bytes


def stored_size(place: str) -> FolderSize | BucketSize:
    """What measures the store at ``place``."""
    return BucketSize(place) if is_url(place) else FolderSize(Path(place) / SHARDS)


class DiskGuard:
    """Admits a row only if the disk has room for it, for all that is on its way there, and for ``min_free``.

    Free space is measured by :meth:`look`, now and then; between two looks each admitted row is taken off what was
    there, so even a fast engine never admits more than fits. While there is no room, admission waits.
    """

    MIN_INODES = 64

    def __init__(
        self, folder: Path, min_free: int, on_its_way: Callable[[], int], *, holds_states: bool = True
    ) -> None:
        """``holds_states`` is false when the states go elsewhere: then ``folder`` has only to keep ``min_free``."""
        self.folder = folder
        self.holds_states = holds_states
        self.min_free = min_free
        self._on_its_way = on_its_way
        self._lock = threading.Lock()
        self._allowance = 0
        """Bytes that may still be admitted before the next look."""
        self._refused = 0
        """Size of the row that found no room since the last look."""
        self._paused_at: float | None = None
        self.last = space(folder)

    def take(self, size: int) -> bool:
        """Admit a row of ``size`` bytes if there is room. Called by the engine's thread."""
        size = size if self.holds_states else 0
        with self._lock:
            if self._paused_at is None and size <= self._allowance:
                self._allowance -= size
                return True
            self._refused = size
            return False

    def look(self) -> str | None:
        """Measure; returns the sentence to say when a pause has begun or ended. Called by the supervisor."""
        self.last = space(self.folder)
        with self._lock:
            need = self.min_free
            if self.holds_states:
                need += self._on_its_way() + self._refused
            self._allowance = self.last.free - need + self._refused
            self._refused = 0
            inodes_out = 0 <= self.last.inodes < self.MIN_INODES
            full = self.last.free < need or inodes_out
            if full == (self._paused_at is not None):
                return None
            self._paused_at = time.monotonic() if full else None
        if not full:
            return f"space again on the file system of {self.folder} ({gigabytes(self.last.free)} free); going on"
        left = f"{self.last.inodes} inodes" if inodes_out else gigabytes(self.last.free)
        return (
            f"paused: {left} left on the file system of {self.folder}, {gigabytes(need)} needed; "
            "free some and it goes on by itself"
        )

    @property
    def paused(self) -> bool:
        """Whether admission is held back now."""
        return self._paused_at is not None

    @property
    def paused_seconds(self) -> float:
        """How long the present pause has lasted; 0 when there is none."""
        return 0.0 if self._paused_at is None else time.monotonic() - self._paused_at


def gigabytes(count: float) -> str:
    """A byte count for people: ``5.03 TB``, ``812 GB``, ``64.0 MB`` (powers of ten, as disks are sold)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            value = count / size
            return (
                f"{value:.2f} {unit}"
                if value < 10
                else f"{value:.1f} {unit}"
                if value < 100
                else f"{value:.0f} {unit}"
            )
    return f"{count:.0f} B"
