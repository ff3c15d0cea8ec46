"""Hidden states out of vLLM's paged cache into files: the half of the connector that needs no vLLM, so that it can be tested alone.

On CUDA a side stream copies into pinned memory while the engine goes on, elsewhere the copy is direct; a thread then writes the
file under another name and renames it. Memory and disk are bounded: a slow disk slows the engine down.
"""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file

KEEP_SECONDS = 900.0
"""An unread file older than this is deleted."""


@dataclass(frozen=True)
class Save:
    """A finished request whose states are to be written."""

    request: str
    path: str
    key: str
    ids: list[int]
    blocks: list[int]


@dataclass(frozen=True)
class Limits:
    """Bytes that may wait."""

    pending: int
    """In host memory, copied and not yet written."""
    staging: int
    """In the staging folder, written and not yet read."""


class PageWriter:
    """Copies pages out and writes files, on rank 0."""

    def __init__(self, pages: torch.Tensor, facts: dict[str, Any], limits: Limits) -> None:
        self._pages = pages  # [blocks, layers, slots a block, hidden]
        self._facts = facts
        self._limits = limits
        self._unread: dict[str, tuple[int, float]] = {}
        self._stream = torch.cuda.Stream() if pages.is_cuda else None
        self._copies: dict[str, Any] = {}
        self._finished: set[str] = set()
        self._pending = 0
        self._room = threading.Condition()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="headrace-save")

    def start(self, save: Save) -> None:
        """Copy one request's states out of the pages and have them written."""
        layers, slots, hidden = self._pages.shape[1:]
        size = len(save.ids) * layers * hidden * self._pages.element_size()
        with (
            self._room
        ):  # host memory is bounded: a slow disk slows the engine down, it does not fill the memory
            self._room.wait_for(lambda: self._pending == 0 or self._pending + size <= self._limits.pending)
            self._pending += size
        needed = -(-len(save.ids) // slots)
        if len(save.blocks) < needed:
            self._pool.submit(self._fail, save, f"vLLM kept {len(save.blocks)} of {needed} pages", size)
            self._copies[save.request] = None
            return
        blocks = torch.tensor(save.blocks[:needed], dtype=torch.long)
        states, event = self._copy(blocks, len(save.ids))
        self._copies[save.request] = event
        self._pool.submit(self._write, save, states, event, size)

    def _copy(self, blocks: torch.Tensor, tokens: int) -> tuple[torch.Tensor, Any]:
        """[layers, tokens, hidden] on the host, and the event after which it is true (None: it is)."""
        if self._stream is None:
            return self._gather(blocks, tokens).contiguous(), None
        ready = torch.cuda.Event()
        ready.record()
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            on_device = self._gather(blocks.to(self._pages.device, non_blocking=True), tokens).contiguous()
            states = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            states.copy_(on_device, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return states, event

    def _gather(self, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
        return self._pages[blocks].transpose(0, 1).flatten(1, 2)[:, :tokens]

    def copied(self, finished: set[str]) -> set[str]:
        """Of all requests reported finished so far, those whose copy is complete."""
        self._finished |= finished
        done = {
            r
            for r in self._finished
            if r in self._copies and (self._copies[r] is None or self._copies[r].query())
        }
        for request in done:
            del self._copies[request]
        # Requests that asked for no states (or were refused) are finished and have nothing to wait for.
        self._finished = {r for r in self._finished if r in self._copies}
        return done

    def _write(self, save: Save, states: torch.Tensor, event: Any, size: int) -> None:
        temporary = f"{save.path}.{os.getpid()}.tmp"
        try:
            if event is not None:
                event.synchronize()
            self._take_room(size)
            checksum = xxhash.xxh3_64_hexdigest(states.view(torch.uint8).numpy().data)
            metadata = {"key": save.key, "checksum": checksum, "facts": json.dumps(self._facts)}
            ids = torch.from_numpy(np.asarray(save.ids, dtype=np.int32))
            save_file({"states": states, "ids": ids}, temporary, metadata)
            os.replace(temporary, save.path)
            with self._room:
                self._unread[save.path] = (size, time.monotonic())
        except (OSError, RuntimeError, ValueError) as exc:
            Path(temporary).unlink(missing_ok=True)
            self._report(save, f"{type(exc).__name__}: {exc}")
        finally:
            self._release(size)

    def _take_room(self, size: int) -> None:
        """Raise OSError when too much waits to be read. Files nobody came for are deleted: a client that went away must
        neither fill the disk nor block the next one."""
        now = time.monotonic()
        with self._room:
            for path, (_, since) in list(self._unread.items()):
                if not Path(path).exists() or now - since > KEEP_SECONDS:
                    Path(path).unlink(missing_ok=True)
                    del self._unread[path]
            waiting = sum(s for s, _ in self._unread.values())
            if self._unread and waiting + size > self._limits.staging:
                raise OSError(
                    f"{waiting} bytes in the staging folder wait to be read, {self._limits.staging} are allowed"
                )

    def _fail(self, save: Save, message: str, size: int) -> None:
        self._report(save, message)
        self._release(size)

    def _report(self, save: Save, message: str) -> None:
        # Under another name first: whoever waits for the file never reads half of it.
        part = Path(save.path).with_suffix(".error.part")
        part.write_text(message, encoding="utf-8")
        part.rename(Path(save.path).with_suffix(".error"))

    def _release(self, size: int) -> None:
        with self._room:
            self._pending -= size
            self._room.notify_all()

    def close(self) -> None:
        """Wait for the writes under way."""
        self._pool.shutdown(wait=True)
