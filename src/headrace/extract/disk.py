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
    """Holds admission back while free space is below ``min_free`` plus what is on its way to disk."""

    MIN_INODES = 64

    def __init__(self, folder: Path, min_free: int, on_its_way: Callable[[], int]) -> None:
        self.folder = folder
        self.min_free = min_free
        self._on_its_way = on_its_way
        self._open = threading.Event()
        self._open.set()
        self._paused_at: float | None = None
        self.last = space(folder)

    def look(self) -> str | None:
        """Measure; returns the sentence to say when a pause has begun or ended. Called by the supervisor every moment."""
        self.last = space(self.folder)
        need = self.min_free + self._on_its_way()
        inodes_out = 0 <= self.last.inodes < self.MIN_INODES
        if self.last.free >= need and not inodes_out:
            if self._paused_at is None:
                return None
            self._paused_at = None
            self._open.set()
            return f"space again on {self.folder} ({gigabytes(self.last.free)} free); going on"
        if self._paused_at is not None:
            return None
        self._paused_at = time.monotonic()
        self._open.clear()
        why = f"{self.last.inodes} inodes" if inodes_out else f"{gigabytes(self.last.free)}"
        return f"paused: {why} left on the file system of {self.folder}, {gigabytes(need)} needed; free some and it goes on by itself"

    @property
    def paused(self) -> bool:
        """Whether admission is held back now."""
        return self._paused_at is not None

    @property
    def paused_seconds(self) -> float:
        """How long the present pause has lasted; 0 when there is none."""
        return 0.0 if self._paused_at is None else time.monotonic() - self._paused_at

    def wait(self, seconds: float) -> bool:
        """Block up to ``seconds`` while paused; True when admission may go on."""
        return self._open.wait(seconds)


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
