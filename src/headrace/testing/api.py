"""An OpenAI-compatible endpoint on loopback that does what a script says: answers, lies, stalls, breaks off."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Script = Callable[[dict[str, Any], int], Any]
"""(request body, how many requests came before) → a body for status 200, or (status, body), or (status, body, headers).

A body that is text is sent as it is; the body ``None`` closes the connection without a reply.
"""


def reply(content: Any, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """A usual answer. ``message`` in ``more`` adds to the message, ``choice`` to the choice, the rest to the body."""
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    choice = {"index": 0, "message": message, "finish_reason": finish, **more.pop("choice", {})}
    words = len(str(content or "").split())
    return {
        "choices": [choice],
        "model": "m",
        "usage": {"prompt_tokens": 10, "completion_tokens": words},
        **more,
    }


class ScriptedApi:
    """Serves ``POST /v1/chat/completions`` by a script and other paths from a table; remembers what it was asked."""

    def __init__(self, script: Script, paths: dict[str, Any] | None = None) -> None:
        self.script = script
        self.paths = paths or {}
        """path → JSON for GET, or a function of the body for POST."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._open = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, body: dict[str, Any], headers: dict[str, str]) -> Any:
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
        try:
            return self.script(body, number)
        finally:
            with self._lock:
                self._open -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(
                    (200, api.paths[self.path]) if self.path in api.paths else (404, {"detail": "Not Found"})
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path == "/v1/chat/completions":
                    self._send(api._answer(body, {k.lower(): v for k, v in self.headers.items()}))
                elif self.path in api.paths:
                    self._send((200, api.paths[self.path](body)))
                else:
                    self._send((404, {"detail": "Not Found"}))

            def _send(self, answer: Any) -> None:
                status, body, headers = (
                    answer
                    if isinstance(answer, tuple) and len(answer) == 3
                    else ((*answer, {}) if isinstance(answer, tuple) else (200, answer, {}))
                )
                if body is None:
                    self.close_connection = True
                    return
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                with contextlib.suppress(OSError):  # the client gave up waiting
                    self.send_response(status)
                    for name, value in {"content-length": str(len(data)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Silence: tests look at what was asked, not at a log."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
