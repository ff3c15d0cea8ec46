"""Installs the example packages as pip would: modules and entry points in a folder on the path, here and in child processes."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.cli import main

HERE = Path(__file__).parent
ENTRY_POINTS = {
    "headrace.engines": "plain = plain_engine:PlainEngine",
    "headrace.codecs": "byte-planes = byteplanes_codec:BytePlanes",
    "headrace.methods": "linear = linear_method:LinearDrafter",
}
MODULES = ("plain_engine", "byteplanes_codec", "linear_method")


def make_site(folder: Path) -> Path:
    """A site folder that holds the three examples as one installed distribution."""
    folder.mkdir(parents=True)
    for name in MODULES:
        (folder / f"{name}.py").write_text((HERE / f"{name}.py").read_text())
    info = folder / "headrace_examples-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-examples\nVersion: 1.0\n")
    lines = [f"[{group}]\n{line}\n" for group, line in ENTRY_POINTS.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples are installed."""
    return make_site(tmp_path_factory.mktemp("third-party") / "site")


@contextlib.contextmanager
def installed(site: Path | None) -> Iterator[None]:
    """The examples installed for this process, or (None) not."""
    if site is None:
        yield
        return
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="class")
def site(site_folder: Path) -> Iterator[Path]:
    """The examples installed for as long as a class of tests (or one test) runs."""
    with installed(site_folder):
        yield site_folder


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str


def headrace(site: Path | None, *args: object, apart: bool = False) -> Done:
    """The command line with the examples installed or not; ``apart`` runs it in a process of its own, as a user does."""
    words = list(map(str, args))
    if apart:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site or ""), os.environ.get("PYTHONPATH")])),
        }
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *words], capture_output=True, text=True, check=False, env=env
        )
        return Done(done.returncode, done.stdout, done.stderr)
    out, err = io.StringIO(), io.StringIO()
    with installed(site), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return Done(code, out.getvalue(), err.getvalue())
