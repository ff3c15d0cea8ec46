"""What a run leaves to look at: metrics.jsonl, TensorBoard curves where it is installed, Weights & Biases where it is asked
for, and lines or a bar while it runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from headrace.draft.metrics import Accuracy
from headrace.errors import ConfigError
from headrace.files import atomic_write
from headrace.types import hash_json


def require_wandb(project: str) -> None:
    """Raise ConfigError when a ``project`` is asked for and the package that logs to it is not there."""
    if project and find_spec("wandb") is None:
        raise ConfigError(
            f"wandb = {project!r} needs the package wandb; pip install 'headrace[wandb]', or leave it out"
        )


class Curves:
    """Appends to ``metrics.jsonl`` and mirrors numbers to TensorBoard and Weights & Biases."""

    def __init__(self, folder: Path, tensorboard: bool, wandb: str = "", on: bool = True) -> None:
        """``wandb``: a project's name, or nothing. Its key is its own affair (WANDB_API_KEY, ``wandb login``), never ours."""
        self.file, self.on = folder / "metrics.jsonl", on
        self._handle: IO[str] | None = None
        self._board: Any = None
        self._wandb: Any = None
        self._wants_board = tensorboard and on and find_spec("tensorboard") is not None
        self._project = wandb if on else ""

    def begin(self, step: int, settings: dict[str, Any]) -> None:
        """Open for a run of ``settings`` that goes on after ``step``: later lines are dropped (it writes them again), and a torn one."""
        if self._wants_board:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.file.parent / "tensorboard"), purge_step=step + 1)
        if self._project:
            self._open_wandb(settings)
        if not self.on or not self.file.is_file():
            return
        kept = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue
        with atomic_write(self.file) as file:
            file.write("".join(kept).encode())

    def _open_wandb(self, settings: dict[str, Any]) -> None:
        import wandb

        folder = self.file.parent
        try:
            # One folder is one run there, however often it is stopped and started again.
            self._wandb = wandb.init(
                project=self._project,
                name=folder.name,
                id=hash_json([str(folder.resolve()), settings]),
                resume="allow",
                dir=str(folder),
                config=settings,
            )
        except wandb.Error as exc:
            raise ConfigError(
                f"Weights & Biases refused ({exc}); set WANDB_API_KEY, or WANDB_MODE=offline, or leave wandb out"
            ) from exc

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line; lists become one curve an element."""
        if not self.on:
            return
        if self._handle is None:
            self._handle = self.file.open("a", encoding="utf-8")
        self._handle.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._handle.flush()
        curves = {
            f"{kind}/{name}" + (f"_{index + 1}" if isinstance(value, list) else ""): number
            for name, value in values.items()
            for index, number in enumerate(value if isinstance(value, list) else [value])
        }
        if self._board is not None:
            for tag, number in curves.items():
                self._board.add_scalar(tag, number, step)
        if self._wandb is not None:
            self._wandb.log(curves, step=step)

    def close(self) -> None:
        """Flush and close all."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None


class Progress:
    """A bar on a terminal's stderr, plain lines elsewhere."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self._say = total, say
        self.rate = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._first = 0
        self._marks: list[tuple[int, float]] = []
        """Steps and when they were done, oldest first."""

    def begin(self, step: int) -> None:
        """Start the clock at ``step``."""
        self._first = step
        self._marks = [(step, time.monotonic())]
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = [
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            ]
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("train", total=self.total, completed=step, facts="")
            self._bar.start()

    def show(self, step: int, accuracy: Accuracy, extra: dict[str, float]) -> None:
        """One log interval's numbers."""
        self.rate = extra["tokens_per_second"]
        left = self._left(step)
        facts = f"loss {accuracy.losses[0]:.3f}, accuracy {accuracy.conditional[0]:.3f}, length {accuracy.length:.2f}, {self.rate:,.0f} tokens/s"
        if "mfu" in extra:
            facts += f", MFU {extra['mfu']:.0%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        else:
            self._say(f"step {step:,}/{self.total:,}: {facts}, {_clock(left)} left")

    def _left(self, step: int) -> float:
        """Seconds to the end at the pace of the newer half of the steps: the first ones compile, for a minute on a GPU."""
        while len(self._marks) > 1 and self._marks[1][0] <= (self._first + step) / 2:
            del self._marks[0]
        since, then = self._marks[0]
        now = time.monotonic()
        self._marks.append((step, now))
        return (self.total - step) * (now - then) / max(1, step - since)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            self._say(text)

    def end(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
