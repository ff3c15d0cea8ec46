"""The shape that keeps the house in order: sizes, documented names, documents whose commands, links and imports are true."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.cli import COMMANDS
from headrace.cli.parse import parse
from headrace.errors import ConfigError

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TOOLS = sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "tests" / "thirdparty").glob("*_*.py")])
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 400, 60, 7
# Flags of SGLang, vLLM, torchrun, ssh, nvidia-smi, pip, git and our tools that pages mention beside ours.
FOREIGN = {
    "--chunked-prefill-size", "--json-model-override-args", "--kv-transfer-config", "--mem-fraction-static", "--nproc-per-node",
    "--quick", "--speculative-algorithm", "--speculative-config", "--tp-size", "--trust-remote-code", "--no-shuffle", "--editable",
    "--speculative-draft-model-path", "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    "--check", "--strict", "--version", "--help", "--json", "--config", "--nnodes", "--rdzv-backend", "--rdzv-endpoint",
}  # fmt: skip


# --- sizes ------------------------------------------------------------------------------------------------------------


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_files_and_functions_stay_small() -> None:
    wrong = []
    for path in [*SOURCES, *TOOLS]:
        lines = len(path.read_text().splitlines())
        if lines >= MOST_LINES:
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in functions(path):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size >= MOST_FUNCTION_LINES:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {size} lines")
    assert not wrong, "\n".join(wrong)


def test_every_file_says_why_it_exists() -> None:
    assert not [
        p for p in [*SOURCES, *TOOLS] if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text()))
    ]


@pytest.mark.parametrize("name", ["plain_engine", "byteplanes_codec", "linear_method"])
def test_worked_examples_fit_a_screen_and_stand_in_their_page(name: str) -> None:
    file = ROOT / "tests" / "thirdparty" / f"{name}.py"
    assert len(file.read_text().splitlines()) < 60
    assert any(f'--8<-- "tests/thirdparty/{name}.py"' in page.read_text() for page in PAGES)


# --- public names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package", ["headrace", "headrace.engines", "headrace.store", "headrace.draft.config"]
)
def test_public_names_are_sorted_real_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{package}.{name}"


def api_names() -> list[str]:
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", api_names())
def test_the_reference_is_real_and_documented(name: str) -> None:
    """What docs/api.md shows exists, and it and each of its public methods says what it does."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    assert inspect.getdoc(value), name
    if not inspect.isclass(value):
        return
    for member, function in vars(value).items():
        documented = isinstance(function, (classmethod, staticmethod, property)) or inspect.isfunction(
            function
        )
        if documented and not member.startswith(("_", "test_")):
            assert inspect.getdoc(getattr(value, member)), f"{name}.{member}"


def test_everything_at_the_top_is_in_the_reference() -> None:
    shown = {name.rpartition(".")[2] for name in api_names()}
    assert set(headrace.__all__) - shown <= {"Tap", "__version__"}


