"""The staging folder as one scheduler process sees it: its own part, its budget, and what dead servers left behind.

    STAGING/RUN.RANK/alive        locked (flock) as long as the process lives; the kernel unlocks it however it dies
    STAGING/RUN.RANK/*.part       captures being written
    STAGING/RUN.RANK/OWNER-N.safetensors   finished captures; a client deletes the file, and that releases its bytes

Nothing is ever deleted outside the own folder but folders of dead servers, told by their unlocked ``alive`` file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

_LOG = logging.getLogger(__name__)
_ALIVE = "alive"
_SWEEP_S = 0.1


@dataclass
class _Finished:
    size: int
    since: float


class Staging:
    """Bounded storage for captures. Used by the scheduler thread alone."""

    def __init__(self, root: Path, name: str, limit: int, *, stall_s: float, keep_s: float) -> None:
        """Take ``root/name``. Raises OSError when the folder cannot be made, locked or written."""
        self.root, self.limit = root, limit
        self.folder = root / name
        self.reserved = 0
        """Bytes promised to captures in the making and held by finished ones."""
        self._stall_s, self._keep_s = stall_s, keep_s
        self._finished: dict[Path, _Finished] = {}
        self._stalled = False
        self._swept = 0.0
        self._count = 0
        root.mkdir(parents=True, exist_ok=True)
        reclaim_dead(root)
        self.folder.mkdir(mode=0o700)
        self._lock = lock_alive(self.folder / _ALIVE)

    def new_path(self, owner: str) -> Path:
        """A name that was never used before in this staging folder."""
        self._count += 1
        return self.folder / f"{owner}-{self._count}.safetensors"

    def reserve(self, size: int) -> bool:
        """Promise ``size`` bytes. A full folder is waited for once, at most ``stall_s``; while it stays full, not again."""
        deadline = time.monotonic() + self._stall_s
        while self.reserved + size > self.limit:
            if not self._sweep() and self.reserved + size > self.limit:
                if self._stalled or time.monotonic() > deadline:
                    self._stalled = True
                    return False
                time.sleep(0.005)
        self.reserved += size
        return True

    def release(self, size: int) -> None:
        """Take back a promise whose file is not there."""
        self.reserved -= size
        self._stalled = False

    def finish(self, path: Path, size: int) -> None:
        """A promised file is in place and announced; its bytes come back when the client deletes it."""
        self._finished[path] = _Finished(size, time.monotonic())

    def _sweep(self) -> bool:
        """Count in the files that clients have deleted, and delete what nobody took for long; whether anything came free."""
        now, freed = time.monotonic(), False
        self._swept = now
        for path, entry in list(self._finished.items()):
            if path.exists():
                if now - entry.since < self._keep_s:
                    continue
                _LOG.warning(
                    "headrace: %s was not taken for %.0f s and is deleted to make room",
                    path,
                    now - entry.since,
                )
                path.unlink(missing_ok=True)
            del self._finished[path]
            self.release(entry.size)
            freed = True
        return freed

    def used(self) -> int:
        """Bytes of the budget in use, as of a moment ago."""
        if time.monotonic() - self._swept > _SWEEP_S:
            self._sweep()
        return self.reserved

    def close(self) -> None:
        """Delete the own folder and let go of it; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def lock_alive(path: Path) -> int:
    """Make the file ``path``, locked from the moment it has its name; returns the descriptor that holds the lock."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fresh.rename(path)
    return descriptor


def reclaim_dead(root: Path) -> list[Path]:
    """Delete what dead processes left in ``root``: folders whose ``alive`` file nobody locks. Returns what was deleted.

    A folder without that file is not ours and is not touched.
    """
    deleted: list[Path] = []
    for alive in root.glob(f"*/{_ALIVE}"):
        # The lock is held while deleting, so that two new servers never delete one folder together.
        with contextlib.suppress(OSError), alive.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(alive.parent)
            deleted.append(alive.parent)
    return deleted
