"""A capture server that a worker starts for itself, on its own host and GPUs, and that never outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from headrace.config import build
from headrace.engines.config import ServeConfig
from headrace.engines.sglang.launch import build_launch
from headrace.errors import ConfigError, EngineUnavailableError
from headrace.extract.config import ExtractConfig
from headrace.target import Target

TAIL_BYTES = 4000
STOP_SECONDS = 10.0
STAGING = Path("/dev/shm")
NAME = "headrace-worker-"
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class OwnServer:
    """``headrace serve`` for one worker: the taps and dtype of the extraction, a free port, tensor parallel over ``ray_gpus``."""

    def __init__(self, config: ExtractConfig, target: Target) -> None:
        self.patience = 60 * config.engine_wait_minutes
        port = _free_port()
        own = {
            "model": config.model,
            "revision": config.revision,
            "taps": config.taps,
            "dtype": config.dtype,
            "port": port,
            "staging": str(STAGING / f"{NAME}{os.getpid()}"),
            **config.serve,
        }
        if fixed := {"model", "taps", "port", "host"} & config.serve.keys():
            raise ConfigError(
                f"serve: {sorted(fixed)} of a worker's own server follow from the extraction; leave them out"
            )
        flags = list(own.get("sglang_args", ()))
        if config.ray_gpus > 1 and not any(flag.startswith(("--tp", "--tensor-parallel")) for flag in flags):
            own["sglang_args"] = [*flags, "--tp-size", str(config.ray_gpus)]
        self.launch = build_launch(build(ServeConfig, own, "serve"), target)
        self.url = f"http://127.0.0.1:{port}"
        self.log = Path(tempfile.gettempdir()) / f"headrace-server-{os.getpid()}.log"
        self._staging = None if "staging" in config.serve else STAGING / f"{NAME}{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start it and wait until it is healthy; its URL. Raises EngineUnavailableError with the end of its log."""
        _sweep()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.launch.command,
                env={**os.environ, **self.launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineUnavailableError(
                    f"the server on {socket.gethostname()} ended with code {self._process.returncode} ({self.log}):\n{self._tail()}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=10.0).status_code == 200:
                    return self.url
            time.sleep(0.5)
        self.stop()
        raise EngineUnavailableError(
            f"the server on {socket.gethostname()} was not healthy within {self.patience / 60:g} minutes (--engine-wait-minutes; {self.log}):\n"
            + self._tail()
        )

    def _tail(self) -> str:
        return self.log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")

    def stop(self) -> None:
        """End it with all its processes; idempotent."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # what is left of its session, its schedulers among it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.log.unlink(missing_ok=True)
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)


def _sweep() -> None:
    """Free the memory in which servers of workers that were killed had staged captures."""
    for folder in STAGING.glob(f"{NAME}*"):
        pid = folder.name.removeprefix(NAME)
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def die_with_parent() -> None:
    """In the child, before it becomes the server: a worker that is killed takes its server along, and the GPUs are free again."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
