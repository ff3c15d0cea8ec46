"""The shape of the package: imports point one way, no pickle, no print, errors drawn in one tree, light imports."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace import errors

ROOT = Path(headrace.__file__).parent
# Lower may not import higher; equals may, except where FORBIDDEN says no.
LAYER = {
    "_version": 0, "errors": 0, "types": 1, "files": 2, "config": 2, "remote": 2, "plugins": 2, "modelfiles": 2, "bits": 2, "memory": 2, "child": 2, "cores": 2, "recipe": 3, "target": 3, "taps": 3, "demo": 3,
    "sglang_plugin": 3, "store": 4, "data": 4, "engines": 4, "extract": 5, "verify": 5, "draft": 6, "evaluate": 7, "monitor": 8,
    "run": 9, "cli": 10, "testing": 11, "__main__": 11, "__init__": 1,
}  # fmt: skip
FORBIDDEN = {
    ("engines", "draft"),
    ("draft", "engines"),
    ("store", "data"),
    ("data", "store"),
    ("engines", "store"),
    ("store", "engines"),
    ("engines", "data"),
    ("data", "engines"),
}


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if "environments" not in p.parts)


def imports(path: Path) -> set[str]:
    """Top-level packages of ours that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "headrace" else [f"headrace.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("headrace.")}
    return found


def package_of(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules():
        here = package_of(path)
        for other in imports(path):
            if other not in LAYER:
                continue  # a public name re-exported by the package itself
            if LAYER[other] > LAYER[here] or (here, other) in FORBIDDEN:
                wrong.append(f"{path.relative_to(ROOT)} imports headrace.{other}")
    assert not wrong, "\n".join(wrong)
    assert {package_of(p) for p in modules()} <= set(LAYER), "a new package needs its place in LAYER"


def test_the_plugin_imports_nothing_of_ours_but_types() -> None:
    for path in (ROOT / "sglang_plugin").rglob("*.py"):
        assert imports(path) <= {"types", "sglang_plugin", "_version"}, path


def test_no_pickle_no_print_no_bare_except() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import) and any(a.name == "pickle" for a in node.names):
                wrong.append(f"{path}: pickle")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{path}:{node.lineno}: print")
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception",))
            ):
                wrong.append(f"{path}:{node.lineno}: catches everything")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "load"
            ):
                keywords = {k.arg: k.value for k in node.keywords}
                if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
                    safe = keywords.get("weights_only")
                    if not (isinstance(safe, ast.Constant) and safe.value is True):
                        wrong.append(f"{path}:{node.lineno}: torch.load without weights_only=True")
    assert not wrong, "\n".join(wrong)


def error_classes() -> list[type[Exception]]:
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.HeadraceError)]


@pytest.mark.parametrize("cls", error_classes())
def test_errors_are_drawn_documented_and_picklable(cls: type[errors.HeadraceError]) -> None:
    assert cls.__name__ in (errors.__doc__ or ""), "draw it in the module's tree"
    assert cls.__doc__
    assert cls.exit_code in (1, 2, 3, 130)
    again = pickle.loads(pickle.dumps(cls("row 3 of x.jsonl")))  # noqa: S301 - made one line above
    assert type(again) is cls and str(again) == "row 3 of x.jsonl"


def test_public_names_are_sorted_and_real() -> None:
    assert headrace.__all__ == sorted(headrace.__all__)
    assert all(hasattr(headrace, name) for name in headrace.__all__)


def test_importing_the_package_is_light() -> None:
    code = "import sys, headrace; print([m for m in ('torch', 'transformers', 'pyarrow', 'pydantic') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_package_inits_are_light() -> None:
    """Every subpackage's config and __init__ import without torch, so that any --help is quick."""
    packages = [p.parent.relative_to(ROOT).as_posix().replace("/", ".") for p in ROOT.glob("*/__init__.py")]
    names = [f"headrace.{p}" for p in packages if p not in ("sglang_plugin",)]
    names += [f"headrace.{p}.config" for p in packages if (ROOT / p / "config.py").exists()]
    names += ["headrace.engines.sglang.launch"]  # what headrace serve needs
    code = f"import sys, importlib\nfor n in {names!r}:\n    importlib.import_module(n)\n    assert 'torch' not in sys.modules, n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
