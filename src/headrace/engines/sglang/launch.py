"""The command line that starts SGLang ready for capture: right flags for the release installed, or a reason why not."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace._version import __version__
from headrace.engines.config import ServeConfig
from headrace.engines.sglang.families import check_taps, naming
from headrace.errors import ConfigError, PreflightError
from headrace.sglang_plugin.protocol import ENVIRONMENT, PluginConfig
from headrace.sglang_plugin.releases import FIRST, LAST, NATIVE_SINCE, release
from headrace.target import Target
from headrace.types import FINAL, Tap, parse_taps

_MOST_STAGING = 64 << 30
# Asked of the interpreter that will run SGLang: what is installed beside it.
_INSPECT = """
import importlib.metadata as m, json
found = {"plugins": [p.value for p in m.entry_points(group="sglang.srt.plugins")]}
for name in ("sglang", "headrace"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Launch:
    """A command and the environment variables it needs on top."""

    command: list[str]
    environment: dict[str, str]
    version: str
    """SGLang's."""
    tested: bool
    config: PluginConfig

    def shell(self) -> str:
        """One line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def build_launch(config: ServeConfig, target: Target) -> Launch:
    """Raises ConfigError for taps or flags that cannot be, PreflightError for an environment that cannot serve them."""
    try:
        taps = parse_taps(config.taps, target.num_layers)
    except ValueError as exc:
        raise ConfigError(f"taps for {target.name}: {exc}") from exc
    check_taps(target, taps)
    _check_flags(config.sglang_args)
    python = config.python or sys.executable
    version = _inspect(python)
    native = release(version) >= NATIVE_SINCE and any(tap != FINAL for tap in taps)
    plugin = PluginConfig(
        taps=taps,
        staging=str(Path(config.staging).absolute()),
        staging_bytes=int(config.staging_bytes) or _half_of_free(Path(config.staging)),
        run=uuid.uuid4().hex[:12],
        source="native" if native else "hooks",
        writers=config.writers,
        host_bytes=int(config.host_bytes),
    )
    command = [python, "-m", "sglang.launch_server", "--model-path", str(target.path)]
    command += ["--host", config.host, "--port", str(config.port)]
    command += ["--dtype", config.dtype] if config.dtype else []
    command += [] if config.prefix_cache else ["--disable-radix-cache"]
    command += [] if target.has_tokenizer else ["--skip-tokenizer-init"]
    command += _native_flags(target, taps) if native else ["--enable-return-hidden-states"]
    command += config.sglang_args
    environment = {ENVIRONMENT: plugin.to_json(), **_plugin_list(os.environ.get("SGLANG_PLUGINS", ""))}
    tested = release(version) <= LAST
    return Launch(command, environment, version, tested, plugin)


def _native_flags(target: Target, taps: tuple[Tap, ...]) -> list[str]:
    outputs = sorted(tap - 1 for tap in taps if tap != FINAL)
    flags = ["--speculative-algorithm", naming(target), "--enable-return-aux-hidden-states"]
    return [*flags, "--return-aux-hidden-state-layer-ids", *map(str, outputs)]


def _plugin_list(allowed: str) -> dict[str, str]:
    """SGLANG_PLUGINS restricts which plug-ins are loaded; ours must be among them."""
    if not allowed or "headrace" in allowed.split(","):
        return {}
    return {"SGLANG_PLUGINS": f"{allowed},headrace"}


def _check_flags(flags: list[str]) -> None:
    """Refuse before minutes of loading what the plug-in would refuse after them."""
    flags = [word for flag in flags for word in flag.split("=", 1)]
    words = dict(zip(flags, [*flags, ""][1:], strict=True))
    for name, reason in (
        ("--enable-two-batch-overlap", "layers run in two batches capture nothing"),
        ("--speculative-draft-model-path", "rows of rejected tokens would mix with the prompt's"),
        ("--speculative-algorithm", "headrace serve sets it, where it names the capture's convention"),
        ("--enable-prefill-cp", "each rank would hold a part of the rows"),
    ):
        if name in words:
            raise PreflightError(f"{name} cannot be combined with capture: {reason}; drop it")
    for name in ("--pp-size", "--pipeline-parallel-size"):
        if words.get(name, "1") != "1":
            raise PreflightError(
                f"{name} cannot be combined with capture: only the last stage's layers would be seen; use --tp-size"
            )
    if words.get("--disaggregation-mode", "null") != "null":
        raise PreflightError(
            "--disaggregation-mode cannot be combined with capture: its result path drops the states; drop it"
        )


def _inspect(python: str) -> str:
    """SGLang's version in the environment of ``python``. Raises PreflightError unless this Headrace is installed beside it."""
    try:
        done = subprocess.run(
            [python, "-c", _INSPECT], capture_output=True, text=True, timeout=120, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as exc:
        raise PreflightError(
            f"{python} does not run ({exc}); give --python the interpreter of SGLang's environment"
        ) from exc
    if "sglang" not in found:
        raise PreflightError(
            f"SGLang is not installed beside {python}; give --python the interpreter of its environment"
        )
    plugged = any(value.startswith("headrace.sglang_plugin") for value in found["plugins"])
    if found.get("headrace") != __version__ or not plugged:
        has = f"has Headrace {found['headrace']}" if "headrace" in found else "lacks Headrace"
        if found.get("headrace") == __version__:
            has += " whose plug-in is not registered there (an old or partial install)"
        raise PreflightError(
            f"the environment of {python} {has}; run {python} -m pip install headrace=={__version__}"
        )
    version = str(found["sglang"])
    if release(version) < FIRST:
        first = ".".join(map(str, FIRST))
        raise PreflightError(
            f"SGLang {version} misplaces captured rows or lacks plug-ins; install {first} or newer"
        )
    return version


def _half_of_free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.absolute().parent
    return min(_MOST_STAGING, shutil.disk_usage(folder).free // 2)
