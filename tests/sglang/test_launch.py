"""``headrace serve``: the right flags for the release and the family, or a reason and nothing started."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headrace._version import __version__
from headrace.cli import main
from headrace.engines.config import ServeConfig
from headrace.engines.sglang.launch import Launch, build_launch
from headrace.errors import ConfigError, PreflightError
from headrace.sglang_plugin.protocol import ENVIRONMENT, PluginConfig
from headrace.target import Target
from headrace.testing.models import make_config_only


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of whatever Python is started, where distributions can be claimed to be installed."""
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    claim(folder, "sglang", "0.5.23")
    return folder


def claim(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """Make ``importlib.metadata`` see a distribution."""
    for old in folder.glob(f"{name}-*.dist-info"):
        old.rename(folder / f"gone-{old.name}.txt")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def target_of(tmp_path: Path, architecture: str = "LlamaForCausalLM", layers: int = 36) -> Target:
    folder = make_config_only(tmp_path / architecture, layers=layers)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return Target.open(str(folder))


def launch_of(target: Target, **values: object) -> Launch:
    return build_launch(
        ServeConfig(**{"model": str(target.path), "staging_bytes": 1 << 30, **values}), target
    )


def flag_values(launch: Launch, flag: str) -> list[str]:
    """What follows ``flag`` up to the next one."""
    words = launch.command[launch.command.index(flag) + 1 :]
    end = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:end]


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("LlamaForCausalLM", "DFLASH"),
        ("Qwen3MoeForCausalLM", "DFLASH"),
        ("DeepseekV3ForCausalLM", "DFLASH"),
        ("KimiK25ForConditionalGeneration", "DFLASH"),
        ("Qwen2ForCausalLM", "EAGLE3"),
        ("Gemma3ForCausalLM", "EAGLE3"),
    ],
)
def test_boundaries_become_layer_outputs(
    installed: Path, tmp_path: Path, architecture: str, scheme: str
) -> None:
    """EX-06: boundaries [2, 18, 33] of 36 layers are outputs of layers [1, 17, 32], in ascending order whatever was asked."""
    launch = launch_of(target_of(tmp_path, architecture), taps="33,final,2,18")
    assert flag_values(launch, "--return-aux-hidden-state-layer-ids") == ["1", "17", "32"]
    assert flag_values(launch, "--speculative-algorithm") == [scheme]
    assert launch.config.taps == (33, "final", 2, 18) and launch.config.source == "native"


def test_older_releases_take_the_hooks(installed: Path, tmp_path: Path) -> None:
    claim(installed, "sglang", "0.5.20")
    launch = launch_of(target_of(tmp_path))
    assert launch.config.source == "hooks" and "--enable-return-hidden-states" in launch.command
    assert not any("aux" in word or "speculative" in word for word in launch.command)


