"""The staging folder: bounded, released by deletion, what the dead left is reclaimed and nobody else's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from headrace.sglang_plugin.staging import Staging, reclaim_dead


def make(
    root: Path, name: str = "run.0", limit: int = 1000, stall_s: float = 0.2, keep_s: float = 60.0
) -> Staging:
    return Staging(root, name, limit, stall_s=stall_s, keep_s=keep_s)


def test_budget_comes_back_when_the_client_deletes(tmp_path: Path) -> None:
    staging = make(tmp_path)
    assert staging.reserve(600)
    path = staging.new_path("me")
    path.write_bytes(b"x" * 600)
    staging.finish(path, 600)
    assert not staging.reserve(600)
    path.unlink()
    assert staging.reserve(600)
    assert staging.reserved == 600
    staging.close()


def test_full_folder_is_waited_for_once_and_bounded(tmp_path: Path) -> None:
    staging = make(tmp_path, stall_s=0.3)
    path = staging.new_path("me")
    path.write_bytes(b"")
    assert staging.reserve(1000)
    staging.finish(path, 1000)
    started = time.monotonic()
    assert not staging.reserve(1)
    first = time.monotonic() - started
    started = time.monotonic()
    assert not any(staging.reserve(1) for _ in range(20))
    rest = time.monotonic() - started
    assert 0.25 <= first < 1.0 and rest < 0.2, "only the first one waits"
    path.unlink()
    assert staging.reserve(1)
    staging.close()


def test_wait_ends_as_soon_as_there_is_room(tmp_path: Path) -> None:
    staging = make(tmp_path, stall_s=5.0)
    path = staging.new_path("me")
    path.write_bytes(b"")
    assert staging.reserve(1000)
    staging.finish(path, 1000)
    remover = subprocess.Popen(
        [sys.executable, "-c", f"import time, os; time.sleep(0.3); os.unlink({str(path)!r})"]
    )
    started = time.monotonic()
    assert staging.reserve(10)
    assert time.monotonic() - started < 4.0
    remover.wait()
    staging.close()


def test_captures_nobody_took_are_dropped_only_when_old(tmp_path: Path) -> None:
    staging = make(tmp_path, keep_s=0.3, stall_s=0.0)
    path = staging.new_path("me")
    path.write_bytes(b"")
    assert staging.reserve(1000)
    staging.finish(path, 1000)
    assert not staging.reserve(10)
    assert path.exists()
    time.sleep(0.4)
    assert staging.reserve(10)
    assert not path.exists()
    staging.close()


def test_reclaims_the_dead_and_nobody_else(tmp_path: Path) -> None:
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom headrace.sglang_plugin.staging import Staging\n"
        "s = Staging(Path(sys.argv[1]), 'dead.0', 1000, stall_s=0, keep_s=60)\n"
        "(s.folder / 'me-1.safetensors').write_bytes(b'x')\nos._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / "dead.0" / "me-1.safetensors").exists()
    foreign = tmp_path / "somebody"
    foreign.mkdir()
    (foreign / "file").write_bytes(b"x")
    living = make(tmp_path, "living.0")
    assert not (tmp_path / "dead.0").exists()
    assert (foreign / "file").exists()
    assert reclaim_dead(tmp_path) == [], "a living server's folder is locked"
    assert living.folder.exists()
    living.close()
    assert not living.folder.exists()


def test_names_never_repeat(tmp_path: Path) -> None:
    staging = make(tmp_path)
    names = {staging.new_path("me") for _ in range(50)}
    assert len(names) == 50
    staging.close()
