"""Free space: what is measured, when admission pauses, and that it never admits more than fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.extract import disk
from headrace.extract.disk import DiskGuard, FolderSize, Space, gigabytes, space


class Disk:
    """A file system whose free space a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = -1) -> None:
        self.free, self.inodes = free, inodes
        monkeypatch.setattr(disk, "space", lambda path: Space(self.free, 10**12, self.inodes))


def test_between_two_looks_no_more_is_admitted_than_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Disk(monkeypatch, free=1000)
    guard = DiskGuard(tmp_path, 200, lambda: 300)
    assert guard.look() is None
    assert [guard.take(200) for _ in range(4)] == [True, True, False, False]
    assert guard.take(100)  # 1000 - 200 - 300 = 500 bytes of rows, to the byte
    assert not guard.take(1)


def test_a_refused_row_pauses_until_there_is_room_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Disk(monkeypatch, free=500)
    guard = DiskGuard(tmp_path, 200, lambda: 0)
    guard.look()
    assert not guard.take(400)
    said = guard.look()
    assert said is not None and said.startswith("paused: 500 B left") and "600 B needed" in said
    assert guard.paused and guard.paused_seconds >= 0
    assert not guard.take(1)  # while paused nothing passes
    assert guard.look() is None or not guard.paused
    here.free = 900
    guard.take(400)
    guard.look()
    assert not guard.paused and guard.take(400)


def test_a_pause_is_said_once_and_its_end_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Disk(monkeypatch, free=100)
    guard = DiskGuard(tmp_path, 200, lambda: 0)
    said = [guard.look() for _ in range(3)]
    here.free = 10**6
    said += [guard.look() for _ in range(3)]
    assert [text is not None for text in said] == [True, False, False, True, False, False]
    assert "going on" in str(said[3])


def test_inodes_count_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ST-08: a file system may have bytes and no names left."""
    here = Disk(monkeypatch, free=10**9, inodes=3)
    guard = DiskGuard(tmp_path, 0, lambda: 0)
    assert "3 inodes left" in str(guard.look())
    here.inodes = 10**6
    guard.look()
    assert not guard.paused


def test_space_of_a_folder_yet_to_be_made(tmp_path: Path) -> None:
    assert space(tmp_path / "a" / "b").total == space(tmp_path).total > 0


def test_folder_size_is_what_is_there(tmp_path: Path) -> None:
    size = FolderSize(tmp_path / "shards")
    assert size.measure() == 0
    (tmp_path / "shards").mkdir()
    for number in range(5):
        (tmp_path / "shards" / f"{number}.safetensors").write_bytes(b"x" * 100)
        (tmp_path / "shards" / f".{number}.tmp").write_bytes(b"x" * 77)
        assert size.measure() == 100 * (number + 1)
    (tmp_path / "shards" / "0.safetensors").unlink()
    assert size.measure() == 400


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (5.0348e12, "5.03 TB"),
        (812e9, "812 GB"),
        (64e6, "64.0 MB"),
        (12_345, "12.3 kB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert gigabytes(count) == text
