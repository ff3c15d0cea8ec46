"""The disk guard: admission pauses while the store's file system is too full, says so, and goes on when there is room again."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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


class DiskGuard:
    """Admits a row only if the disk has room for it, for all that is on its way there, and for ``min_free``.

    Free space is measured by :meth:`look`, now and then; between two looks each admitted row is taken off what was
    there, so even a fast engine never admits more than fits. While there is no room, admission waits.
    """

    MIN_INODES = 64

    def __init__(self, folder: Path, min_free: int, on_its_way: Callable[[], int]) -> None:
        self.folder = folder
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
            need = self.min_free + self._on_its_way() + self._refused
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
