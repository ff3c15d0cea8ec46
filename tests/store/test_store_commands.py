"""The store's commands as a person or a script runs them: what they print, their JSON and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.data.rows import RowWriter
from headrace.store import Store
from headrace.store.shard import Shard
from headrace.target import Target
from headrace.testing.store import flip_bit, make_row, make_states, same_bits, shard_files, write_store

ROWS = [make_row(seed, 20) for seed in range(6)]


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON result and what stderr said."""
    code = main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_store(tmp_path / "s", ROWS, codec="fp8", final_positions="supervised")
    code, result, _ = run(capsys, "info", path)
    assert code == 0 and result["captures"] == 6 and result["tokens"] == 120 and result["codec"] == "fp8"
    assert (
        set(result["taps"]) == {"2", "4", "5", "final"}
        and 0 < result["taps"]["4"]["relative_error_mean"] < 0.1
    )
    assert (
        result["bytes_stored"] == sum(f.stat().st_size for f in shard_files(path))
        and result["spec"]["num_layers"] == 8
    )
    assert main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    for words in ("120, ", "norm mean", "error max", "not stored", "after the final norm", "in 2 shards"):
        assert words in text, text


def test_check_and_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_store(tmp_path / "s", ROWS)
    code, result, _ = run(capsys, "check", path)
    assert (
        code == 0
        and result["check_ok"]
        and result["bytes_checked"] == result["bytes_total"]
        and result["problems"] == []
    )
    shard = Shard(Store.open(path).folder.open_shard(shard_files(path)[0].name))
    flip_bit(shard_files(path)[0], shard.prefix.size)
    code, result, err = run(capsys, "check", path)
    assert code == 1 and not result["check_ok"] and result["problems"][0]["key"] == ROWS[0].key
    assert result["error"]["kind"] == "CorruptError" and ROWS[0].key in err and "headrace repair" in err
    code, result, _ = run(capsys, "repair", path)
    assert code == 0 and list(result["dropped"]) == [ROWS[0].key] and result["captures"] == 5
    code, result, _ = run(capsys, "check", path, "--quick", "--sample", "1kB")
    assert code == 0 and result["mode"] == "quick"
    assert main(["check", str(path)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    (path / "index.parquet").unlink()
    assert main(["repair", str(path)]) == 0
    assert "index.parquet made again" in capsys.readouterr().out


def test_a_folder_that_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("info", "check", "repair"):
        code, result, err = run(capsys, command, tmp_path)
        assert code == 2 and "not a Headrace store" in err and result["ok"] is False
    code, _, err = run(capsys, "convert", tmp_path, "--out", tmp_path / "new")
    assert code == 2 and not (tmp_path / "new").exists() and "not a Headrace store" in err


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_store(tmp_path / "s", ROWS)
    code, result, _ = run(
        capsys, "convert", path, "--out", tmp_path / "n", "--codec", "raw", "--taps", "final,4"
    )
    assert code == 0 and result["captures"] == 6 and result["written"] == 6
    store = Store.open(tmp_path / "n")
    assert store.codec == "raw" and store.spec.taps == ("final", 4)
    assert same_bits(store[ROWS[2].key].states, make_states(ROWS[2], store.spec))
    assert (
        main(["convert", str(path), "--out", str(tmp_path / "n"), "--codec", "raw", "--taps", "final,4"]) == 0
    )
    assert "6 were there already" in capsys.readouterr().out
    code, _, err = run(
        capsys, "convert", path, "--out", tmp_path / "n", "--codec", "bf16-planes", "--taps", "final,4"
    )
    assert code == 2 and "codec" in err


def test_toml_gives_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_store(tmp_path / "s", ROWS)
    toml = tmp_path / "c.toml"
    toml.write_text(f'[convert]\nout = "{tmp_path / "n"}"\ntaps = [4, "final"]\n')
    code, _, _ = run(capsys, "convert", path, "--config", toml)
    assert code == 0 and Store.open(tmp_path / "n").spec.taps == (4, "final")
    toml.write_text("[convert]\ncodek = 'raw'\n")
    code, _, err = run(capsys, "convert", path, "--out", tmp_path / "m", "--config", toml)
    assert code == 2 and "codek" in err and str(toml) in err


def test_import_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], config_only: Path) -> None:
    spec = Target.open(str(config_only)).spec((2, 4, 5, "final"), dtype="bfloat16")
    path = write_store(tmp_path / "s", ROWS, spec)
    code, result, _ = run(capsys, "export-states", path, "--layout", "modelopt", "--out", tmp_path / "f")
    assert code == 0 and result["samples"] == 6 and len(list((tmp_path / "f").glob("*.pt"))) == 6
    with RowWriter(tmp_path / "rows") as writer:
        for row in ROWS[:5]:
            writer.add(row, split="train")
    (tmp_path / "f" / "manifest.json").unlink()
    args = [
        "import-states",
        tmp_path / "f",
        "--layout",
        "modelopt",
        "--model",
        config_only,
        "--out",
        tmp_path / "n",
    ]
    code, _, err = run(capsys, *args)
    assert code == 2 and "--layers" in err
    args += ["--layers", "2,4,5", "--layers-are", "boundaries", "--mask", "rows", "--rows", tmp_path / "rows"]
    code, result, _ = run(capsys, *args)
    assert code == 0 and result["written"] == 5 and result["dropped"] == {"unreadable or unmatched": 1}
    store = Store.open(tmp_path / "n")
    assert all(same_bits(store[row.key].states, make_states(row, spec)) for row in ROWS[:5])
    assert store.spec == spec
    assert main([*map(str, args)]) == 0
    assert "in the store already" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "repair", "info", "convert", "import-states", "export-states"])
def test_help_is_immediate(command: str) -> None:
    """No torch, no pyarrow before a command is to do something."""
    code = (
        f"import sys; from headrace.cli import main\ntry:\n    main(['{command}', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(len({'torch', 'pyarrow', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "usage: headrace" in result.stdout, result.stderr


def test_importing_the_package_brings_no_torch() -> None:
    code = "import sys, headrace.store, headrace.store.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_progress_of_a_log_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.cli import progress

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with progress.progress("check x", bytes_unit=True) as update:
        update(250_000_000, 1_000_000_000)
    with progress.progress("import x", bytes_unit=False) as update:
        update(1500, 3000)
    err = capsys.readouterr().err
    assert "check x: 0.25 of 1.00 GB, 0 s left" in err and "import x: 1,500 of 3,000" in err
