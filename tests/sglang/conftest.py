"""Fixtures of the SGLang tests: a small file system, tiny models, references, and the real servers."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.config import ServeConfig
from headrace.testing.envs import engine_env
from headrace.testing.models import make_tiny_model
from headrace.testing.servers import (
    SGLANG_ON_CPU,
    ServerMaker,
    ServerProcess,
    free_port,
    sglang_capture_server,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; skipped where mounting is refused."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a tmpfs cannot be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Callable[[str], Path]:
    """Tiny random float32 models by family, made once."""
    folder = tmp_path_factory.mktemp("sglang-models")

    @functools.cache
    def make(family: str) -> Path:
        # Tensor parallelism needs a key-value head for each rank, MLA its own sizes.
        hidden = 128 if family in ("deepseek_v3", "qwen3_moe") else 64
        return make_tiny_model(folder / family, family, hidden=hidden, tokenizer=smollm2)

    return make


@pytest.fixture(scope="session")
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerMaker]:
    """Make (not start) capture servers of the real SGLang; whatever still runs at the end is stopped."""
    made: list[ServerProcess] = []

    def make(
        model: Path,
        *,
        taps: str,
        release: str = "0.5.23",
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        **serve: Any,
    ) -> ServerProcess:
        folder = tmp_path_factory.mktemp("sglang-server")
        config = ServeConfig(
            **{
                "model": str(model),
                "taps": taps,
                "dtype": "float32",
                "port": free_port(),
                "staging": str(folder / "staging"),
                "staging_bytes": 256 << 20,
                "host_bytes": 32 << 20,
                "python": str(engine_env(f"sglang-{release}")),
                "sglang_args": [*SGLANG_ON_CPU, *flags],
                **serve,
            }
        )
        server = sglang_capture_server(config, folder / "server.log", env)
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()
