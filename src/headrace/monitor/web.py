"""The web page that follows a run: a few JSON endpoints, the page's own files, and /metrics. Nothing comes from elsewhere."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from headrace.errors import ConfigError
from headrace.extract.files import RunFiles
from headrace.monitor.config import MonitorConfig
from headrace.monitor.guard import Guard, is_loopback
from headrace.monitor.history import History
from headrace.monitor.metrics import exposition
from headrace.monitor.status import read_status

STATIC = Path(__file__).parent / "static"


def make_app(run: Path, token: str = "") -> Starlette:
    """The application for the run at ``run``. Raises InputError when there is none."""
    files = RunFiles.find(run)
    history = History(files.events)

    # Plain functions: Starlette runs them in threads, so a slow disk holds up one visitor and not the loop.
    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def status(request: Request) -> Response:
        return JSONResponse(read_status(files.store).to_json())

    def course(request: Request) -> Response:
        history.update()
        return JSONResponse(history.to_json())

    def metrics(request: Request) -> Response:
        return Response(
            exposition(read_status(files.store)), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/status", status),
            Route("/api/history", course),
            Route("/metrics", metrics),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, token=token)],
    )


def serve(config: MonitorConfig, say: Callable[[str], None]) -> None:
    """Serve until interrupted. Raises InputError when there is no run, ConfigError when the address cannot be had."""
    open_to_others = not is_loopback(config.host)
    token = config.token or (secrets.token_urlsafe(16) if open_to_others else "")
    app = make_app(config.run, token)
    listening = _listen(config.host, config.port)
    shown = socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listening.getsockname()[1]}/"
    say(
        f"following {config.run} at {address}{f'?token={token}' if token else ''} (Ctrl-C ends it; the run goes on)"
    )
    if open_to_others:
        say("the page is not encrypted; on an untrusted network prefer an ssh tunnel to a loopback address")
    # Ctrl-C is how a monitor ends: no error, and nothing to resume.
    with listening, contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(64)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {exc.strerror or exc}; give another --host or --port (0 takes a free one)"
        ) from exc
    return listening
