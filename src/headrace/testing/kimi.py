"""A tiny random Kimi-K2.5: a DeepSeek-V3 language model inside the multimodal wrapper, named as in the published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.testing.models import TOKENIZER_FILES, make_tiny_model

_VISION = {
    "patch_size": 14,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
    "merge_type": "sd2_tpool",
    "merge_kernel_size": [2, 2],
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vt_hidden_size": 32,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 1,
    "vt_intermediate_size": 64,
    "mm_hidden_size": 32,
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
}


def make_tiny_kimi(folder: Path, *, tokenizer: Path, seed: int = 0, **overrides: Any) -> tuple[Path, Path]:
    """Write the wrapped model to ``folder/kimi`` and the language model alone to ``folder/text``; returns both.

    The second is an ordinary DeepSeek-V3 folder that transformers runs: the reference for the first. The published
    checkpoints bring their own image processor as code, which this one does not: serve it with the config override
    ``{"language_model_only": true}``.
    """
    from safetensors.torch import load_file, save_file

    text = make_tiny_model(
        folder / "text", "deepseek_v3", hidden=128, tokenizer=tokenizer, seed=seed, **overrides
    )
    config = json.loads((text / "config.json").read_text())
    hidden = int(config["hidden_size"])
    kimi = folder / "kimi"
    kimi.mkdir(parents=True)
    weights = {
        f"language_model.{name}": tensor for name, tensor in load_file(text / "model.safetensors").items()
    }
    weights.update(_vision_weights(hidden, seed))
    save_file(weights, kimi / "model.safetensors", {"format": "pt"})
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "media_placeholder_token_id": int(config["vocab_size"]) - 1,
        "pad_token_id": config["pad_token_id"],
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "tie_word_embeddings": False,
        "text_config": config,
        "vision_config": {**_VISION, "text_hidden_size": hidden, "model_type": "kimi_k25"},
    }
    (kimi / "config.json").write_text(json.dumps(wrapper, indent=2))
    for name in TOKENIZER_FILES:
        if (text / name).exists():
            (kimi / name).write_bytes((text / name).read_bytes())
    return kimi, text


def _vision_weights(text_hidden: int, seed: int) -> dict[str, Any]:
    import torch

    width, inner, merged = 32, 64, 32 * 4
    shapes = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, width),
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "vision_tower.encoder.final_layernorm.bias": (width,),
        "mm_projector.pre_norm.weight": (width,),
        "mm_projector.pre_norm.bias": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (text_hidden, merged),
        "mm_projector.proj.2.bias": (text_hidden,),
    }
    for name, rows, columns in (
        ("wqkv", 3 * width, width),
        ("wo", width, width),
        ("mlp.fc0", inner, width),
        ("mlp.fc1", width, inner),
    ):
        shapes[f"vision_tower.encoder.blocks.0.{name}.weight"] = (rows, columns)
        shapes[f"vision_tower.encoder.blocks.0.{name}.bias"] = (rows,)
    for norm in ("norm0", "norm1"):
        shapes[f"vision_tower.encoder.blocks.0.{norm}.weight"] = (width,)
        shapes[f"vision_tower.encoder.blocks.0.{norm}.bias"] = (width,)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
