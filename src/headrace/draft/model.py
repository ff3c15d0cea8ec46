"""The EAGLE-3 drafter: one module whose weights have the names, shapes and arithmetic that SGLang and vLLM serve.

Shapes: B sequences, N rows of one call, T rows of a pack, H hidden, K key/value heads, D head_dim, V draft vocabulary.
A *row* p joins the fused taps of target position p with the embedding of token p+1; its logits propose token p+2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.draft.rotary import Rotary, rotate
from headrace.draft.shape import DraftConfig

if TYPE_CHECKING:
    # Shapes for readers, and for tests/test_shapes.py, which checks them; nothing is imported at run time.
    from jaxtyping import Bool, Float, Int


class RMSNorm(nn.Module):
    """Root-mean-square norm with weight; float32 inside, the input's dtype outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size]"""
        exact = torch.promote_types(x.dtype, torch.float32)
        y = x.to(exact)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(exact) * y).to(x.dtype)


class SelfAttention(nn.Module):
    """The projections of attention; the attending itself differs between training and serving and lives there."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def queries(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., 2H] → rotated queries [..., heads, D]"""
        return rotate(self._heads(self.q_proj(mixed)), cos, sin)

    def keys_values(self, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2H] → rotated keys and values [..., K, D]"""
        keys = rotate(self._heads(self.k_proj(mixed)), cos, sin)
        return keys, self._heads(self.v_proj(mixed))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] → [..., H]"""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One Llama layer whose attention reads ``[norm(embedding); norm(state)]``."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def mix(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2H], and the residual it adds to [..., H]."""
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        return torch.cat([self.input_layernorm(embeds).to(normed.dtype), normed], dim=-1), residual

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """attended [..., heads, D] and the residual → the layer's output [..., H]."""
        out: Tensor = residual + self.self_attn.o_proj(attended.flatten(-2))
        out = out + self.mlp(self.post_attention_layernorm(out))
        return out


@dataclass
class DraftCache:
    """Keys and values of the rows a drafter has seen, [B, K, slots, D]; written in place, one slot a row.

    In chain drafting a slot is a position: re-running a row with the target's own taps after verification
    overwrites what drafting had put there, as the engines do, and rows past a query are never attended to.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, model: Eagle3Draft, batch: int, slots: int) -> DraftCache:
        """An empty cache for ``batch`` sequences of at most ``slots`` rows each, in the drafter's device and dtype."""
        weight = model.fc.weight
        shape = (batch, model.config.num_kv_heads, slots, model.config.head_dim)
        return cls(weight.new_zeros(shape), weight.new_zeros(shape))

    @property
    def slots(self) -> int:
        """Capacity a sequence."""
        return self.keys.shape[2]

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put keys and values [B, N, K, D] at ``slots`` [B, N]."""
        index = slots[:, None, :, None].expand(-1, keys.shape[2], -1, keys.shape[3])
        self.keys.scatter_(2, index, keys.transpose(1, 2).to(self.keys.dtype))
        self.values.scatter_(2, index, values.transpose(1, 2).to(self.values.dtype))


class Eagle3Draft(nn.Module):
    """The drafter. Training runs it through :mod:`headrace.draft.ttt`, serving through :meth:`fuse` and :meth:`step`.

    ``embed_tokens`` is a frozen copy of the target's embedding unless ``config.own_embedding``. ``lm_head`` scores the
    draft vocabulary; draft id i is target id ``i + d2t[i]``.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        taps = len(config.taps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(config.own_embedding)
        self.input_norm = (
            RMSNorm(taps * config.hidden_size, config.norm_eps) if config.fc_norm == "joint" else None
        )
        each = (
            [RMSNorm(config.hidden_size, config.norm_eps) for _ in range(taps)]
            if config.fc_norm == "each"
            else None
        )
        self.fc_norm = nn.ModuleList(each) if each else None
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def layer(self) -> DraftLayer:
        """The one decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    # --- pieces shared by training and serving ----------------------------------------------------------------

    def fuse(self, taps: Float[Tensor, "*rows taps_x_H"]) -> Float[Tensor, "*rows H"]:
        """Taps of the target [..., taps * H], boundaries in the order of ``config.taps`` → first states [..., H]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        elif self.fc_norm is not None:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: Tensor = self.fc(taps)
        return out

    def feedback(self, out: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows H"]:
        """What the next step gets as its state: the layer's output, or that after the final norm (EAGLE-3.1)."""
        return self.norm(out) if self.config.normed_feedback else out

    def logits(self, out: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """The layer's output [..., H] → logits over the draft vocabulary [..., V]."""
        scores: Tensor = self.lm_head(self.norm(out))
        return scores

    def to_target(self, draft_ids: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """Draft ids → target ids, any shape."""
        return draft_ids + self.d2t[draft_ids]

    # --- serving ----------------------------------------------------------------------------------------------

    def step(
        self,
        ids: Int[Tensor, "B N"],
        states: Float[Tensor, "B N H"],
        positions: Int[Tensor, "B N"],
        cache: DraftCache,
        *,
        slots: Int[Tensor, "B N"] | None = None,
        mask: Bool[Tensor, "B N M"] | None = None,
    ) -> Float[Tensor, "B N H"]:
        """Run N rows of each sequence, adding them to ``cache``.

        Args:
            ids: [B, N] target ids, the token after each row's position.
            states: [B, N, H]: :meth:`fuse` of the row's taps where the target has seen it, else :meth:`feedback`.
            positions: [B, N] rotary positions: p for rows the target has seen, p + s for draft step s from row p.
            slots: [B, N] where to put keys and values; ``positions`` when absent.
            mask: bool [B, N, M], True where a row may attend to cache slots 0..M-1 (its own slot included); when absent,
                every slot up to its own, which is right whenever slots are positions.

        Returns:
            [B, N, H], the layer's output: give it to :meth:`logits` to propose and to :meth:`feedback` to go on.
        """
        slots = positions if slots is None else slots
        mixed, residual = self.layer.mix(self.embed_tokens(ids), states)
        cos, sin = self.rotary(positions)
        cache.write(*self.layer.self_attn.keys_values(mixed, cos, sin), slots)
        queries = self.layer.self_attn.queries(mixed, cos, sin).transpose(1, 2)
        if mask is None:
            mask = torch.arange(cache.slots, device=ids.device) <= slots[..., None]
        width = mask.shape[-1]
        groups = queries.shape[1] // cache.keys.shape[1]
        keys = cache.keys[:, :, :width].repeat_interleave(groups, dim=1)
        values = cache.values[:, :, :width].repeat_interleave(groups, dim=1)
        attended = F.scaled_dot_product_attention(
            queries, keys.to(queries.dtype), values.to(queries.dtype), attn_mask=mask[:, None]
        )
        return self.layer.finish(attended.transpose(1, 2), residual)
