"""Small durable files appear whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from headrace.errors import CorruptError, StorageFullError
from headrace.files import atomic_write, read_json, write_json


def test_failure_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_json(path, {"n": 1})
    with pytest.raises(RuntimeError, match="half way"), atomic_write(path) as file:
        file.write(b"{")
        raise RuntimeError("half way")
    assert read_json(path) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_its_own_error(tmp_path: Path, number: int) -> None:
    with (
        pytest.raises(StorageFullError, match=r"no space left to write .*x\.json") as caught,
        atomic_write(tmp_path / "x.json"),
    ):
        raise OSError(number, "full")
    assert caught.value.errno == number and caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_other_os_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "missing" / "x.json", 1)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"a": ')
    with pytest.raises(CorruptError, match=r"m\.json is not valid JSON"):
        read_json(tmp_path / "m.json")
