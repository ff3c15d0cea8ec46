"""A copy of a row folder under a URL: whole when its manifest is there, which goes up last."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.data.rows import KIND, MANIFEST
from headrace.errors import UsageError
from headrace.remote import is_url, list_objects, open_bucket, read_object, upload_folder


def check_mirror(url: str) -> None:
    """Raise UsageError when ``url`` holds anything but rows, or is a path; StoreError when the bucket does not answer."""
    if not is_url(url):
        raise UsageError(f"--mirror {url} is a path; give a URL such as s3://bucket/rows, or copy the folder")
    bucket = open_bucket(url)
    if not list_objects(bucket, "", url):
        return
    manifest = read_object(bucket, MANIFEST, f"{url}/{MANIFEST}") or b"{}"
    try:
        kind = json.loads(manifest).get("kind")
    except (ValueError, AttributeError):
        kind = None
    if kind != KIND:
        raise UsageError(f"--mirror {url} holds something else than a row folder; give another URL")


def mirror_rows(folder: Path, url: str) -> int:
    """Copy the row folder ``folder`` to ``url``, unless it is there already; the bytes sent. Raises StoreError."""
    there = read_object(open_bucket(url), MANIFEST, f"{url}/{MANIFEST}")
    if there == (folder / MANIFEST).read_bytes():
        return 0
    return upload_folder(folder, url, last=MANIFEST)
