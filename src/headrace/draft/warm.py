"""Starting weights for a new drafter: the target's head and norms always, its last layer's matrices if asked.

The drafter has the shape of a target layer but for the doubled input of q, k and v, so the last layer's weights fit its
second half (the state) as they are. ``fc`` starts by passing on the last tap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.draft.model import Eagle3Draft
from headrace.errors import ConfigError
from headrace.target import Target

INIT_STD = 0.02
FINAL_NORMS = (
    "model.norm.weight",
    "language_model.norm.weight",
    "ln_f.weight",
    "final_layer_norm.weight",
    "final_layernorm.weight",
    "norm.weight",
)


def initialize(model: Eagle3Draft, target: Target, vocab_ids: Tensor, seed: int) -> None:
    """Random matrices (seeded), the target's embedding, final norm and head rows ``vocab_ids`` [V]."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and not name.startswith(("embed_tokens", "lm_head")):
                parameter.normal_(0.0, INIT_STD, generator=generator)
        head = target.head
        model.embed_tokens.weight.copy_(target.embedding)
        # Serving applies the draft's matrix alone, so a constant factor on the target's logits goes into it.
        model.lm_head.weight.copy_(head.weight[vocab_ids].float() * head.scale)
        model.norm.weight.copy_(_norm_weight(target, *FINAL_NORMS))
        model.d2t.copy_(vocab_ids - torch.arange(len(vocab_ids)))
        model.t2d.zero_()[vocab_ids] = True


def copy_layer(model: Eagle3Draft, target: Target, index: int) -> None:
    """Start the drafter's layer from layer ``index`` (0-based) of the target.

    Raises ConfigError when that layer has no plain q/k/v/o and gate/up/down matrices of the drafter's shape.
    """
    layer, hidden = model.layer, model.config.hidden_size

    def get(name: str, shape: torch.Size) -> Tensor:
        weight = target.tensor(f"layers.{index}.{name}.weight")
        if weight is None or weight.shape != shape:
            found = "no such weight" if weight is None else f"shape {list(weight.shape)}"
            raise ConfigError(
                f"layer {index} of {target.name} cannot start the drafter: {name} has {found}, the drafter needs {list(shape)}; use init = random"
            )
        return weight

    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            into = getattr(layer.self_attn, name).weight
            into[:, hidden:].copy_(get(f"self_attn.{name}", into[:, hidden:].shape))
        layer.self_attn.o_proj.weight.copy_(get("self_attn.o_proj", layer.self_attn.o_proj.weight.shape))
        for name in ("gate_proj", "up_proj", "down_proj"):
            into = getattr(layer.mlp, name).weight
            into.copy_(get(f"mlp.{name}", into.shape))
        layer.hidden_norm.weight.copy_(_norm_weight(target, f"layers.{index}.input_layernorm.weight"))
        layer.post_attention_layernorm.weight.copy_(
            _norm_weight(target, f"layers.{index}.post_attention_layernorm.weight")
        )
        model.fc.weight.mul_(0.1)
        model.fc.weight[:, -hidden:] += torch.eye(hidden)


def _norm_weight(target: Target, *names: str) -> Tensor:
    """A norm's weight as a plain RMS norm has it (1 + w where the target stores w)."""
    weight = target.tensor(*names)
    if weight is None:
        raise ConfigError(f"{target.name} has no {names[0]}; use init = random")
    return weight.float() + (1.0 if target.norm_kind == "rms1p" else 0.0)
