"""Tiny random targets of several families, for tests and examples: real configs, real code paths, seconds to make.

Norm weights are drawn around 1 (around 0 for 1+w norms), never all equal: a missing or doubled norm must show.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_neox")

_DEEPSEEK: dict[str, Any] = {
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""Latent attention and experts as DeepSeek-V3 has them, with the widths that serving engines' kernels insist on."""


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    layers: int = 6,
    hidden: int = 64,
    vocab: int = 49152,
    dtype: str = "float32",
    seed: int = 0,
    tokenizer: Path | None = None,
    **overrides: Any,
) -> Path:
    """Write a random model of ``family`` to ``folder`` (HF layout) and return it.

    ``tokenizer`` is a model folder whose tokenizer files are copied along. ``overrides`` are config fields.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    config = _config(family, layers, hidden, vocab, overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                centre = 0.0 if family.startswith("gemma") else (1.0 if name.endswith("weight") else 0.0)
                noise = torch.rand(parameter.shape, generator=generator) - 0.5
                parameter.copy_((centre + noise).to(parameter.dtype))
            elif parameter.dim() >= 2:
                # The default 0.02 leaves tiny models almost linear; larger weights make every layer matter.
                parameter.copy_(
                    (torch.randn(parameter.shape, generator=generator) * hidden**-0.5).to(parameter.dtype)
                )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if family == "deepseek_v3":  # serving engines read these; transformers does not save them
        _patch_config(folder, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc")
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).exists():
                shutil.copy(tokenizer / name, folder / name)
    return folder


def make_config_only(
    folder: Path, *, layers: int = 8, hidden: int = 16, vocab: int = 70000, dtype: str = "bfloat16"
) -> Path:
    """A target that is a ``config.json`` and nothing else: enough for the ``fake`` engine and for planning."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "dtype": dtype,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _config(family: str, layers: int, hidden: int, vocab: int, overrides: dict[str, Any]) -> Any:
    import transformers

    heads = max(1, hidden // 32)
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if family in ("llama", "qwen2", "qwen3"):
        extra: dict[str, Any] = {"num_key_value_heads": max(1, heads // 2), "tie_word_embeddings": True}
        if family != "qwen2":
            extra["head_dim"] = 32
        cls = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[family]
    elif family == "qwen3_moe":
        cls = "Qwen3MoeConfig"
        extra = {
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": 32,
            "moe_intermediate_size": hidden,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        }
    elif family == "deepseek_v3":
        cls = "DeepseekV3Config"
        extra = {**copy.deepcopy(_DEEPSEEK), "num_key_value_heads": heads, "moe_intermediate_size": hidden}
    elif family == "gemma3":
        cls = "Gemma3TextConfig"
        extra = {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32}
    elif family == "gpt_neox":
        cls, extra = "GPTNeoXConfig", {"tie_word_embeddings": False}
    else:
        raise ValueError(f"family {family!r} is not one of {FAMILIES}")
    return getattr(transformers, cls)(**{**common, **extra, **overrides})


def _patch_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}, indent=2))
