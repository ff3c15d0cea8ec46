"""A store under a URL: every object appears whole (a PUT or a finished multipart upload), names are taken by conditional puts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from headrace.errors import GoneError, StoreError
from headrace.remote import (
    PART_BYTES,
    list_objects,
    no_bucket,
    open_bucket,
    read_object,
    tidy,
    told,
    write_object,
)
from headrace.store.folder import BROKEN, DATASET, SHARDS, SUFFIX, Source

if TYPE_CHECKING:
    from headrace.store.cache import Cache
    from headrace.store.codecs import Buffer

HEAD_BYTES = 65_536
"""Read when a shard is opened, with its size, in one request: what most tables fit in."""
UPLOADS = 12
"""Parts of one shard on their way at a time: obstore's own number."""
PIECE_BYTES = 256 << 10
"""Buffers smaller than this are joined before they go up."""


class RemoteFile:
    """An object, read by ranged requests: exactly the bytes asked for travel, and the beginning once."""

    def __init__(self, bucket: Any, path: str, url: str) -> None:
        """Raises GoneError when there is no such object."""
        self.name = url
        self._bucket = bucket
        self._path = path
        self._head, self.size = self._open()

    def _open(self) -> tuple[bytes, int]:
        import obstore
        from obstore.exceptions import BaseError

        try:
            with told("read", self.name):
                try:
                    answer = obstore.get(self._bucket, self._path, options={"range": (0, HEAD_BYTES)})
                    return bytes(answer.bytes()), int(answer.meta["size"])
                except BaseError:
                    if int(obstore.head(self._bucket, self._path)["size"]):
                        raise
                    return b"", 0  # a range of nothing is refused
        except FileNotFoundError:
            raise _gone(self.name) from None

    def read(self, start: int, stop: int) -> memoryview:
        stop = min(stop, self.size)
        if stop <= start:
            return memoryview(b"")
        if stop <= len(self._head):
            return memoryview(self._head)[start:stop]
        if start < len(self._head):
            return memoryview(self._head[start:] + bytes(self._fetch(len(self._head), stop)))
        return memoryview(self._fetch(start, stop))

    def expect(self, start: int, stop: int) -> None:
        """Nothing is asked for ahead: the threads that read wait side by side."""

    def _fetch(self, start: int, stop: int) -> Any:
        import obstore

        try:
            with told("read", self.name):
                return obstore.get_range(self._bucket, self._path, start=start, end=stop)
        except FileNotFoundError:
            raise _gone(self.name) from None


def _gone(url: str) -> GoneError:
    return GoneError(f"{url} is gone since the store was opened; open it again")


class RemoteFolder:
    """A store under a URL (``s3://bucket/run``, ``gs://…``, ``az://…``). ``retry`` is obstore's retry config.

    Unfinished multipart uploads of killed writers are invisible and cost storage until the bucket's own lifecycle rule
    ends them: no rule of ours could tell them from those of writers at work.
    """

    remote = True

    def __init__(
        self,
        url: str,
        bucket: Any = None,
        *,
        cache: Cache | None = None,
        retry: dict[str, Any] | None = None,
    ) -> None:
        self.name = url.rstrip("/") if bucket is not None else tidy(url)
        self._bucket = bucket if bucket is not None else open_bucket(self.name, retry)
        self.cache = cache

    def _url(self, name: str) -> str:
        return f"{self.name}/{name}"

    def read_file(self, name: str) -> bytes | None:
        return read_object(self._bucket, name, self._url(name))

    def shard_names(self) -> list[str]:
        names = [e["path"].split("/")[-1] for e in list_objects(self._bucket, SHARDS, self._url(SHARDS))]
        return sorted(n for n in names if n.endswith(SUFFIX) and not n.startswith("."))

    def shard_bytes(self) -> int:
        """Bytes of all shards, without opening one."""
        return sum(e["size"] for e in list_objects(self._bucket, SHARDS, self._url(SHARDS)))

    def open_shard(self, name: str) -> Source:
        path = f"{SHARDS}/{name}"
        if self.cache is None:
            return RemoteFile(self._bucket, path, self._url(path))
        from headrace.store.cache import CachedFile

        return CachedFile(
            self.cache, self._url(path), lambda: RemoteFile(self._bucket, path, self._url(path))
        )

    # --- changing it ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """A bucket has no folders."""

    def require_writable(self) -> None:
        # asking for a name that is taken writes nothing, and is refused for lack of permission first
        self.create_file(DATASET, b"")

    def create_file(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with told("write", self._url(name)):
                try:
                    obstore.put(self._bucket, name, data, mode="create")
                except (AlreadyExistsError, PreconditionError):
                    return False
        except FileNotFoundError:
            raise no_bucket(self._url(name)) from None
        return True

    def replace_file(self, name: str, data: bytes) -> None:
        write_object(self._bucket, name, data, self._url(name))

    def remove_file(self, name: str) -> None:
        import obstore

        try:
            with told("delete", self._url(name)):
                obstore.delete(self._bucket, name)
        except FileNotFoundError:
            return

    def put_shard(self, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """One request for a small shard, a multipart upload for a large one; a fault ends the upload and leaves nothing."""
        import obstore

        path = f"{SHARDS}/{name}"
        url = self._url(path)
        multipart = size > PART_BYTES
        pieces = _pieces(buffers, PIECE_BYTES)
        try:
            with told("write", url):
                obstore.put(
                    self._bucket,
                    path,
                    pieces if multipart else b"".join(pieces),
                    use_multipart=multipart,
                    chunk_size=PART_BYTES,
                    max_concurrency=UPLOADS,
                )
                there = int(obstore.head(self._bucket, path)["size"])
        except FileNotFoundError:
            raise no_bucket(url) from None
        if there != size:
            self.remove_file(path)
            raise StoreError(f"{url} arrived with {there} of {size} bytes and was deleted; run again")

    def set_aside(self, name: str) -> bool:
        import obstore

        try:
            with told("move", self._url(name)):
                obstore.copy(self._bucket, name, f"{BROKEN}/{name.split('/')[-1]}")
        except FileNotFoundError:
            return False
        self.remove_file(name)
        return True

    def open_broken(self, name: str) -> Source:
        return RemoteFile(self._bucket, f"{BROKEN}/{name}", self._url(f"{BROKEN}/{name}"))

    def remove_leftovers(self, older_than: float) -> list[str]:
        """Nothing half-made can be seen in a bucket."""
        return []


def _pieces(buffers: Iterable[Buffer], least: int) -> Iterator[Buffer]:
    """The same bytes, small buffers joined to pieces of ``least``: each costs a call. Large ones go up from where they lie; the
    client cuts its parts out of them without a copy."""
    waiting: list[memoryview] = []
    have = 0
    for buffer in buffers:
        flat = memoryview(buffer).cast("B")
        if waiting and (len(flat) >= least or have >= least):
            yield b"".join(waiting)
            waiting, have = [], 0
        if len(flat) >= least:
            yield flat
        elif len(flat):
            waiting.append(flat)
            have += len(flat)
    if waiting:
        yield b"".join(waiting)
