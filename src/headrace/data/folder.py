"""Folders that appear whole: written beside their place under a temporary name, sealed, then renamed into it."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil
import xxhash

from headrace.errors import PreflightError, StorageFullError, UsageError
from headrace.files import FULL_ERRNOS, fsync_folder, read_json


def refuse_foreign_folder(path: Path, kind: str) -> None:
    """Raise UsageError when ``path`` holds anything but a folder of ``kind``: nothing of the user's is ever replaced."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"--out {path} is a file; give a folder")
    manifest = path / "manifest.json"
    if any(path.iterdir()) and not (manifest.is_file() and read_json(manifest).get("kind") == kind):
        raise UsageError(
            f"--out {path} exists and is not a folder of kind {kind}; give another folder or remove it"
        )


def work_folder(path: Path) -> Path:
    """Name of this process's temporary sibling of ``path``: host and process id tell whose it is."""
    return path.absolute().parent / f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp"


def remove_dead_leftovers(path: Path) -> None:
    """Tidy temporary siblings of ``path`` left by dead processes of this host; those of others stay.

    A folder that was moved aside and not yet replaced when its process died is put back.
    """
    prefix = f".{path.name}.{socket.gethostname()}."
    for leftover in sorted(path.absolute().parent.glob(f"{prefix}*.tmp")):
        pid, _, aside = leftover.name.removeprefix(prefix).removesuffix(".tmp").partition(".")
        if not pid.isdigit() or (int(pid) != os.getpid() and psutil.pid_exists(int(pid))):
            continue
        if aside and not path.exists():
            leftover.rename(path)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def replace_folder(new: Path, path: Path) -> None:
    """Put folder ``new`` at ``path``; an old one there is moved aside first and removed after."""
    fsync_folder(new)
    aside = new.with_name(new.name.removesuffix(".tmp") + ".aside.tmp")
    if path.exists():
        path.rename(aside)
    new.rename(path)
    fsync_folder(path.absolute().parent)
    shutil.rmtree(aside, ignore_errors=True)


def translate_full(exc: OSError, path: Path) -> OSError:
    """A StorageFullError for a full disk, quota or inode table; any other error as it is."""
    if exc.errno in FULL_ERRNOS:
        return StorageFullError(
            exc.errno, f"no space left to write rows at {path}; free some and run the command again"
        )
    return exc


def seal_file(path: Path) -> dict[str, Any]:
    """Make a finished file durable; its size and checksum."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"bytes": path.stat().st_size, "xxh3": file_hash(path)}


def file_hash(path: Path) -> str:
    """xxh3-128 of a file's bytes, streamed."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class WorkFolder:
    """Sealed runs of unfinished work on ``out`` live here, beside it; a lock keeps a second process away."""

    def __init__(self, out: Path) -> None:
        self.path = out.absolute().parent / f".{out.name}.work"
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / "lock", "wb")  # held until the work ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise PreflightError(
                f"another process works at {self.path}; wait for it or give another --out"
            ) from None
        return self

    def remove(self) -> None:
        """The work is done: nothing of it is needed any more."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not any(self.path.glob("run-*.json")):
            self.remove()  # nothing worth going on from
        if self._lock is not None:
            self._lock.close()
