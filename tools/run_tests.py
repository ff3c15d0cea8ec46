"""Runs every test: the engine environments are built in the background while the tests that need none run in parallel.

Two pytest runs, because the real engines take both cores and much memory: first everything else with two workers, then the
engine tests one at a time. A test that fails is run once more, alone, and only then counts: some of them race real servers,
kills and clocks on machines that do other things too. What needed the second try is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

ENVIRONMENTS = ("sglang-0.5.23", "vllm-0.32.0", "sglang-0.5.20")
ENGINES = "sglang or vllm"
FAILED = 1  # pytest's exit code for "tests were run and some failed"


def main() -> int:
    """Run all; returns the exit code."""
    start = time.monotonic()
    builder = subprocess.Popen([sys.executable, "-m", "headrace.testing.envs", *ENVIRONMENTS])
    fetch_demo_model()
    codes = [tried_twice("-n", "2", "--dist", "loadgroup", "-m", f"not ({ENGINES})")]
    print(
        f"--- tests without engines: {time.monotonic() - start:.0f} s; waiting for the engine environments",
        flush=True,
    )
    if builder.wait() != 0:
        print("an engine environment could not be built; see its log above", flush=True)
        return 1
    print(f"--- engine environments ready after {time.monotonic() - start:.0f} s", flush=True)
    codes.append(tried_twice("-m", ENGINES))
    print(f"--- all tests: {time.monotonic() - start:.0f} s", flush=True)
    return next((code for code in codes if code), 0)


def fetch_demo_model() -> None:
    """The small real model, once, before two workers would each fetch it."""
    subprocess.run(
        [sys.executable, "-c", "from headrace.demo import cached_demo_model as m; m()"], check=True
    )


def tried_twice(*args: str) -> int:
    """Run; when tests fail, run those once more, alone."""
    code = pytest(*args)
    if code != FAILED:
        return code
    print("--- once more, alone, what failed:", flush=True)
    selection = args[args.index("-m") :]
    return pytest("--last-failed", "--last-failed-no-failures", "none", "-v", *selection)


def pytest(*args: str) -> int:
    """One pytest run in a process of its own, with its slowest tests listed."""
    environment = dict(os.environ)
    if (
        "loadgroup" in args
    ):  # two workers with two threads each on two cores spend their time waiting for one another
        environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--durations=15", *args], check=False, env=environment
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
