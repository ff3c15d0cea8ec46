"""Fresh Python interpreters that serve a pipe to this process: for work that needs an interpreter's lock of its own.

Not multiprocessing's processes: its "spawn" imports the user's script again, which then needs a ``__main__`` guard, and takes
its environment from ours; its "fork" takes along CUDA and locks that other threads hold.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

REAP_SECONDS = 5.0


class Child:
    """One interpreter, from its start to its end. The other end of ``connection`` is its; when this one goes, it should end."""

    def __init__(
        self,
        main: str,
        *args: int,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``main``: ``package.module:function``, called with the file descriptor of the pipe, then with ``args``; ``pass_fds`` are
        open there under their numbers."""
        self.connection, theirs = multiprocessing.Pipe()
        code = "import sys; sys.path[:] = {}; from headrace.child import begin; begin({!r}, {})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code.format([*map(str, sys.path)], main, (theirs.fileno(), *args))],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints must not get between the lines of --json
            pass_fds=[theirs.fileno(), *pass_fds],
            start_new_session=True,  # Ctrl-C is the parent's to take
        )
        theirs.close()
        self._killed = False

    @property
    def dead(self) -> bool:
        """Whether the process has ended. Its pipe may be held open by a child of it."""
        return self.process.poll() is not None

    def end(self) -> str:
        """What became of it, for messages."""
        try:
            code = self.process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its pipe"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:  # a real-time signal has no name
            return f"was killed by signal {-code}"

    def kill(self) -> None:
        """End it at once, and what it has forked; idempotent."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a file system
            self.process.wait(REAP_SECONDS)
        self.connection.close()


def begin(main: str, args: tuple[int, ...]) -> None:
    """The first thing that a child does."""
    # A service manager or a terminal tells the whole group to stop. The parent comes to an end then, and its children with it.
    # Functions, not SIG_IGN: that would be inherited by a server started here, which must hear its SIGTERM.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    for fd in args:
        os.set_inheritable(fd, False)
    module, _, function = main.partition(":")
    getattr(importlib.import_module(module), function)(*args)
