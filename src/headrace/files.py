"""Durable small files: every manifest, index and marker goes through here, so none is ever half-written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from headrace.errors import CorruptError, StorageFullError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # EFBIG: a limit on file size (ulimit -f)
WRITE_AHEAD = 64 << 20  # bytes of a file after which the disk is told to begin


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears at ``path`` whole or not at all.

    A sibling temporary file is written, synced and renamed, then the folder is synced: after the block the file
    survives a power cut. On any exception the temporary file is removed and ``path`` is untouched.
    Raises StorageFullError when space, quota or inodes run out.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(tmp, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
        fsync_folder(path.parent)
    except OSError as exc:
        with contextlib.suppress(OSError):
            tmp.unlink()
        if exc.errno in FULL_ERRNOS:
            raise StorageFullError(
                exc.errno, f"no space left to write {path}; free some and run the command again, it resumes"
            ) from exc
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            tmp.unlink()
        raise


def write_through(file: IO[bytes], buffers: Iterable[bytes | memoryview]) -> None:
    """Write ``buffers``, and have the disk begin while more is written: a sync at the end would find it idle until then.

    What has reached the disk leaves the system's cache of files, so that the next part is written into the same pages: a
    cache that grows by gigabytes a second is paid for with a new page of memory for each page of the file.
    """
    before = begun = at = file.tell()
    for buffer in buffers:
        at += file.write(buffer)
        if at - begun >= WRITE_AHEAD and hasattr(os, "posix_fadvise"):
            file.flush()
            # Not needed in memory: of this part Linux begins to write all, without waiting; the part before is on the disk
            # by now and is dropped.
            os.posix_fadvise(file.fileno(), before, at - before, os.POSIX_FADV_DONTNEED)
            before, begun = begun, at


def fsync_folder(folder: Path) -> None:
    """Make renames and new names inside ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically and durably."""
    data = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_write(path) as file:
        file.write(data.encode())


def read_json(path: Path) -> Any:
    """Read JSON. Raises CorruptError naming the file when it is not JSON, FileNotFoundError when it is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise CorruptError(
            f"{path} is not valid JSON ({exc}); delete it and run the command that made it again"
        ) from exc
