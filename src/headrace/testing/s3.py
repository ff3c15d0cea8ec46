"""A real S3 protocol server on loopback (moto, in a process of its own), reached through a gate that counts and can be shut.

with S3Server() as server:
    monkeypatch.setenv(...) for each of server.environment()
    StoreWriter(server.url("run"), spec)
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from types import TracebackType
from typing import Self

from headrace.testing.servers import free_port

KEY, SECRET = "AKIAHEADRACETEST0000", "a-secret-that-must-not-be-seen-anywhere"
"""Credentials to try with; the server takes any."""


class Gate:
    """A TCP forwarder: counts bytes each way, drops every connection and refuses new ones while it is shut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.up = 0
        """Bytes from clients to the server."""
        self.down = 0
        """Bytes from the server to clients."""
        self.shut_after = -1
        """Shut by itself when so many more bytes have gone up; -1 for never."""
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.open()

    def open(self) -> None:
        """Listen."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(256)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        """Cut everything; idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
            sockets, self._sockets = self._sockets, set()
        for one in [*([listener] if listener else []), *sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def reopen_soon(self, seconds: float) -> threading.Thread:
        """Once it has shut, listen again ``seconds`` later: an outage that mends itself. Returns the thread, started."""

        def mend() -> None:
            while self.is_open:
                time.sleep(0.01)
            time.sleep(seconds)
            self.open()

        thread = threading.Thread(target=mend)
        thread.start()
        return thread

    @property
    def is_open(self) -> bool:
        """Whether it listens."""
        return self._listener is not None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # shut
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=10)
            except OSError:  # the server is dead: so is this connection
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._sockets |= {client, server}
            for source, sink, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self.up += len(data) if up else 0
                    self.down += 0 if up else len(data)
                    if up and self.shut_after >= 0:
                        self.shut_after = max(0, self.shut_after - len(data))
                if up and self.shut_after == 0:
                    self.shut_after = -1
                    self.shut()
                    return
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        with self._lock:
            self._sockets -= {source, sink}


class S3Server:
    """See the module docstring. Its objects live in its memory: a killed one comes back empty."""

    def __init__(self, bucket: str = "bucket") -> None:
        self.bucket = bucket
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self.gate = Gate(self.port)

    def start(self) -> None:
        """Start, or start again, with an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{self.bucket}", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                return
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise AssertionError("moto's server does not start; pip install 'moto[server]'")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def environment(self) -> dict[str, str]:
        """What a client needs: the endpoint behind the gate, and credentials."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.gate.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "NO_PROXY": "127.0.0.1",
        }

    def url(self, path: str) -> str:
        """URL of a path in the bucket."""
        return f"s3://{self.bucket}/{path}"

    def uploads(self) -> int:
        """Multipart uploads that were begun and neither finished nor given up."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}/{self.bucket}?uploads", timeout=10
        ) as answer:
            return int(answer.read().count(b"<UploadId>"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gate.shut()
        self.kill()
