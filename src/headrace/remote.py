"""Object stores: URLs that carry no secret, one client for them all, its errors as ours, and whole folders up and down.

Credentials come from the provider's own chain alone (environment, profile, web identity, instance role): nothing here takes
one, keeps one or shows one. Requests are tried again by obstore itself: connection faults and 5xx answers, with a growing
pause, for three minutes at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import xxhash
from pydantic import BeforeValidator

from headrace.errors import InputError, PreflightError, StoreError

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_USER_IS_CONTAINER = ("abfs", "abfss")  # abfs://container@account.dfs.core.windows.net/path
PART_BYTES = 5 << 20
"""Size of one part of an upload, and up to which an object goes up in one request: obstore's own. S3 takes 10,000 parts, which
is 52 GB; a part has to be through within obstore's request timeout, 30 s."""


# --- names ----------------------------------------------------------------------------------------------------------------


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether ``place`` is a URL and not a path."""
    return "://" in os.fspath(place)


def tidy(place: str | os.PathLike[str]) -> str:
    """``place`` as text: a path as it is, ``file:///x`` as the path ``/x``, a URL without the slash at its end.

    Raises InputError for a URL that carries credentials or that no client here speaks; the message never repeats it.
    """
    text = os.fspath(place)
    if not is_url(text):
        return text
    parts = urlsplit(text)
    name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/…"
    secret = "@" in parts.netloc and not (parts.scheme in _USER_IS_CONTAINER and ":" not in parts.netloc)
    if secret or parts.query or parts.fragment or "?" in text or "#" in text:
        raise InputError(
            f"the URL {name} carries a user, a password or a query; give it without: credentials come from the environment, "
            "a profile or the instance"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"{name} names a host; a local folder is file:///path, or the plain path")
        return unquote(parts.path).rstrip("/") or "/"
    if parts.scheme not in SCHEMES or not parts.netloc:
        raise InputError(
            f"{name} is not a place that can be used; give a path, or s3://bucket/path, gs://…, az://…"
        )
    return text.rstrip("/")


def absolute(place: str | os.PathLike[str]) -> str:
    """``place`` as it is named from any other folder."""
    return tidy(place) if is_url(place) else str(Path(place).expanduser().absolute())


Place = Annotated[str, BeforeValidator(tidy)]
"""A path or a URL, for config sections."""


# --- the client -------------------------------------------------------------------------------------------------------------


def open_bucket(url: str, retry: dict[str, Any] | None = None) -> Any:
    """The obstore client of a URL; paths given to it are relative to the URL's. Nothing is sent yet.

    Raises InputError for a URL that carries credentials, PreflightError when obstore is not installed.
    """
    url = tidy(url)
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise PreflightError(f"{url} needs obstore; run: pip install 'headrace[remote]'") from None
    more = {} if retry is None else {"retry_config": retry}
    provider = _profile_provider() if url.startswith(("s3://", "s3a://")) else None
    if provider is not None:
        more["credential_provider"] = provider
    try:
        # no client options here: they would take the place of those in the environment (AWS_ALLOW_HTTP and others)
        return from_url(url, **more)
    except (BaseError, ValueError) as exc:
        raise InputError(f"{url} cannot be opened ({reason(exc)}); check the URL and its region") from None


def _profile_provider() -> Any:
    """AWS profiles, SSO and ``~/.aws`` are boto3's business; keys, web identity and instance roles obstore knows itself."""
    if os.environ.get("AWS_ACCESS_KEY_ID") or not _has_profile():
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise PreflightError(
            "AWS credentials are in a profile, which takes boto3 to read; run: pip install boto3, or set AWS_ACCESS_KEY_ID"
        ) from None
    try:
        return Boto3CredentialProvider()
    except ValueError:
        return None  # a profile without credentials: whatever obstore finds, then
    except BotoCoreError as exc:
        raise PreflightError(
            f"the AWS profile {os.environ.get('AWS_PROFILE', 'default')} gives no credentials ({type(exc).__name__}); check AWS_PROFILE and ~/.aws"
        ) from None


def _has_profile() -> bool:
    if os.environ.get("AWS_PROFILE"):
        return True
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(Path(file).expanduser().is_file() for file in files)


# --- errors -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def told(doing: str, url: str) -> Iterator[None]:
    """Raise what obstore raises as StoreError: what was being done, to which object, why not, and the mend.

    FileNotFoundError passes: the caller knows what a missing object means. The original is cut off on purpose: it may
    repeat request headers or signed URLs.
    """
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as exc:
        raise StoreError(
            f"cannot {doing} {url}: refused ({reason(exc)}); check which credentials the environment, profile or instance gives, "
            "and what they may do there"
        ) from None
    except FileNotFoundError:
        raise
    except (BaseError, OSError, ValueError) as exc:
        if "NoSuchBucket" in str(exc):
            raise no_bucket(url, doing) from None
        raise StoreError(
            f"cannot {doing} {url}: {reason(exc)}; check the network and the endpoint, then run again: what is finished stays"
        ) from None


