"""A copy of a training run under a URL: it works in a local folder, and each finished piece goes up after it is finished.

    URL/manifest.json                         what run this is
    URL/checkpoints/step-00000100/state.json  goes up last of its checkpoint: what has it is whole
    URL/config.json, model.safetensors        the best drafter; config.json goes up last and names the hash of the weights

A run whose local folder is gone goes on from the newest checkpoint there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.draft.checkpoint import CONFIG, WEIGHTS
from headrace.draft.state import FACTS as STATE
from headrace.draft.state import TENSORS
from headrace.errors import ConfigError, StoreError
from headrace.remote import (
    fetch_folder,
    is_url,
    list_objects,
    open_bucket,
    read_object,
    told,
    upload_files,
    write_object,
)

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"


class Mirror:
    """The URL of a run, and its local folder. Only the first worker has one. Raises ConfigError for a path."""

    def __init__(self, url: str, folder: Path, say: Callable[[str], None]) -> None:
        if not is_url(url):
            raise ConfigError(f"--mirror {url} is a path; give a URL such as s3://bucket/run")
        self.url, self.folder, self.say = url, folder, say
        self._failed = False

    def fetch(self, identity: dict[str, Any]) -> None:
        """Bring back what is at the URL, when the local folder holds no run. ``identity`` is what makes this run this run.

        Raises ConfigError when the URL holds another one, StoreError.
        """
        there = read_object(open_bucket(self.url), MANIFEST, f"{self.url}/{MANIFEST}")
        if there is not None and json.loads(there).get("identity") != json.loads(json.dumps(identity)):
            raise ConfigError(
                f"--mirror {self.url} holds another run, or one with other settings; give another URL"
            )
        if there is None or (self.folder / MANIFEST).exists():
            return
        work = self.folder / ".mirror"
        copy = fetch_folder(self.url, work, last=MANIFEST)
        if copy is not None:
            # the manifest last: a fetch that is killed begins again
            for file in sorted(copy.rglob("*"), key=lambda file: file == copy / MANIFEST):
                if file.is_file():
                    place = self.folder / file.relative_to(copy)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(place)
            self.say(f"{self.folder} holds no run; going on from the one at {self.url}")
        shutil.rmtree(work, ignore_errors=True)

    def checkpoint(self, path: Path) -> None:
        """Copy a checkpoint, then delete older ones there. A bucket that fails is said and does not stop training."""
        self._try(lambda: self._checkpoint(path))

    def drafter(self) -> None:
        """Copy the best drafter; as :meth:`checkpoint`."""
        self._try(self._drafter)

    def begin(self) -> None:
        """Copy the manifest: the URL is this run's from now on. Raises StoreError."""
        write_object(open_bucket(self.url), MANIFEST, self.folder / MANIFEST, f"{self.url}/{MANIFEST}")

    def finish(self) -> None:
        """Copy how the run ended, and again what failed before. Raises StoreError unless the URL then holds the whole run."""
        if self._failed:
            for path in sorted((self.folder / CHECKPOINTS).glob("step-*"))[-1:]:
                self._checkpoint(path)
            self._drafter()
        self.begin()

    def _checkpoint(self, path: Path) -> None:
        import obstore

        url = f"{self.url}/{CHECKPOINTS}"
        upload_files(path, [TENSORS, STATE], f"{url}/{path.name}")
        bucket = open_bucket(url)
        old = [e["path"] for e in list_objects(bucket, "", url) if e["path"].split("/")[0] < path.name]
        if old:
            with told("delete old checkpoints under", url):
                obstore.delete(bucket, sorted(old, key=lambda name: not name.endswith(STATE)))

    def _drafter(self) -> None:
        if (self.folder / CONFIG).exists():
            upload_files(self.folder, [WEIGHTS, CONFIG], self.url)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StoreError as exc:
            self._failed = True
            self.say(f"warning: the copy at {self.url} is behind: {exc}")
