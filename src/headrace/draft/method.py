"""The contract of a draft method that another package adds through the entry-point group ``headrace.methods``.

EAGLE-3 is Headrace's own and does more than this contract asks for (trees, sampled proposals, checkpoints, export). A method
of this contract is trained by ``headrace train --method NAME`` from any store and measured by ``headrace evaluate`` in the
same decoding loop, whose output is the target's whatever is proposed. See docs/add-a-method.md.

Shapes: B sequences, T taps, H hidden, M tokens of one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from headrace import plugins
from headrace.config import Section, build
from headrace.draft.checkpoint import OWN_METHOD, Draft, load_draft, read_config
from headrace.target import Target
from headrace.types import Tap

if TYPE_CHECKING:
    from headrace.draft.setup import Data

ENTRY_POINT_GROUP = "headrace.methods"


class DraftMethod(ABC):
    """A drafter in the middle of decoding B sequences, and how one is trained."""

    Options: ClassVar[type[Section]] = Section
    """Typed options of training; unknown keys are refused."""
    taps: tuple[Tap, ...]
    """What it is fed of the target, in this order."""

    @classmethod
    @abstractmethod
    def train(
        cls, data: Data, target: Target, options: Any, out: Path, say: Callable[[str], None]
    ) -> dict[str, Any]:
        """Train from ``data`` (store, rows, keys of both splits) and end with ``checkpoint.write_drafter(out, ...)``.

        Returns plain JSON values for the manifest and the closing table. May be killed and called again.
        """

    @classmethod
    @abstractmethod
    def open(cls, folder: Path, target: Target, device: str, dtype: torch.dtype) -> Self:
        """Read what :meth:`train` wrote, with ``checkpoint.read_drafter``, which proves the weights."""

    @abstractmethod
    def begin(self, prompts: Sequence[Sequence[int]], roots: Tensor, states: Tensor, room: int) -> None:
        """Start B sequences. ``states`` [T, B, longest, H] are aligned at the last token, ``roots`` [B] the first new tokens.

        ``room`` is how many tokens a sequence may grow by, for methods that keep memory a position.
        """

    @abstractmethod
    def extend(self, tokens: Tensor, states: Tensor, counts: Tensor) -> None:
        """Take what a verification made certain: ``tokens`` [B, M], and ``states`` [T, B, M, H] of the positions before them.

        Of sequence b the first ``counts[b]`` count; the last of those tokens is the new root.
        """

    @abstractmethod
    def propose(self, steps: int) -> Tensor:
        """The next tokens after the root, int64 [B, steps] in the target's ids."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences of the batch alone, int64 [B']."""


def method_class(name: str) -> type[DraftMethod]:
    """The method an installed package registered as ``name``. Raises ConfigError when there is none."""
    found: type[DraftMethod] = plugins.load(ENTRY_POINT_GROUP, name, DraftMethod, own=(OWN_METHOD,))
    return found


def method_options(name: str, values: dict[str, Any]) -> Section:
    """``values`` as the method's own options. Raises ConfigError for a key it does not have."""
    return build(method_class(name).Options, values, f"options of method {name}")


def open_drafter(folder: Path, target: Target, device: str, dtype: torch.dtype) -> Draft | DraftMethod:
    """A drafter of any method, ready to draft for ``target``. Raises as ``load_draft`` does."""
    name = str(read_config(folder).get("architecture", OWN_METHOD))
    if name == OWN_METHOD:
        return load_draft(folder, target, device=device, dtype=dtype)
    return method_class(name).open(folder, target, device, dtype)
