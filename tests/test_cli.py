"""The command line as a user meets it: speed of --help, exit codes, one JSON object, configs and their faults."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import Field

from headrace import __version__
from headrace.cli import COMMANDS, main
from headrace.cli.output import Output
from headrace.cli.parse import parse
from headrace.config import Section
from headrace.errors import ConfigError


def headrace(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *args], capture_output=True, text=True, check=False
    )


def test_version_and_help() -> None:
    assert headrace("--version").stdout == f"headrace {__version__}\n"
    out = headrace("--help")
    assert out.returncode == 0 and all(name in out.stdout for name in COMMANDS)
    assert headrace().returncode == 2


@pytest.mark.slow
def test_help_of_every_command_is_quick_and_needs_no_torch() -> None:
    """Under a second of processor time (the machine may be busy) and nothing heavy imported, in a fresh interpreter each."""
    code = (
        "import sys, time; t = time.process_time()\n"
        "from headrace.cli import main\n"
        "try: main([sys.argv[1], '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = [m for m in ('torch', 'transformers', 'pyarrow', 'matplotlib') if m in sys.modules]\n"
        "print('\\n@', time.process_time() - t, heavy)"
    )
    for name in COMMANDS:
        best = 99.0
        for _ in range(3):  # a loaded machine may spoil one try
            done = subprocess.run(
                [sys.executable, "-c", code, name], capture_output=True, text=True, check=False
            )
            assert "usage: headrace " + name in done.stdout, (name, done.stderr)
            seconds, heavy = done.stdout.rsplit("@", 1)[1].strip().split(" ", 1)
            assert heavy == "[]", (name, heavy)
            best = min(best, float(seconds))
            if best < 1.0:
                break
        assert best < 1.0, f"{name} --help took {best:.2f} s"


def test_unknown_command_suggests() -> None:
    done = headrace("extrct")
    assert done.returncode == 2 and "did you mean 'extract'" in done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--numbr=3", "unrecognized arguments: --numbr=3; did you mean --number?; see headrace demo --help"),
        ("--xyz", "unrecognized arguments: --xyz; see headrace demo --help"),
    ],
)
def test_unknown_option_is_one_sentence(argument: str, message: str) -> None:
    """Also with --json: argparse's own way out would end the program before the one object is written."""
    with pytest.raises(ConfigError) as caught:
        parse(Demo, "demo", "", [argument])
    assert str(caught.value) == f"headrace demo: {message}"


class Demo(Section):
    """A demo."""

    number: int = 1
    """A number."""
    flag: bool = False
    """A flag."""
    names: list[str] = Field(default_factory=list)
    """Names."""


def test_parse_layers_toml_under_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("model = 'm'\n[demo]\nnumber = 5\nflag = true\n")
    assert parse(Demo, "demo", "", []).number == 1
    assert parse(Demo, "demo", "", ["--config", str(file)]) == Demo(number=5, flag=True)
    assert parse(
        Demo, "demo", "", ["--config", str(file), "--no-flag", "--names", "a", "--names", "b", "--number=7"]
    ) == Demo(number=7, flag=False, names=["a", "b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[demo]\nnumbr = 5\n", "numbr: is not a known key"),
        ("[demo]\nnumber = 'x'\n", "number: Input should be a valid integer"),
        ("[demo\n", "not valid TOML"),
        ("demo = 3\n", r"\[demo\] must be a table"),
    ],
)
def test_config_faults_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        parse(Demo, "demo", "", ["--config", str(file)])
    assert "run.toml" in str(caught.value)


def test_recipe_gives_positionals_and_places(tmp_path: Path) -> None:
    """One file serves a stage alone as it serves the whole run: same model, same folders; the command line wins."""
    from headrace.extract.config import ExtractConfig

    file = tmp_path / "run.toml"
    file.write_text('model = "m"\nfolder = "runs/x"\n[extract]\ntaps = [3, "final"]\n')
    config = parse(ExtractConfig, "extract", "", ["--config", str(file)])
    assert (config.rows, config.out, config.model, config.taps) == (
        "runs/x/rows",
        Path("runs/x/store"),
        "m",
        "3,final",
    )
    config = parse(ExtractConfig, "extract", "", ["--config", str(file), "other", "--model", "n"])
    assert (config.rows, config.out, config.model) == ("other", Path("runs/x/store"), "n")
    with pytest.raises(ConfigError, match="arguments are required: ROWS"):
        parse(ExtractConfig, "extract", "", ["--model", "m", "--out", "o"])


def test_missing_config() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        parse(Demo, "demo", "", ["--config", "nowhere.toml"])


def test_json_mode_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    done = headrace("fetch-demo-model", "--json", "--out", str(tmp_path / "full"))
    assert done.returncode == 2
    value = json.loads(done.stdout)
    assert (
        value["ok"] is False
        and value["error"]["exit_code"] == 2
        and "not a model folder" in value["error"]["message"]
    )
    assert done.stderr.count("\n") == 1


def test_output_table_and_say(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_mode=False).table("T", ["tap", "error"], [["2", "1e-6"], ["final", "2e-6"]])
    assert "final" in capsys.readouterr().out
    output = Output(json_mode=True)
    output.say("hello")
    output.set(a=1)
    output.finish()
    captured = capsys.readouterr()
    assert captured.err == "hello\n" and json.loads(captured.out) == {"ok": True, "a": 1}


def test_main_maps_errors_to_exit_codes(tmp_path: Path) -> None:
    started = time.monotonic()
    assert main(["fetch-demo-model", "--config", str(tmp_path / "none.toml")]) == 2
    assert time.monotonic() - started < 5


def test_a_path_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command's files: a file where a folder should be, on the way or at the end."""
    (tmp_path / "file").write_text("x")
    assert main(["fetch-demo-model", "--out", str(tmp_path / "file")]) == 2
    assert "is not a model folder" in capsys.readouterr().err
    assert main(["fetch-demo-model", "--out", str(tmp_path / "file" / "model")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "file cannot be used: " in said and "another path" in said
    assert main(["fetch-demo-model", "--json", "--out", str(tmp_path / ("n" * 300))]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and "File name too long" in json.dumps(answer)


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken", "x")

    monkeypatch.setattr("headrace.demo.fetch_demo_model", broken)
    with pytest.raises(OSError, match="the disk is broken"):
        main(["fetch-demo-model", "--out", "x"])


@pytest.mark.parametrize(
    "url", ["not-a-url", "127.0.0.1:30000", "http://", "ftp://host:1", "localhost:30000"]
)
@pytest.mark.parametrize("command", ["doctor {} --model m", "extract rows --model m --out s --url {}"])
def test_an_address_without_a_scheme_is_said_at_once(
    url: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not: cannot be reached, is the server up?"""
    assert main(command.format(url).split()) == 2
    assert "url.0: give an address such as http://127.0.0.1:30000" in capsys.readouterr().err
