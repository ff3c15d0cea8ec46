"""What each serving engine can represent, and how it spells a drafter: names, tap ids, flags. Torch-free.

Everything here was read in the engines' released code (SGLang ``srt/models/llama_eagle3.py`` and
``srt/model_executor/model_runner_components/spec_aux_hidden_state.py``, vLLM ``model_executor/models/llama_eagle3.py`` and
``transformers_utils/configs/speculators``) and is proven by serving real exports in ``tests/serving``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import CliPositionalArg

from headrace.config import Section
from headrace.draft.config import DraftConfig
from headrace.draft.layerids import EngineName, deepseek_like, layer_ids
from headrace.errors import ConfigError
from headrace.target import Target

TESTED: dict[str, str] = {"sglang": "0.5.23", "vllm": "0.32.0"}
"""Versions that exports are served with in the tests."""

# Oldest release in whose code a feature was seen; older ones ignore it without a word.
_SINCE: dict[str, dict[str, str]] = {
    "sglang": {
        "eagle3": "0.5.11",
        "taps": "0.5.14",
        "fc_norm each": "0.5.14",
        "normed_feedback": "0.5.14",
        "fc_norm joint": "0.5.17",
    },
    "vllm": {"eagle3": "0.32.0"},
}


class ExportConfig(Section):
    """Write a drafter as a folder that stock SGLang (EAGLE3) or stock vLLM (method eagle3) serves."""

    draft: CliPositionalArg[Path]
    """Drafter folder made by `headrace train`."""
    engine: EngineName
    """sglang or vllm: they name the same taps by different numbers, so one folder cannot serve both."""
    out: Path
    """Folder to make; an earlier export there is replaced."""
    model: str = ""
    """Folder or hub id of the target; the one the drafter was trained for when empty."""
    revision: str = ""
    """Hub revision of the target."""
    served_model: str = ""
    """Name or path of the target where it is served, for the model card and vLLM's config; as `model` when empty."""
    engine_version: str = ""
    """Version of the engine that will serve; features it lacks are refused. The tested version when empty."""
    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """dtype of the exported weights; as trained when empty."""
    max_positions: int = Field(0, ge=0)
    """Longest context that will be served; the target's own when 0."""
    steps: int = Field(5, ge=1)
    """Drafted tokens that the model card and vLLM's config recommend."""


def check(config: DraftConfig, target: Target, engine: EngineName, version: str) -> None:
    """Raise ConfigError naming everything of this drafter that the engine would drop or misread."""
    lines = [*_unsupported(config, target, engine), *_too_old(config, engine, version)]
    if lines:
        raise ConfigError(f"{engine} {version} cannot serve this drafter: {'; '.join(lines)}")


def _unsupported(config: DraftConfig, target: Target, engine: EngineName) -> list[str]:
    lines = []
    if engine == "sglang":
        if config.norm_before_residual:
            lines.append(
                "it has no norm_before_residual (train with norm_before_residual off, or export for vllm)"
            )
        if config.attention_bias:
            lines.append(
                "its layer has no attention biases and skips them when loading (train with attention_bias off)"
            )
        if config.own_embedding:
            lines.append(
                "it replaces the drafter's own embedding by the target's (train with own_embedding off, or export for vllm)"
            )
        if len(config.taps) == 1:
            lines.append("it fuses taps only when there are several (train with two or more)")
        if config.rope.attention_factor is not None:
            lines.append("it does not read the attention_factor of yarn positions (train with the default)")
        if target.num_layers in config.taps:
            lines.append(
                f"it cannot capture the output of the last layer, boundary {target.num_layers} (train with earlier taps)"
            )
        if 0 in config.taps:
            lines.append("it has no number for the embedding output, boundary 0 (train with later taps)")
        elif layer_ids(sorted(config.taps), target, engine) is None:
            lines.append(
                "for this target it would read the tap list from boundary 1 on as one layer later (train with a first tap of 2 or more)"
            )
    elif 0 in config.taps and (deepseek_like(target) or target.model_type == "gpt_oss"):
        lines.append(
            "it cannot capture the embedding output, boundary 0, of this target (train with later taps)"
        )
    return lines


def _too_old(config: DraftConfig, engine: EngineName, version: str) -> list[str]:
    needed = ["eagle3"]
    needed += ["taps"] if len(config.taps) != 3 else []
    needed += [f"fc_norm {config.fc_norm}"] if config.fc_norm != "none" else []
    needed += ["normed_feedback"] if config.normed_feedback else []
    since = _SINCE[engine]
    return [
        f"{feature} needs {engine} {since[feature]} or newer"
        for feature in needed
        if feature in since and version_key(version) < version_key(since[feature])
    ]


def version_key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing. Raises ConfigError when there are none."""
    numbers = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if numbers is None:
        raise ConfigError(f"engine_version {version!r} is not a version such as 0.5.23")
    return tuple(int(part) for part in numbers[1].split("."))


def tap_ids(taps: tuple[int, ...], target: Target, engine: EngineName) -> list[int]:
    """Ascending boundaries as the engine numbers them. Raises ConfigError where it has no numbers that mean them."""
    ids = layer_ids(taps, target, engine)
    if ids is None:
        raise ConfigError(
            f"{engine} has no layer ids for boundaries {list(taps)} of {target.name}; train with other taps"
        )
    return ids


def layer_config(config: DraftConfig, target: Target, max_positions: int, dtype: str) -> dict[str, Any]:
    """The drafter's layer as the Llama config both engines read."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.rope.to_hf(),
        "max_position_embeddings": max_positions,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.config.get("bos_token_id"),
        "eos_token_id": target.config.get("eos_token_id"),
        "dtype": dtype,
        # Without it vLLM takes the speculators format to mean three taps.
        "num_aux_hidden_states": len(config.taps),
    }


def engine_config(
    config: DraftConfig, target: Target, export: ExportConfig, max_positions: int, dtype: str
) -> dict[str, Any]:
    """``config.json`` of the export."""
    layer = layer_config(config, target, max_positions, dtype)
    ids = tap_ids(config.taps, target, export.engine)
    flags = {
        "norm_before_fc": config.fc_norm == "joint",
        "fc_norm": config.fc_norm == "each",
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.normed_feedback,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
    }
    if export.engine == "sglang":
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **flags,
            "torch_dtype": dtype,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": export.steps}],
            "verifier": {
                "name_or_path": export.served_model or target.name,
                "architectures": target.raw_config.get("architectures", []),
            },
        },
        **flags,
        "eagle_aux_hidden_state_layer_ids": ids,
        "transformer_layer_config": layer,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