def test_final_alone_takes_the_hooks_and_any_family(installed: Path, tmp_path: Path) -> None:
    launch = launch_of(target_of(tmp_path, "NobodyKnowsForCausalLM"), taps="last")
    assert launch.config.source == "hooks" and launch.config.taps == ("final",)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ("0,5", "boundary 0"),
        ("5,36", "take 'final'"),
        ("5,37", "0..36"),
        ("5,5", "repeat"),
        ("five", "neither a boundary"),
    ],
)
def test_taps_that_cannot_be(installed: Path, tmp_path: Path, taps: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_of(target_of(tmp_path), taps=taps)


def test_a_family_nobody_has_read(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"NobodyKnows.*LlamaForCausalLM"):
        launch_of(target_of(tmp_path, "NobodyKnowsForCausalLM"), taps="2,5,final")


@pytest.mark.parametrize(
    "flags",
    [
        ["--pp-size", "2"],
        ["--pipeline-parallel-size=2"],
        ["--disaggregation-mode", "prefill"],
        ["--enable-two-batch-overlap"],
        ["--speculative-draft-model-path", "x"],
        ["--speculative-algorithm=EAGLE3"],
        ["--enable-prefill-cp"],
    ],
)
def test_flags_under_which_rows_are_lost(installed: Path, tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(PreflightError, match="cannot be combined"):
        launch_of(target_of(tmp_path), sglang_args=flags)


def test_flags_that_are_passed_on(installed: Path, tmp_path: Path) -> None:
    flags = ["--tp-size", "8", "--pp-size", "1", "--chunked-prefill-size=2048"]
    launch = launch_of(target_of(tmp_path), sglang_args=flags)
    assert launch.command[-5:] == flags
    assert "--disable-radix-cache" in launch.command
    assert "--disable-radix-cache" not in launch_of(target_of(tmp_path), prefix_cache=True).command
    assert "--skip-tokenizer-init" in launch.command, "a target without tokenizer files"


@pytest.mark.parametrize("version", ["0.5.16", "0.5.9", "0.4.10.post2"])
def test_releases_that_misplace_rows(installed: Path, tmp_path: Path, version: str) -> None:
    claim(installed, "sglang", version)
    with pytest.raises(PreflightError, match=r"0\.5\.17 or newer"):
        launch_of(target_of(tmp_path))


def test_a_newer_release_is_tried_and_said(installed: Path, tmp_path: Path) -> None:
    claim(installed, "sglang", "0.6.1")
    launch = launch_of(target_of(tmp_path))
    assert not launch.tested and launch.config.source == "native"


def test_environment_without_us_or_with_another_version(installed: Path, tmp_path: Path) -> None:
    claim(
        installed, "headrace", "0.0.9", "[sglang.srt.plugins]\nheadrace = headrace.sglang_plugin:register\n"
    )
    with pytest.raises(PreflightError, match=rf"pip install headrace=={__version__}"):
        launch_of(target_of(tmp_path))
    with pytest.raises(PreflightError, match="--python"):
        launch_of(target_of(tmp_path), python="/nowhere/python")


def test_plugin_restrictions_are_widened(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "theirs")
    assert launch_of(target_of(tmp_path)).environment["SGLANG_PLUGINS"] == "theirs,headrace"
    monkeypatch.setenv("SGLANG_PLUGINS", "headrace,theirs")
    assert "SGLANG_PLUGINS" not in launch_of(target_of(tmp_path)).environment


def test_printed_command_is_the_one_that_runs(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of(tmp_path)
    arguments = [
        "serve",
        str(target.path),
        "--taps",
        "2,18,final",
        "--staging",
        str(tmp_path / "a b"),
        "--print",
    ]
    assert main([*arguments, "--", "--tp-size", "2"]) == 0
    words = shlex.split(capsys.readouterr().out)
    name, _, value = words[0].partition("=")
    assert name == ENVIRONMENT
    config = PluginConfig.from_json(value)
    assert config.taps == (2, 18, "final") and config.staging == str(tmp_path / "a b")
    assert words[1] == sys.executable and words[-2:] == ["--tp-size", "2"]


def test_serve_becomes_the_server(installed: Path, tmp_path: Path) -> None:
    """Flags and configuration arrive in the process that takes serve's place."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$@"\necho "$HEADRACE_SGLANG"\n'
    )
    python.chmod(0o755)
    command = [sys.executable, "-m", "headrace", "serve", str(target_of(tmp_path).path), "--taps", "last"]
    done = subprocess.run(
        [*command, "--python", str(python), "--", "--x", "1"], capture_output=True, text=True, check=True
    )
    flags, config = done.stdout.splitlines()
    assert flags.startswith("-m sglang.launch_server --model-path") and flags.endswith("--x 1")
    assert PluginConfig.from_json(config).taps == ("final",)


def test_serve_refuses_with_exit_codes(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of(tmp_path)
    assert main(["serve", str(target.path), "--taps", "0", "--print"]) == 2
    assert main(["serve", str(target.path), "--print", "--", "--pp-size", "4"]) == 3
    assert main(["serve", str(tmp_path / "nowhere"), "--print"]) == 2
    capsys.readouterr()
