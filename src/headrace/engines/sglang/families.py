"""Which boundaries each model family can be captured at in SGLang, and what it calls them.

SGLang captures a layer's output as the next layer's input: boundary ``b`` is the start of layer ``b``. So boundaries 1 to N-1
can be had; boundary 0 is refused by the native capture and breaks the older models, and nothing follows the last layer (the
final state is what comes after it). "Output of layer k" is boundary k + 1 under the naming DFLASH in every family listed
with it, and under EAGLE3 in those listed with that; DeepSeek's and gpt-oss's exception in EAGLE3 is never met, since they have DFLASH.
Read in 0.5.17 to 0.5.23; the plug-in checks the loaded model against the boundaries asked for and refuses at start.
"""

from __future__ import annotations

from typing import Literal

from headrace.errors import ConfigError
from headrace.target import Target
from headrace.types import FINAL, Tap

Naming = Literal["DFLASH", "EAGLE3"]

_DFLASH = (
    "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "InternLM3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
    "KimiK25ForConditionalGeneration", "GptOssForCausalLM", "Glm4MoeLiteForCausalLM",
)  # fmt: skip
_EAGLE3 = (
    "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Glm4MoeForCausalLM",
    "MiniMaxM2ForCausalLM", "ApertusForCausalLM", "ExaoneMoEForCausalLM",
)  # fmt: skip


def naming(target: Target) -> Naming:
    """Under which of SGLang's naming schemes "output of layer k" is boundary k + 1. Raises ConfigError for an unread family."""
    names = target.raw_config.get("architectures") or ["?"]
    for scheme, known in (("DFLASH", _DFLASH), ("EAGLE3", _EAGLE3)):
        if names[0] in known:
            return scheme  # type: ignore[return-value]
    raise ConfigError(
        f"{target.name} is a {names[0]}, whose layer names in SGLang nobody has checked; the families known are "
        f"{', '.join(sorted((*_DFLASH, *_EAGLE3)))}. Capture 'final' alone, or use the engine hf or vllm"
    )


def check_taps(target: Target, taps: tuple[Tap, ...]) -> None:
    """Raise ConfigError for a tap that SGLang cannot give."""
    last = target.num_layers
    for tap in taps:
        if tap == 0:
            raise ConfigError(
                "SGLang does not give boundary 0, the embedding output; take boundaries from 1 on, or engine hf"
            )
        if tap == last:
            raise ConfigError(
                f"SGLang does not give boundary {last}, the state after the last layer before the norm; take 'final' (after the norm), or engine hf"
            )
    if any(tap != FINAL for tap in taps):
        naming(target)
