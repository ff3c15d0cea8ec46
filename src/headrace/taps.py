"""Reading the residual stream of a transformers model: where boundaries and the final state are taken.

Used by the ``hf`` engine (to store states) and by evaluation (to feed a drafter), so both see the same tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.types import FINAL, Tap

_LAYER_NAMES = ("layers", "h", "blocks")
_NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


def find_decoder(model: nn.Module, num_layers: int) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder layers and the final norm of a causal language model, also inside a multimodal wrapper.

    Raises ConfigError when there is not exactly one such stack: a vision tower is never taken by luck.
    """
    found: list[tuple[nn.ModuleList, nn.Module]] = []
    for name, module in model.named_modules():
        if any(part in name for part in ("vision", "visual", "audio")):
            continue
        for layers_name in _LAYER_NAMES:
            layers = getattr(module, layers_name, None)
            if not isinstance(layers, nn.ModuleList) or len(layers) != num_layers:
                continue
            norm = next(
                (n for n in (getattr(module, x, None) for x in _NORM_NAMES) if isinstance(n, nn.Module)), None
            )
            if norm is not None:
                found.append((layers, norm))
    if len(found) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} stacks of {num_layers} decoder layers with a final norm, expected one; "
            "this model family is not known to headrace.taps"
        )
    return found[0]


class ResidualTaps:
    """Context manager that records taps during a forward pass of a transformers model.

    Boundary ``b`` < N is the input of layer ``b``; boundary N the input of the final norm; ``final`` its output
    (or its input when ``final_normed`` is False). After a forward, :attr:`states` holds one tensor a tap, each
    ``[batch, tokens, hidden]`` on the model's device. Not re-entrant; one forward at a time.
    """

    def __init__(
        self, model: nn.Module, num_layers: int, taps: Sequence[Tap], *, final_normed: bool = True
    ) -> None:
        self.taps = tuple(taps)
        self.num_layers = num_layers
        self.final_normed = final_normed
        self.states: dict[Tap, torch.Tensor] = {}
        self._layers, self._norm = find_decoder(model, num_layers)
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for tap in self.taps:
            if tap == FINAL and self.final_normed:
                self._handles.append(self._norm.register_forward_hook(self._after(tap)))
            elif tap in (FINAL, self.num_layers):
                self._handles.append(
                    self._norm.register_forward_pre_hook(self._before(tap), with_kwargs=True)
                )
            else:
                self._handles.append(
                    self._layers[int(tap)].register_forward_pre_hook(self._before(tap), with_kwargs=True)
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def stacked(self) -> torch.Tensor:
        """The taps of the last forward in order, ``[taps, batch, tokens, hidden]``."""
        return torch.stack([self.states[tap] for tap in self.taps])

    def _before(self, tap: Tap) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.states[tap] = args[0] if args else kwargs["hidden_states"]

        return hook

    def _after(self, tap: Tap) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self.states[tap] = output

        return hook
