"""Servers of tests end with the test, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a child that its parent died")
def test_a_killed_parent_leaves_no_server(tmp_path: Path) -> None:
    """One that stayed would hold its port, its memory, its GPU."""
    code = f"""
import sys, time
from pathlib import Path
from headrace.testing.servers import ServerProcess
server = ServerProcess([sys.executable, "-c", "import time; time.sleep(120)"], 1, Path({str(tmp_path / "log")!r})).start()
print(server.pid, flush=True)
time.sleep(120)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    assert psutil.pid_exists(server)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server) and psutil.Process(server).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            psutil.Process(server).kill()
            pytest.fail("the server outlived its parent")
        time.sleep(0.05)
