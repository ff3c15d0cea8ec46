"""How well a CUDA device is used while training: model FLOPs utilization, and the share of time it had an update to work on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headrace.draft.shape import DraftConfig
from headrace.draft.ttt import Pack

# Dense bf16 products, FLOP/s, by a part of the device's name; a device not named here has no utilization reported.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}  # fmt: skip


def useful_flops(
    config: DraftConfig, rows: int, starts: int, steps: int, *, train_lm_head: bool = False
) -> float:
    """Multiply-adds x 2 of one pack's products with weights, forward and backward, that the loss needs.

    Padding, recomputation and attention scores do not count. Trained weights cost three products (forward, the input's and
    the weight's gradient), frozen ones two; the target's head is only read forward, once a start.
    """
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    every_row = len(config.taps) * hidden * hidden + 2 * hidden * key_value
    every_step = 2 * hidden * query + query * hidden + 3 * hidden * config.intermediate_size
    later_step = 2 * hidden * key_value
    trained = rows * every_row + starts * steps * every_step + starts * (steps - 1) * later_step
    head = starts * steps * hidden * config.draft_vocab_size * (6.0 if train_lm_head else 4.0)
    return 6.0 * trained + head + 2.0 * starts * hidden * config.vocab_size


def peak_flops(device_name: str) -> float:
    """Dense bf16 FLOP/s of a device by its name; 0 for an unknown one."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), 0.0)


def busy_share(milliseconds: Sequence[float], seconds: float) -> float:
    """Share of ``seconds`` that the device worked, from the lengths of its stretches of work."""
    return min(1.0, sum(milliseconds) / 1e3 / seconds) if seconds > 0 else 0.0


class Gauge:
    """Measures one worker's device between two readings; silent on a CPU.

    A stretch of work is timed by the device's own clock, so it costs no wait: between two stretches the device was idle,
    waiting for a pack or for the host.
    """

    def __init__(
        self, config: DraftConfig, steps: int, device: torch.device, *, bfloat16: bool, train_lm_head: bool
    ) -> None:
        self.config, self.steps, self.train_lm_head = config, steps, train_lm_head
        self.cuda = device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if self.cuda and bfloat16 else 0.0
        self._flops = 0.0
        self._stretches: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What is queued inside is one stretch of work."""
        if not self.cuda:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._stretches.append((begin, end))

    def count(self, pack: Pack) -> None:
        """One pack will be trained on. Its sizes are known on the host."""
        starts = pack.layout.spans[-1][3] if pack.layout.spans else 0
        self._flops += useful_flops(
            self.config, pack.tokens, starts, self.steps, train_lm_head=self.train_lm_head
        )

    def read(self, seconds: float) -> dict[str, float]:
        """``gpu_busy`` and ``mfu`` (0 to 1) of the last ``seconds``; what was queued must have ended. Begins anew."""
        flops, self._flops = self._flops, 0.0
        stretches, self._stretches = self._stretches, []
        if not self.cuda:
            return {}
        out = {"gpu_busy": busy_share([a.elapsed_time(b) for a, b in stretches], seconds)}
        if self.peak:
            out["mfu"] = flops / (seconds * self.peak)
        return out