# --- documents --------------------------------------------------------------------------------------------------------


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of each fenced block, and ("", content) of each indented one."""
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
        yield match[2], match[3]
    outside = re.sub(r"^( *)```\w*\n.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield "", "\n".join(line for line in outside.splitlines() if line.startswith("    "))


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of every `headrace ...` line in the blocks of a page, and of whole ones in its text."""
    for language, content in blocks(text):
        if language in ("text", "python", "toml", "json"):
            content = "\n".join(line[2:] for line in content.splitlines() if line.startswith("$ "))
        for line in content.replace("\\\n", " ").splitlines():
            for part in line.split("#")[0].split(";"):
                words = re.sub(r"^\s*(nohup |\$ |.*-m (?=headrace))", "", re.split(r"[>|&]", part)[0]).strip()
                if words.startswith("headrace "):
                    yield shlex.split(words)[1:]

    for code in re.findall(r"`(headrace [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        words = shlex.split(code.split("[")[0])[1:]
        if len(words) > 2 and "..." not in words:  # shorter ones name a command, not a whole line
            yield words


def test_commands_are_found() -> None:
    text = "```sh\nheadrace a b   # c\nheadrace d --x \\\n  'y z'; headrace e > log\n```\n\n    headrace f\n"
    assert list(commands(text)) == [["a", "b"], ["d", "--x", "y z"], ["e"], ["f"]]
    assert list(commands("```text\nheadrace: no\n$ headrace g -- --tp 8\n```\n")) == [
        ["g", "--", "--tp", "8"]
    ]


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.name)
def test_every_command_in_the_docs_parses(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By today's schemas, with recipes read from the repository: an option that was renamed fails here."""
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    if page in RECIPES:  # what their comments say, as an indented block
        text = "\n".join(f"  {line[1:]}" for line in text.splitlines() if line.startswith("#"))
        assert len(list(commands(text))) == len(re.findall(r"^ +headrace ", text, re.MULTILINE))
    for args in commands(text):
        if args[0].startswith("-") or args[0] == "COMMAND":
            continue
        assert args[0] in COMMANDS, f"{page.name}: headrace {' '.join(args)}: no such command"
        config = importlib.import_module(f"headrace.cli.{COMMANDS[args[0]][0]}").Config
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                parse(config, args[0], "", args[1:])
        except (ConfigError, SystemExit) as exc:
            pytest.fail(f"{page.name}: headrace {shlex.join(args)}: {said.getvalue()[-300:]} {exc}")


def our_options() -> set[str]:
    text = (ROOT / "docs" / "commands.md").read_text()
    return set(re.findall(r"--[a-z0-9][\w.-]*", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_named_in_the_text_exists(page: Path) -> None:
    if page.name == "commands.md":
        return
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    named = {option for code in inline for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*", code)}
    assert not named - our_options() - FOREIGN - {"--write"}, (
        page.name
    )  # of a benchmark, in the page it writes


def anchor(heading: str) -> str:
    """A heading's id, as Python-Markdown and GitHub both make it."""
    text = re.sub(r"[^\w\s-]", "", re.sub(r"`", "", heading).lower())
    return re.sub(r"[-\s]+", "-", text.strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text()):
        target, _, fragment = "".join(link).partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page if not target else (page.parent / target)
        assert file.exists(), f"{page.name}: {target}"
        if fragment and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert fragment in {anchor(h) for h in headings}, f"{page.name}: {target}#{fragment}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_in_the_docs_imports_what_exists(page: Path) -> None:
    for language, content in blocks(page.read_text()):
        if language != "python" or "--8<--" in content:
            continue
        for node in ast.walk(ast.parse(inspect.cleandoc(content))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace"):
                module = importlib.import_module(str(node.module))
                assert not [a.name for a in node.names if not hasattr(module, a.name)], page.name


def test_the_worked_example_of_the_shift() -> None:
    """The table in docs/code.md, by the code it explains."""
    np, layout = importlib.import_module("numpy"), importlib.import_module("headrace.draft.layout")
    made = layout.make_layout([10], np.isin(np.arange(10), [4, 5, 6, 7]))
    starts, room = made.starts.tolist(), made.room.tolist()
    rows = re.findall(r"^\| (\d) \|(.*)\| (\d) \|$", (ROOT / "docs" / "code.md").read_text(), re.MULTILINE)
    assert [(int(start), int(left)) for start, _, left in rows] == list(zip(starts, room, strict=True))
    for start, steps, left in rows:
        chain = re.findall(r"(\d) → (\d), (?:final state of )?row (\d)", steps)
        s, p = range(int(left)), int(start)
        assert [tuple(map(int, step)) for step in chain] == [(p + 1 + i, p + 2 + i, p + 1 + i) for i in s]
        assert [made.chain_rows(i).tolist()[starts.index(p)] for i in s] == [p + 1 + i for i in s]


def test_the_worked_example_of_a_retraction() -> None:
    text = (ROOT / "docs" / "code.md").read_text()
    shown, answers = (
        [tuple(map(int, span.split("–"))) for span in re.search(pattern, text)[1].split(", ")]  # type: ignore[index]
        for pattern in (r"forwards (\d[\d–, ]+\d)\.", r"`claim` answers (\d[\d–, ]+\d):")
    )
    coverage = importlib.import_module("headrace.sglang_plugin.coverage").Coverage(100)
    assert [coverage.claim(*span) for span in shown] == [[span] for span in answers]
    assert coverage.complete and len(shown) == 3


def paths_in(text: str) -> set[str]:
    """Files of the repository that a page names in backticks, such as `draft/layout.py`."""
    return set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|json|yml))`", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_named_in_the_docs_exist(page: Path) -> None:
    roots = (ROOT, ROOT / "src", ROOT / "src" / "headrace")
    lost = [p for p in paths_in(page.read_text()) if not any((root / p).exists() for root in roots)]
    assert not [
        p
        for p in lost
        if not p.startswith(("STORE/", "extract/manifest", "extract/lock", "bench/NAME", "rows/", "runs/"))
    ], page.name


def test_every_page_is_in_the_reading_order() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}" not in nav]
