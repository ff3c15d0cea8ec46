"""Taking a finished capture out of the staging folder: verify everything, hand it over, delete the file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import PreflightError
from headrace.memory import shared_pool
from headrace.sglang_plugin.protocol import Facts, Staged, taps_to_text
from headrace.sglang_plugin.stagedfile import StagedFileError, read_staged
from headrace.sglang_plugin.staging import lock_alive
from headrace.types import Capture, CaptureSpec, Row

if TYPE_CHECKING:
    import torch

_CLIENTS = "clients"


class Rejected(Exception):
    """An answer that breaks the contract; stays inside this package, where it becomes a retry or a Failure."""

    def __init__(self, kind: str, message: str, retryable: bool = True) -> None:
        super().__init__(message)
        self.kind, self.message, self.retryable = kind, message, retryable


class StagingView:
    """The servers' staging folder as this client sees it.

    The client has a name of its own, which its captures begin with, and a locked file of that name. So captures that a
    killed client left behind are told from those of one that lives, and the next client deletes them.
    """

    def __init__(self, folder: str) -> None:
        """``folder`` overrides what the servers say; empty believes them."""
        self.owner = uuid.uuid4().hex
        self._override = folder
        self._locks: dict[Path, int] = {}
        self._memory = shared_pool()

    def join(self, facts: Facts) -> Path:
        """The root of a server's staging folder, with this client signed in. Raises PreflightError when it is not here."""
        root = Path(self._override or facts.staging)
        if root in self._locks:
            return root
        if not (root / f"{facts.run}.{facts.rank}").is_dir():
            raise PreflightError(
                f"the server's staging folder {root} is not seen here; run the client on the server's host, or put --staging "
                "on a shared file system and say where it is mounted with the engine option staging"
            )
        clients = root / _CLIENTS
        try:
            clients.mkdir(exist_ok=True)
            reclaim_clients(root)
            self._locks[root] = lock_alive(clients / self.owner)
        except OSError as exc:
            raise PreflightError(
                f"staging folder {root} cannot be written here ({exc.strerror}); run client and server as one user"
            ) from exc
        return root

    def take(self, facts: Facts, staged: Staged, row: Row, spec: CaptureSpec) -> Capture:
        """Read, verify and release a capture. Raises Rejected for anything that is not exactly right."""
        import torch

        path = (self.join(facts) / staged.name).resolve()
        root = self.join(facts).resolve()
        if not path.is_relative_to(root):
            raise Rejected(
                "bad_reply", f"the server named {staged.name}, outside its staging folder", retryable=False
            )
        try:
            file = read_staged(path, staged.seal, staged.size, self._memory.lend)
        except FileNotFoundError:
            raise Rejected("staged_lost", f"{path} is gone; it was deleted before it was read") from None
        except StagedFileError as exc:
            raise Rejected("corrupt", str(exc)) from exc
        finally:
            path.unlink(missing_ok=True)
        layout = file.layout
        if file.metadata.get("taps") != taps_to_text(spec.taps):
            raise Rejected(
                "taps_differ",
                f"the file has taps {file.metadata.get('taps')}, asked were {taps_to_text(spec.taps)}",
            )
        if layout.dtype != spec.dtype or layout.hidden != spec.hidden_size:
            message = f"states are {layout.dtype} of {layout.hidden}, the spec says {spec.dtype} of {spec.hidden_size}"
            raise Rejected("spec_differs", message, retryable=False)
        check_ids(file.ids, row)
        states = torch.from_numpy(file.states).view(getattr(torch, spec.dtype))
        states = states.view(layout.taps, layout.rows, layout.hidden)
        check_finite(states, spec)
        return Capture(row.key, file.ids.astype(np.int32), states)

    def leave(self) -> None:
        """Delete what is left of this client's captures and sign out; idempotent."""
        for root, lock in self._locks.items():
            _delete_captures(root, self.owner)
            (root / _CLIENTS / self.owner).unlink(missing_ok=True)
            os.close(lock)
        self._locks.clear()
        self._memory.trim()


def check_ids(ids: np.ndarray, row: Row) -> None:
    """Raise Rejected unless the engine's ids are the row's, element by element."""
    if len(ids) != len(row):
        raise Rejected(
            "ids_differ", f"the engine used {len(ids)} ids for a row of {len(row)}", retryable=False
        )
    wrong = np.flatnonzero(ids != row.ids)
    if len(wrong):
        at = int(wrong[0])
        message = f"the engine used id {int(ids[at])} at position {at} where the row has {int(row.ids[at])}"
        raise Rejected("ids_differ", message, retryable=False)


def check_finite(states: torch.Tensor, spec: CaptureSpec) -> None:
    """Raise Rejected, naming tap and position, when a state is NaN or infinite."""
    from headrace.bits import bits_of, first_bad_row  # loads torch

    bad = first_bad_row(bits_of(states).reshape(-1, spec.hidden_size), spec.dtype)
    if bad is not None:
        tap, position = divmod(bad[0], states.shape[1])
        raise Rejected("non_finite", f"tap {spec.taps[tap]} holds {bad[1]} at position {position}")


def reclaim_clients(root: Path) -> list[str]:
    """Delete the captures of clients that died, told by their unlocked files; returns their names."""
    dead: list[str] = []
    for file in (root / _CLIENTS).iterdir():
        if file.name.startswith("."):
            continue
        with contextlib.suppress(OSError), file.open("rb+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete_captures(root, file.name)
            file.unlink()
            dead.append(file.name)
    return dead


def _delete_captures(root: Path, owner: str) -> None:
    for file in root.glob(f"*/{owner}-*.safetensors"):
        file.unlink(missing_ok=True)
