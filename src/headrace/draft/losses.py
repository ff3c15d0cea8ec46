"""How far a draft distribution is from the target's, with the gradient on the draft's logits written out.

For one row let p be the target's distribution, p' its part on the draft vocabulary, q the draft's (which lives there
only). The chance that rejection sampling accepts the draft's token is a = sum min(p', q); p' keeps its true mass, so a
is what serving would see. Losses:

- ``kl``: KL(p'/|p'| || q), soft cross-entropy less its constant. Mass outside the draft vocabulary is renormalized away:
  no draft can place it.
- ``ce``: -log q at the target's most likely token: greedy acceptance alone.
- ``tv``: 1 - a, total variation.
- ``lk``: -log a, likelihood of acceptance.
- ``hybrid``: w KL + (1 - w) tv with w = exp(-3 a), held constant: KL while the two are far apart, tv near the end.

With g = dL/dq each has the gradient q * (g - sum q g). Everything is float32 or wider: in bf16 the difference q - p
vanishes exactly as training converges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    # Shapes for readers, and for tests/test_shapes.py, which checks them; nothing is imported at run time.
    from jaxtyping import Float, Int

LossKind = Literal["kl", "ce", "tv", "lk", "hybrid"]
HYBRID_RATE = 3.0


def loss_and_gradient(
    kind: LossKind,
    logits: Float[Tensor, "*rows V"],
    log_target: Float[Tensor, "... V"],
    mass: Float[Tensor, "..."],
    top: Int[Tensor, "..."],
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows V"]]:
    """Loss [...] and its gradient [..., V] on ``logits``.

    Args:
        logits: [..., V] of the draft, float32 or wider.
        log_target: [..., V] log of p'/|p'|, broadcast against ``logits``.
        mass: [...] |p'|, the target's probability of the draft vocabulary.
        top: int64 [...] draft id of the target's best token; read by ``ce`` alone.
    """
    log_q = logits.log_softmax(-1)
    q = log_q.exp()
    if kind == "ce":
        places = torch.arange(logits.shape[-1], device=logits.device)
        picked = (places == top[..., None]).to(q.dtype)
        return -(log_q * picked).sum(-1), q - picked
    p = log_target.exp()
    if kind == "kl":
        return (p * (log_target - log_q)).sum(-1), q - p
    full = p * mass[..., None]
    accepted = torch.minimum(full, q).sum(-1, keepdim=True)
    below = (q < full).to(q.dtype)
    variation = q * ((q * below).sum(-1, keepdim=True) - below)
    if kind == "tv":
        return 1 - accepted[..., 0], variation
    if kind == "lk":
        floor = accepted.clamp(min=1e-6)
        return -floor[..., 0].log(), variation / floor
    weight = torch.exp(-HYBRID_RATE * accepted)
    divergence = (p * (log_target - log_q)).sum(-1)
    loss = weight[..., 0] * divergence + (1 - weight[..., 0]) * (1 - accepted[..., 0])
    return loss, weight * (q - p) + (1 - weight) * variation
