"""Environments of the real engines, and the processes started in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.errors import ConfigError, EngineUnavailableError
from headrace.testing import envs
from headrace.testing.servers import ServerProcess, free_port

ROOT = Path(__file__).resolve().parents[2]


def test_recipes_are_readable_and_named_by_their_packages() -> None:
    names = envs.env_names()
    assert {"sglang-0.5.20", "sglang-0.5.23"} <= set(names)
    recipes = [envs.Recipe.read(name) for name in names]
    assert len({recipe.folder_name for recipe in recipes}) == len(names)
    other = recipes[0].model_copy(update={"no_deps": ("x==1",)})
    assert other.folder_name != recipes[0].folder_name
    same = recipes[0].model_copy(update={"entry_points": {"g": {"a": "b:c"}}})
    assert same.folder_name == recipes[0].folder_name, "entry points live in the thin layer"
    with pytest.raises(ConfigError, match="there are"):
        envs.engine_env("nothing-1.0")


@pytest.fixture
def small_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe that installs nothing but pip's own metadata: two tiny local packages."""
    for name in ("one", "two"):
        package = tmp_path / name
        package.mkdir()
        (package / f"small_{name}.py").write_text(f"NAME = {name!r}\n")
        (package / "setup.py").write_text(
            f"from setuptools import setup\nsetup(name='small-{name}', version='1', py_modules=['small_{name}'])\n"
        )
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "small-1.toml").write_text(
        f'torch = "{tmp_path / "one"}"\nrequirements = []\nno_deps = ["{tmp_path / "two"}"]\nstartup = ["small_two"]\n'
        '[entry_points."headrace.small"]\nthing = "small_one:NAME"\n'
    )
    monkeypatch.setattr(envs, "_RECIPES", recipes)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return "small-1"


@pytest.mark.slow
def test_an_environment_is_built_once_by_many_and_sees_this_headrace(
    small_recipe: str, tmp_path: Path
) -> None:
    """After an attempt that failed, and one that was killed half-way: two processes at once, one build, one result."""
    recipe = tmp_path / "recipes" / "small-1.toml"
    right = recipe.read_text()
    recipe.write_text(right.replace(str(tmp_path / "two"), str(tmp_path / "nowhere")))
    with pytest.raises(EngineUnavailableError, match="nowhere"):
        envs.engine_env(small_recipe)
    root = tmp_path / "cache" / "envs"
    assert not list(root.glob("*/headrace-complete.json"))
    recipe.write_text(right)
    half = root / envs.Recipe.read(small_recipe).folder_name
    half.mkdir()
    (half / "left over").write_text("x")
    code = (
        "import sys; from pathlib import Path; from headrace.testing import envs\n"
        f"envs._RECIPES = Path({str(tmp_path / 'recipes')!r})\nprint(envs.engine_env({small_recipe!r}))"
    )
    builders = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    pythons = {builder.communicate()[0].strip() for builder in builders}
    assert len(pythons) == 1
    (python,) = pythons
    assert half.with_suffix(".log").read_text().count("$ ") == 5, "a venv, three pip runs and the layer, once"
    assert not (half / "left over").exists()
    probe = (
        "import importlib.metadata as m, importlib.util, json, sys\n"
        "points = [p for g in ('sglang.srt.plugins', 'headrace.small') for p in m.entry_points(group=g)]\n"
        "print(json.dumps({'file': importlib.util.find_spec('headrace').origin, 'small': 'small_two' in sys.modules,"
        " 'points': {p.name: p.value for p in points}}))"
    )
    seen = json.loads(
        subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True).stdout
    )
    assert Path(seen["file"]).resolve() == ROOT / "src" / "headrace" / "__init__.py"
    assert seen["small"], "startup modules are imported"
    assert seen["points"] == {"headrace": "headrace.sglang_plugin:register", "thing": "small_one:NAME"}


@pytest.mark.slow
@pytest.mark.sglang
def test_installing_headrace_moves_no_pin_of_sglang(tmp_path: Path) -> None:
    """pip would add packages that SGLang's environment lacks, and change none that it has."""
    base = Path(envs.engine_env("sglang-0.5.23")).parents[2].with_suffix("") / "bin" / "python"
    report = tmp_path / "report.json"
    command = [str(base), "-m", "pip", "install", "--dry-run", "--quiet", "--report", str(report), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    chosen = {
        item["metadata"]["name"].lower().replace("_", "-")
        for item in json.loads(report.read_text())["install"]
    }
    listed = subprocess.run(
        [str(base), "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    )
    present = {item["name"].lower().replace("_", "-") for item in json.loads(listed.stdout)}
    assert "headrace" in chosen
    assert not chosen & present, f"these would be replaced: {sorted(chosen & present)}"


def test_entry_points_of_a_checkout_are_those_of_its_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert envs.entry_points()["sglang.srt.plugins"] == project["entry-points"]["sglang.srt.plugins"]


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_server_is_ended_with_its_children_and_nobody_else(tmp_path: Path, how: str) -> None:
    port = free_port()
    server = ServerProcess([sys.executable, "-c", SERVER, str(port)], port, tmp_path / "log")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with server:
        child = int(server.log.read_text().split()[1])
        assert alive(child) and alive(server.pid)
        getattr(server, how)()
        assert not alive(child) and not server.running
    assert alive(bystander.pid)
    bystander.kill()
    bystander.wait()


def test_a_server_that_dies_shows_its_log(tmp_path: Path) -> None:
    code = "import sys; print('the reason'); sys.exit(7)"
    server = ServerProcess([sys.executable, "-c", code], free_port(), tmp_path / "log", env=dict(os.environ))
    with pytest.raises(EngineUnavailableError, match=r"code 7[\s\S]*the reason"):
        server.start().wait_healthy(30)
