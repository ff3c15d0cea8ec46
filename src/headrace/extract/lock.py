"""One process fills a store through one pipeline: the second one refuses, a crashed one's lock is taken over.

The lock is a small JSON file published by ``link``, which is atomic on local file systems and NFS alike; no advisory
locks are used. On the owner's machine liveness is the process itself (its id and start time, neither of which
depends on the wall clock); from elsewhere it is the age of a heartbeat, measured by the file server's clock alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import StoreError, UsageError

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
STALE_SECONDS = 300.0
"""A lock of another machine whose heartbeat is older is dead."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock."""

    host: str
    """Name, boot and process namespace of the machine: process ids mean something only where it is equal."""
    pid: int
    started: str
    """Start of the process in its machine's own ticks; with ``pid`` it never repeats within a boot."""
    token: str
    """Random; tells this lock from every other."""

    def describe(self) -> str:
        """For messages."""
        return f"process {self.pid} on {self.host.split('/')[0]}"


class RunLock:
    """Held by the process that extracts into a store. Acquire with :meth:`acquire`, keep alive with :meth:`beat`."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self.owner = owner

    @classmethod
    def acquire(cls, path: Path, say: Callable[[str], None]) -> RunLock:
        """Take the lock. Raises UsageError naming the live holder; a dead holder's lock is taken over, and said so."""
        owner = Owner(_host(), os.getpid(), _process_start(os.getpid()), secrets.token_hex(8))
        while not _publish(path, owner):
            held = read_owner(path)
            if held is None:
                continue  # released this very moment
            if is_live(path, held):
                raise UsageError(
                    f"{path.parent.parent} is being filled by {held.describe()}; wait for it, stop it, "
                    f"or if it is surely dead delete {path}"
                )
            if _take_away(path, held):
                say(f"taking over from {held.describe()}, which is no longer running")
        return cls(path, owner)

    def beat(self) -> None:
        """Renew the heartbeat. Raises StoreError when another process has taken the lock: this one must stop writing."""
        held = read_owner(self.path)
        if held != self.owner:
            who = held.describe() if held else "someone who deleted it"
            raise StoreError(f"lost {self.path} to {who}; this run stops so that two never fill one store")
        os.utime(self.path)

    def release(self) -> None:
        """Give the lock up, if it is still ours; idempotent."""
        if read_owner(self.path) == self.owner:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()


def read_owner(path: Path) -> Owner | None:
    """The holder written in a lock file, None when there is no lock."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Owner(str(data["host"]), int(data["pid"]), str(data["started"]), str(data["token"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        # Locks are published whole; anything else was not made by us, or the disk lost it. It names no live process.
        return Owner("an unreadable lock", 0, "", "")


def is_live(path: Path, owner: Owner) -> bool:
    """Whether the holder of the lock at ``path`` still runs."""
    if owner.host == _host():
        return _process_start(owner.pid) == owner.started != ""
    age = _heartbeat_age(path)
    return age is not None and age < STALE_SECONDS


def _publish(path: Path, owner: Owner) -> bool:
    data = {"host": owner.host, "pid": owner.pid, "started": owner.started, "token": owner.token}
    tmp = path.with_name(f".{path.name}.{owner.token}.tmp")
    tmp.write_text(json.dumps(data), encoding="utf-8")
    try:
        os.link(tmp, path)
    except FileExistsError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        return _create(path, tmp.read_text(encoding="utf-8"))
    finally:
        tmp.unlink()
    return True


def _create(path: Path, text: str) -> bool:
    """The same where the file system knows no hard links (exFAT, some FUSE mounts)."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _take_away(path: Path, held: Owner) -> bool:
    """Remove the dead lock ``held``; False when someone else was quicker. Never removes a lock that came after it."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.dead")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    ours = read_owner(aside) == held
    if not ours:  # a new holder published between our look and our rename: give it back
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()
    return ours


def _heartbeat_age(path: Path) -> float | None:
    """Seconds since the heartbeat by the file server's clock: a fresh file beside the lock tells its time now."""
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.now")
    try:
        beat = path.stat().st_mtime
        probe.touch()
        return probe.stat().st_mtime - beat
    except FileNotFoundError:
        return None
    finally:
        probe.unlink(missing_ok=True)


def _host() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    # Two containers of one machine do not see each other's processes.
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts)


def _process_start(pid: int) -> str:
    """Start of a process in ticks since boot (Linux) or as psutil tells it; ``""`` when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return ""
