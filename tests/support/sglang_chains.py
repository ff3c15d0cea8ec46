"""SGLang plug-in for tests: EAGLE-3 chains on the plain-torch CPU platform of ``headrace.testing.sglang_cpu``.

Stock SGLang 0.5.23 drafts on CUDA-like devices only: its torch_native attention knows neither the verification of a chain
nor draft steps, and its small bookkeeping kernels are Triton. This adds the former and, with TRITON_INTERPRET=1 in the
environment, lets Triton's interpreter run the latter. Nothing of the drafter itself is touched: what is served is SGLang's
own ``LlamaForCausalLMEagle3``, its own acceptance and its own counters.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``; runs in every process of the server before models are made."""
    import torch
    from sglang.kernels.ops.speculative import cache_locs, spec_tree
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    class ChainAttention(TorchNativeAttnBackend):
        """torch_native for verifications and draft steps; ``ahead`` is how many drafted slots a draft step sees."""

        ahead = 0

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True
        ) -> Any:
            if batch.forward_mode.is_target_verify():
                count = batch.spec_info.draft_token_num
                batch = Seen(
                    batch,
                    # The committed tokens are the prefix; the chain behind them is plain causal attention.
                    extend_prefix_lens=batch.seq_lens,
                    extend_seq_lens=torch.full_like(batch.seq_lens, count),
                    seq_lens=batch.seq_lens + count,
                )
            return super().forward_extend(q, k, v, layer, batch, save_kv_cache)

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True
        ) -> Any:
            if self.ahead:
                batch = Seen(batch, seq_lens=batch.seq_lens + self.ahead)
            return super().forward_decode(q, k, v, layer, batch, save_kv_cache)

    class DraftSteps:
        """One attention for every draft step but the first, which the draft-extend pass has taken."""

        def __init__(self, runner: Any, steps: int) -> None:
            self.attn_backends = [ChainAttention(runner) for _ in range(steps - 1)]
            for step, attention in enumerate(self.attn_backends):
                attention.ahead = step + 1

        def init_forward_metadata(self, batch: Any) -> None:
            for attention in self.attn_backends:
                attention.init_forward_metadata(batch)

    def for_draft_steps(factory: Any) -> DraftSteps | None:
        if factory.topk != 1:
            raise ValueError(
                "the plug-in for tests serves chains (topk 1): the mask of a tree is not implemented"
            )
        steps = factory.speculative_num_steps
        return DraftSteps(factory.draft_model_runner, steps) if steps > 1 else None

    ATTENTION_BACKENDS["torch_native"] = ChainAttention
    DraftBackendFactory.create_decode_backend = for_draft_steps
    DraftBackendFactory.create_draft_extend_backend = lambda factory: ChainAttention(
        factory.draft_model_runner
    )
    # The branch that runs the in-tree Triton kernels; other out-of-tree platforms are turned away there.
    spec_tree._is_xpu = cache_locs._is_xpu = True


class Seen:
    """A forward batch with some fields replaced, for attention alone."""

    def __init__(self, batch: Any, **fields: Any) -> None:
        self.__dict__.update(fields)
        self._batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)
