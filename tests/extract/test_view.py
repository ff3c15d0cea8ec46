"""On a terminal a live bar, elsewhere plain lines: the command itself, once with a terminal for stderr and once without."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing.extraction import make_rows, write_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, config_only: Path) -> list[str]:
    """About two seconds of extraction."""
    folder = tmp_path_factory.mktemp("view")
    rows = make_rows(400)
    write_rows(folder / "rows", rows)
    speed = sum(map(len, rows)) // 2
    args = [str(folder / "rows"), "--model", str(config_only), "--engine", "fake", "--min-free", "0"]
    return [
        sys.executable,
        "-m",
        "headrace",
        "extract",
        *args,
        "--engine-options",
        f"tokens_per_second={speed}",
    ]


def test_a_bar_on_a_terminal(command: list[str], tmp_path: Path) -> None:
    master, slave = os.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "150"}
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=slave, env=env, text=True
    )
    os.close(slave)
    shown = read_terminal(master, process)
    os.close(master)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "\x1b[" in shown and "━" in shown  # drawn again and again in place
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "100.0 %" in text and "ETA" in text and "400/400 captures" in text
    assert "\x1b" not in out and "stored" in out


def read_terminal(master: int, process: subprocess.Popen[str]) -> str:
    """All that is written to a terminal until its process ends."""
    data = b""
    while True:
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            try:
                data += os.read(master, 1 << 16)
            except OSError:  # the other side is closed
                break
        elif process.poll() is not None:
            break
    return data.decode(errors="replace")


def test_plain_lines_in_a_log_file_as_they_happen(command: list[str], tmp_path: Path) -> None:
    """The file fills while the run goes on: nothing waits in a buffer."""
    log = tmp_path / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path / "store")], stdout=file, stderr=subprocess.STDOUT
        )
        seen_while_running = False
        while process.poll() is None:
            seen_while_running |= "tokens/s" in log.read_text()
            select.select([], [], [], 0.05)
    assert process.returncode == 0 and seen_while_running
    text = log.read_text()
    assert "\x1b" not in text and "\r" not in text
    assert re.search(r"100\.0% \| [\d,]+/[\d,]+ tokens, 400/400 captures", text)
