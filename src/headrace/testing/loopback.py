"""A capture server that misbehaves on command: the plug-in's own capturer behind a small HTTP server, with fingerprint states.

For tests of what a client must survive and what it must refuse, none of which the real SGLang does when asked: to die in the
middle, to answer without proof, to change ids, to lose a file. What is right is tested against the real SGLang.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from headrace._version import __version__
from headrace.engines.fake import fingerprint
from headrace.sglang_plugin.capture import Capturer, ForwardStates, Segment
from headrace.sglang_plugin.protocol import KEY, Facts, Reply
from headrace.sglang_plugin.staging import Staging
from headrace.types import CaptureSpec

Mischief = Callable[[dict[str, Any]], tuple[int, Any] | None]
"""Called with a request's body; returns status and answer instead of the server's own, or None to let it answer."""


class _Request:
    """Identity of a request in flight."""


class _Http(ThreadingHTTPServer):
    request_queue_size = 512  # as many clients at once as a real server takes
    daemon_threads = True


class LoopbackServer:
    """See the module docstring. Attributes may be changed while it runs."""

    def __init__(
        self, spec: CaptureSpec, staging: Path, *, run: str = "run", limit: int = 64 << 20, port: int = 0
    ) -> None:
        self.spec = spec
        self.mischief: Mischief | None = None
        """Asked first, for every generate request."""
        self.change_ids: Callable[[np.ndarray], np.ndarray] = lambda ids: ids
        """What the "engine" makes of a prompt."""
        self.change_states: Callable[[torch.Tensor], torch.Tensor] = lambda states: states
        """What it computes instead of [taps, tokens, hidden]."""
        self.change_reply: Callable[[dict[str, Any]], dict[str, Any]] = lambda meta: meta
        """What it says instead of ``meta_info``."""
        self.delay_s = 0.0
        """How long an answer takes."""
        self.asked = 0
        self.aborted: list[str] = []
        facts = Facts(
            plugin=__version__,
            engine="0.5.23",
            run=run,
            rank=0,
            staging=str(staging),
            staging_bytes=limit,
            taps=spec.taps,
            source="native",
            dtype=spec.dtype,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            settings={"chunked_prefill_size": 64, "context_length": 2048, "disable_radix_cache": True},
        )
        folder = Staging(staging, f"{run}.0", limit, stall_s=0.0, keep_s=60.0)
        self._capturer = Capturer(facts, folder, writers=2, host_bytes=4 << 20, device=torch.device("cpu"))
        self._scheduler = threading.Lock()
        self._stopped = False
        self._connections: list[socket.socket] = []
        self._http = _Http(("127.0.0.1", port), self._handler())
        self.port = int(self._http.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer one request as the real server would, prefilling in chunks of 64."""
        self.asked += 1
        if self.mischief is not None:
            own = self.mischief(body)
            if own is not None:
                return own
        time.sleep(self.delay_s)
        ids = self.change_ids(np.asarray(body["input_ids"], np.int64))
        states = self.change_states(fingerprint(ids, self.spec))
        request, rid, wish = _Request(), body["rid"], body["sampling_params"]["custom_params"]
        with self._scheduler:
            if self._stopped:
                return 0, None
            for start in range(0, len(ids), 64):
                stop = min(start + 64, len(ids))
                computed = ForwardStates(torch.from_numpy(ids[start:stop]), list(states[:, start:stop]))
                segment = Segment(request, rid, wish, len(ids), start, stop - start)
                self._capturer.forward([segment], lambda rows, computed=computed: computed)  # type: ignore[misc]
            reply: Reply | None = self._capturer.reply(rid, aborted=False)
        meta = {"id": rid, "num_retractions": 0, **({KEY: [reply.to_dict()]} if reply else {})}
        return 200, {"output_ids": [], "meta_info": self.change_reply(meta)}

    def stop(self) -> None:
        """Stop answering and delete the staging folder; idempotent."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self._connections:  # as the kernel does for a process that ends
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._scheduler:
            self._stopped = True
            self._capturer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                server._connections.append(self.connection)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status: int = 200
                answer: Any = {}
                if self.path == "/abort_request":
                    server.aborted.append(body["rid"])
                else:
                    status, answer = server.generate(body)
                if status == 0:  # the server dies while it has the request
                    self.close_connection = True
                    return
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client has gone
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Silent."""

        return Handler
