"""Environments of the inference engines, built once from a package index and kept, so that tests run the real engine.

SGLang and vLLM pin each other's dependencies away, so neither may share the environment Headrace is developed in. Each has
a recipe, ``environments/NAME.toml``, and an environment of two layers:

- ``envs/NAME-HASH``: a virtual environment with the engine's packages, gigabytes, named by a hash of the recipe's packages;
- ``envs/NAME-HASH.d/SOURCE``: a thin one on top that adds this copy of Headrace (a link to the package and its entry points,
  what ``pip install --editable --no-deps`` would add), so that several checkouts share the gigabytes.

The root is ``$HEADRACE_CACHE`` or ``~/.cache/headrace``. Building is safe with several processes at once (one builds, the
others wait) and after a kill (an environment without its completion marker is built anew).

Recipe keys: ``torch`` (installed first, alone: one place picks the build), ``requirements`` (resolved by pip), ``no_deps``
(installed as named, their metadata ignored), ``startup`` (modules imported whenever its Python starts) and
``entry_points`` (of a made-up distribution ``headrace-testing``; this is how a test plug-in gets into an engine).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

import headrace
from headrace.config import Section, build, read_toml
from headrace.demo import cache_root
from headrace.errors import ConfigError, EngineUnavailableError
from headrace.files import read_json, write_json

_LOG = logging.getLogger(__name__)
_RECIPES = Path(__file__).parent / "environments"
_MARKER = "headrace-complete.json"


class Recipe(Section):
    """What goes into one environment; see the module docstring."""

    name: str
    torch: str
    requirements: tuple[str, ...]
    no_deps: tuple[str, ...] = ()
    startup: tuple[str, ...] = ()
    entry_points: dict[str, dict[str, str]] = Field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> Recipe:
        """Read ``environments/NAME.toml``. Raises ConfigError for an unknown name or a wrong key."""
        path = _RECIPES / f"{name}.toml"
        if not path.is_file():
            raise ConfigError(f"there is no engine environment {name!r}; there are {env_names()}")
        return build(cls, {"name": name, **read_toml(path)}, str(path))

    @property
    def folder_name(self) -> str:
        """Changes with the packages and the Python version, and with nothing else."""
        parts = [
            f"{sys.version_info.major}.{sys.version_info.minor}",
            self.torch,
            *self.requirements,
            "--",
            *self.no_deps,
        ]
        return f"{self.name}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"


def env_names() -> list[str]:
    """Names of the recipes, sorted."""
    return sorted(path.stem for path in _RECIPES.glob("*.toml"))


def engine_env(name: str) -> Path:
    """Build the environment ``name`` if it is missing and return its Python, which imports the engine and this Headrace.

    The first build takes a minute or two and gigabytes of the cache folder. Raises ConfigError for an unknown name and
    EngineUnavailableError, with the end of pip's log, when the packages cannot be installed.
    """
    recipe = Recipe.read(name)
    root = cache_root() / "envs"
    root.mkdir(parents=True, exist_ok=True)
    base = root / recipe.folder_name
    with _locked(root / f"{recipe.folder_name}.lock"):
        if not (base / _MARKER).is_file():
            _build(recipe, base)
        return _layer(recipe, base)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it when the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(recipe: Recipe, base: Path) -> None:
    _LOG.info("building the environment %s in %s (once; a minute or two)", recipe.name, base)
    shutil.rmtree(base, ignore_errors=True)
    log = base.with_name(base.name + ".log")
    log.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", str(base)], log)
    pip = [
        str(_python(base)),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
    ]
    _run([*pip, recipe.torch], log)
    _run([*pip, recipe.torch, *recipe.requirements], log)
    if recipe.no_deps:
        _run([*pip, "--no-deps", *recipe.no_deps], log)
    write_json(base / _MARKER, {"recipe": recipe.name, "torch": recipe.torch, "python": sys.version})


def _run(command: list[str], log: Path) -> None:
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        raise EngineUnavailableError(
            f"cannot build an engine environment, exit code {code}; the whole log is {log}. It ends:\n"
            + "\n".join(tail)
        )


def _python(env: Path) -> Path:
    return env / "bin" / "python"


def _site(env: Path) -> Path:
    return env / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _layer(recipe: Recipe, base: Path) -> Path:
    """Make (or bring up to date) the thin environment of this checkout; returns its Python."""
    package = Path(headrace.__file__).resolve().parent
    env = base.with_name(base.name + ".d") / hashlib.sha256(str(package).encode()).hexdigest()[:12]
    ours = entry_points()
    want = {
        "package": str(package),
        "headrace": ours,
        "testing": recipe.entry_points,
        "startup": list(recipe.startup),
    }
    marker = env / _MARKER
    if marker.is_file() and read_json(marker) == want:
        return _python(env)
    shutil.rmtree(env, ignore_errors=True)
    # The thin environment has no pip: nothing is ever installed into it.
    _run([str(_python(base)), "-m", "venv", "--without-pip", str(env)], base.with_name(base.name + ".log"))
    site = _site(env)
    # addsitedir, not a plain path line: it also reads the .pth files of the layer below.
    (site / "headrace-base.pth").write_text(f"import site; site.addsitedir({str(_site(base))!r})\n")
    (site / "headrace").symlink_to(package)
    for module in recipe.startup:
        (site / f"{module}.pth").write_text(f"import {module}\n")
    _write_distribution(site, "headrace", ours)
    _write_distribution(site, "headrace-testing", recipe.entry_points)
    write_json(marker, want)
    return _python(env)


def entry_points() -> dict[str, dict[str, str]]:
    """Entry points of this Headrace by group: from ``pyproject.toml`` in a checkout, else from its installed metadata."""
    project = Path(headrace.__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        groups: dict[str, Any] = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        return {"console_scripts": groups.get("scripts", {}), **groups.get("entry-points", {})}
    found: dict[str, dict[str, str]] = {}
    for point in importlib.metadata.distribution("headrace").entry_points:
        found.setdefault(point.group, {})[point.name] = point.value
    return found


def _write_distribution(site: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """What makes ``importlib.metadata`` see a distribution and its entry points."""
    folder = site / f"{name.replace('-', '_')}-{headrace.__version__}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {headrace.__version__}\n"
    )
    lines: list[str] = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def main(names: list[str]) -> int:
    """``python -m headrace.testing.envs [NAME ...]``: build those environments (all without names), one line of JSON each."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for name in names or env_names():
        sys.stdout.write(json.dumps({"name": name, "python": str(engine_env(name))}) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