def reason(exc: BaseException) -> str:
    """Why a request failed, in a few words and without anything that could be a credential.

    Only words known to be harmless are kept: the status, the service's error code, the kind of connection fault.
    """
    text = str(exc).replace("retry_timeout", "")
    found = [
        *re.findall(r"status(?: code)?:? \"?(\d{3}[ A-Za-z]*)", text)[:1],
        *re.findall(r"<Code>([A-Za-z]{1,60})</Code>", text)[:1],
        *[word for word in _FAULTS if word in text.lower()][:2],
    ]
    return ", ".join(dict.fromkeys(part.strip() for part in found)) or type(exc).__name__


_FAULTS = (
    "connection refused",
    "connection reset",
    "connection closed",
    "broken pipe",
    "dns error",
    "certificate",
    "timed out",
    "timeout",
    "error sending request",
    "missing region",
    "allow_http",
    "error decoding response body",
)


# --- whole objects and folders ----------------------------------------------------------------------------------------------


def read_object(bucket: Any, path: str, url: str) -> bytes | None:
    """An object's bytes, None when it is missing. Raises StoreError."""
    import obstore

    try:
        with told("read", url):
            return bytes(obstore.get(bucket, path).bytes())
    except FileNotFoundError:
        return None


def write_object(bucket: Any, path: str, data: Any, url: str) -> None:
    """Put bytes, or the content of a local file, at ``path``; readers see all of it or what was there. Raises StoreError."""
    import obstore

    try:
        with told("write", url):
            obstore.put(bucket, path, data, chunk_size=PART_BYTES)
    except FileNotFoundError:
        raise no_bucket(url) from None


def no_bucket(url: str, doing: str = "write") -> StoreError:
    """The error of a bucket that is not there."""
    return StoreError(f"cannot {doing} {url}: there is no such bucket; make it, or check the URL")


def list_objects(bucket: Any, prefix: str, url: str) -> list[dict[str, Any]]:
    """Every object under ``prefix``: ``path``, ``size``, ``e_tag``. Empty when there is none. Raises StoreError."""
    import obstore

    try:
        with told("list", url):
            return [entry for page in obstore.list(bucket, prefix=prefix or None) for entry in page]
    except FileNotFoundError:
        return []


def upload_files(folder: Path, names: Sequence[str], url: str) -> int:
    """Copy files of ``folder`` to ``url``, the last one named after all others: what has it is whole. One of its name that is
    there already is deleted first, so that no reader takes the old one for the new files'. Returns the bytes sent.

    Raises StoreError.
    """
    import obstore

    bucket = open_bucket(url)
    with contextlib.suppress(FileNotFoundError), told("replace", f"{url}/{names[-1]}"):
        obstore.delete(bucket, names[-1])
    for name in names:
        write_object(bucket, name, folder / name, f"{url}/{name}")
    return sum((folder / name).stat().st_size for name in names)


def upload_folder(folder: Path, url: str, *, last: str) -> int:
    """Copy all files of ``folder`` to ``url`` as :func:`upload_files` does."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return upload_files(folder, [*(name for name in names if name != last), last], url)


def fetch_folder(url: str, into: Path, *, last: str) -> Path | None:
    """A local copy of the folder at ``url``, made under ``into`` and found there again for as long as no object there has
    changed (name, size, etag). None when it has no object ``last``. Raises StoreError.
    """
    import obstore

    bucket = open_bucket(url)
    entries = sorted(list_objects(bucket, "", url), key=lambda entry: str(entry["path"]))
    if not any(entry["path"] == last for entry in entries):
        return None
    version = [(entry["path"], entry["size"], entry["e_tag"]) for entry in entries]
    name = xxhash.xxh3_128_hexdigest(json.dumps([url, version]).encode())
    folder = into / name
    if folder.is_dir():
        return folder
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=into) as work:
        copy = Path(work) / "copy"
        for path, _, _ in version:
            file = copy / path
            if not file.resolve().is_relative_to(copy.resolve()):
                raise StoreError(f"{url}/{path} would be written outside its folder; delete that object")
            file.parent.mkdir(parents=True, exist_ok=True)
            with told("read", f"{url}/{path}"), open(file, "wb") as out:
                for piece in obstore.get(bucket, path).stream(min_chunk_size=PART_BYTES):
                    out.write(piece)
        with contextlib.suppress(OSError):  # another process was faster: its copy is the same
            copy.rename(folder)
    return folder
