"""Real inference servers on free loopback ports, for tests and benchmarks: started, waited for, and stopped by process id alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from headrace.engines.config import ServeConfig
from headrace.errors import EngineUnavailableError
from headrace.extract.own_server import die_with_parent


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server and all processes it started. A context manager: entering starts it and waits until it is healthy."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        health: str = "/health",
    ) -> None:
        """``command`` must listen on 127.0.0.1:``port``; ``env`` is added to this process's; ``log`` takes all its output."""
        self.command = list(command)
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.env = {**os.environ, **(env or {})}
        self._health = health
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server's main process. Raises EngineUnavailableError before :meth:`start`."""
        return self._started().pid

    @property
    def running(self) -> bool:
        """Whether the main process is alive."""
        return self._process is not None and self._process.poll() is None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineUnavailableError(f"{self.command[0]} was not started; call start() first")
        return self._process

    def start(self) -> Self:
        """Start the processes and return at once; see :meth:`wait_healthy`. They end with the thread that calls this."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # A session of its own: a Ctrl-C in the terminal reaches the test, which then stops the server in order.
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A test or benchmark that is killed leaves no server behind, which would hold a GPU.
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        return self

    def wait_healthy(self, timeout: float = 240.0) -> Self:
        """Return when the health endpoint answers 200. Raises EngineUnavailableError, with the log's end, if it dies or is late."""
        process, deadline = self._started(), time.monotonic() + timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise EngineUnavailableError(
                    f"the server exited with code {process.returncode} while starting:\n{self.tail()}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + self._health, timeout=10.0).status_code == 200:
                    return self
            time.sleep(0.2)
        self.stop()
        raise EngineUnavailableError(f"the server was not healthy after {timeout:.0f} s:\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def stop(self, grace: float = 10.0) -> None:
        """Terminate the main process, then whatever of its processes is left after ``grace`` seconds; idempotent."""
        self._end(signal.SIGTERM, grace)

    def kill(self) -> None:
        """Kill every process at once, as a power cut would."""
        self._end(signal.SIGKILL, 5.0)

    def _end(self, how: signal.Signals, grace: float) -> None:
        if self._process is None:
            return
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self._process.pid)
            family = [main, *main.children(recursive=True)]
        for process in family if how is signal.SIGKILL else family[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(how)
        psutil.wait_procs(family[:1], timeout=grace)
        _, alive = psutil.wait_procs(family, timeout=0.5)  # a server that ends in order takes its own along
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5.0)
        self._process.wait()

    def __enter__(self) -> Self:
        """Healthy; one that was started before, so that several start side by side, is not started a second time."""
        if self._process is None:
            self.start()
        return self.wait_healthy()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


ServerMaker = Callable[..., ServerProcess]
"""A fixture that makes servers; they are stopped when the tests end."""

SGLANG_ON_CPU = (
    "--max-total-tokens=8192", "--context-length=2048", "--mem-fraction-static=0.3", "--max-running-requests=16",
    "--chunked-prefill-size=64",
    "--sleep-on-idle",
)  # fmt: skip
"""SGLang's flags for a small model in a test; the platform of :mod:`headrace.testing.sglang_cpu` supplies the rest."""


def sglang_capture_server(
    config: ServeConfig, log: Path, env: Mapping[str, str] | None = None
) -> ServerProcess:
    """The server that ``headrace serve`` would start with ``config``, on its port; not started yet.

    ``config.python`` is the interpreter of an environment of :mod:`headrace.testing.envs`.
    """
    from headrace.engines.sglang.launch import build_launch
    from headrace.target import Target

    launch = build_launch(config, Target.open(config.model))
    return ServerProcess(launch.command, config.port, log, env={**QUIET, **launch.environment, **(env or {})})


QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
"""Environment of a server in a test: no network, and no threads that spin for cores the tests need."""
