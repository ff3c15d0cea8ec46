"""A capture server without an engine: it answers at once, with files that were staged before the clock ran.

Speaks the protocol of the SGLang plug-in, so that the client under test is the real one. Started by ``client.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from headrace.sglang_plugin.protocol import (
    KEY,
    Facts,
    Reply,
    Staged,
    Wish,
    taps_from_text,
    taps_to_text,
)
from headrace.sglang_plugin.stagedfile import Layout, seal

RUN = "instant"
READY = "ready"
LONGEST = 8192


@dataclass(frozen=True)
class Ready:
    """A staged file that waits for its request."""

    path: Path
    seal: str
    size: int


class Stage:
    """Makes staged files and hands them out under the names that requests give them (another link to the same file)."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.facts, self.folder = facts, folder
        self.place = folder / f"{RUN}.0"
        self.place.mkdir(parents=True)
        # Random normal numbers, larger in some channels: they shrink about as far as real states.
        values = torch.randn(LONGEST + 64, facts.hidden_size, generator=torch.Generator().manual_seed(1))
        values *= torch.linspace(0.2, 3.0, facts.hidden_size)
        self._values = values.to(torch.bfloat16).view(torch.uint8).numpy()
        self._ready: dict[bytes, Ready] = {}

    def make(self, ids: Sequence[int]) -> Ready:
        """Stage the capture of ``ids``; once for each."""
        ids_bytes = np.asarray(ids, "<i8").tobytes()
        if ids_bytes in self._ready:
            return self._ready[ids_bytes]
        count, taps = len(ids), self.facts.taps
        layout = Layout(len(taps), count, self.facts.hidden_size, self.facts.dtype)
        places = np.arange(count) % LONGEST
        parts = [self._values[places + index] for index in range(len(taps))]
        digests = [xxhash.xxh3_64_intdigest(part.data) for part in parts]
        table = np.array([[0, count, *digests]], "<u8").tobytes()
        header = layout.header(1, {"taps": taps_to_text(taps)})
        path = self.folder / f"{len(self._ready)}.made"
        with open(path, "wb") as file:
            file.writelines([header, ids_bytes, *(part.data for part in parts), table])
        found = Ready(path, seal(header, ids_bytes, table), layout.body_bytes + len(table))
        self._ready[ids_bytes] = found
        return found

    def answer(self, request: dict[str, object]) -> Reply:
        """What the plug-in would say to a request."""
        sampling = request.get("sampling_params")
        wish = Wish.from_params(sampling.get("custom_params")) if isinstance(sampling, dict) else None
        if wish is None or not wish.taps:
            return Reply(facts=self.facts)
        ids = request["input_ids"]
        assert isinstance(ids, list)
        made = self.make(ids)
        name = f"{RUN}.0/{wish.owner}-{request['rid']}.safetensors"
        os.link(made.path, self.folder / name)
        return Reply(
            facts=self.facts, staged=Staged(name=name, seal=made.seal, size=made.size, rows=len(ids))
        )


async def talk(stage: Stage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: HTTP/1.1 with as little as the client sends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or b"0")
            body = json.loads(await reader.readexactly(length)) if length else {}
            meta = {"meta_info": {KEY: [stage.answer(body).to_dict()]}}
            out = json.dumps(meta).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(out) + out)
            await writer.drain()
    writer.close()


async def serve(stage: Stage, port: int) -> None:
    """Answer until killed."""
    server = await asyncio.start_server(
        lambda r, w: talk(stage, r, w), "127.0.0.1", port, limit=1 << 20, backlog=1024
    )
    print(READY, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--taps", required=True)
    parser.add_argument("--rows", type=Path, required=True, help="rows to stage beforehand")
    args = parser.parse_args()
    staged = Stage(
        args.folder,
        Facts(
            plugin="bench", engine="instant", run=RUN, rank=0, staging=str(args.folder), staging_bytes=1 << 40,
            taps=taps_from_text(args.taps), source="native", dtype="bfloat16", num_layers=args.layers,
            hidden_size=args.hidden, settings={"chunked_prefill_size": 8192},
        ),
    )  # fmt: skip
    from headrace.data.rows import RowFolder

    for row in RowFolder.open(args.rows).rows(None):
        staged.make(row.ids.tolist())
    asyncio.run(serve(staged, args.port))
