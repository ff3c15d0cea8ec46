"""Boundaries ↔ the numbers an engine calls them by in a drafter's config; both directions, so that neither can drift. Torch-free.

vLLM numbers boundaries. SGLang's numbers are read by the target's model class (``set_eagle3_layers_to_capture``, read in
0.5.17 to 0.5.23):

- most: number k is the output of layer k, boundary k + 1;
- DeepSeek, Kimi, GLM with latent attention: boundaries, unless the first number is 1, then as most;
- gpt-oss: as most, unless the largest number is N, the number of layers: then they are boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headrace.target import Target

EngineName = Literal["sglang", "vllm"]

# deepseek_v2.py and what derives from it or copies it (glm4_moe_lite.py, glm4_moe.py's GlmMoeDsa, kimi_k25.py's text part).
_BOUNDARIES_UNLESS_FROM_1 = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite", "glm_moe_dsa",
)  # fmt: skip


def deepseek_like(target: Target) -> bool:
    """Whether SGLang takes this target's tap numbers for boundaries, unless the first is 1."""
    return target.model_type in _BOUNDARIES_UNLESS_FROM_1


def boundaries(ids: Sequence[int], target: Target, engine: EngineName) -> tuple[int, ...]:
    """What ``engine`` captures for the layer ids ``ids`` of a drafter's config, in their order."""
    if engine == "vllm":
        shift = 0
    elif deepseek_like(target):
        shift = 1 if ids[0] == 1 else 0
    elif target.model_type == "gpt_oss":
        shift = 0 if max(ids) == target.num_layers else 1
    else:
        shift = 1
    return tuple(k + shift for k in ids)


def layer_ids(taps: Sequence[int], target: Target, engine: EngineName) -> list[int] | None:
    """Layer ids that ``engine`` reads as exactly ``taps`` (ascending boundaries); None when there are none.

    Where two lists would do, the one that is shifted as for every other target is given: more tools read it right.
    """
    shifts = (0,) if engine == "vllm" else (1, 0)
    for shift in shifts:
        ids = [tap - shift for tap in taps]
        if min(ids) >= 0 and boundaries(ids, target, engine) == tuple(taps):
            return ids
    return None
