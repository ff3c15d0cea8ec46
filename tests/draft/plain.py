"""A plain, slow drafter in float64: one document, one chain, one step at a time, written from the published description.

It shares no code with the product but the weights, so the two can only agree by both being right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.draft.shape import DraftConfig


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


class PlainDrafter:
    """Drafts from one document. ``weights`` are float64 tensors by serving name, with gradients if wanted."""

    def __init__(self, config: DraftConfig, weights: dict[str, Tensor]) -> None:
        self.config, self.w = config, weights

    def fuse(self, taps: Tensor) -> Tensor:
        eps = self.config.norm_eps
        if self.config.fc_norm == "joint":
            taps = rms(taps, self.w["input_norm.weight"], eps)
        if self.config.fc_norm == "each":
            h = self.config.hidden_size
            parts = [taps[i * h : (i + 1) * h] for i in range(len(self.config.taps))]
            taps = torch.cat([rms(p, self.w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)])
        return self.w["fc.weight"] @ taps

    def turn(self, vector: Tensor, position: int) -> Tensor:
        """Rotate one head: pairs (i, i + D/2) by position * theta^(-2i/D); angles are float32, as in serving."""
        half = self.config.head_dim // 2
        turns = [self.config.rope.theta ** (-2 * i / self.config.head_dim) for i in range(half)]
        angle = torch.tensor(turns, dtype=torch.float32) * position
        a, b = vector[:half], vector[half:]
        cos, sin = angle.cos().double(), angle.sin().double()
        return torch.cat([a * cos - b * sin, b * cos + a * sin])

    def heads(self, name: str, mixed: Tensor, position: int | None) -> list[Tensor]:
        flat = self.w[f"layers.0.self_attn.{name}.weight"] @ mixed
        parts = list(flat.split(self.config.head_dim))
        return parts if position is None else [self.turn(p, position) for p in parts]

    def row(
        self, token: int, state: Tensor, position: int, past: list[tuple[list[Tensor], list[Tensor]]]
    ) -> Tensor:
        """One row after the rows in ``past`` (which it joins): the layer's output."""
        c, w = self.config, self.w
        normed = rms(state, w["layers.0.hidden_norm.weight"], c.norm_eps)
        embed = rms(w["embed_tokens.weight"][token], w["layers.0.input_layernorm.weight"], c.norm_eps)
        mixed = torch.cat([embed, normed])
        past.append((self.heads("k_proj", mixed, position), self.heads("v_proj", mixed, None)))
        attended = []
        for index, query in enumerate(self.heads("q_proj", mixed, position)):
            group = index * c.num_kv_heads // c.num_heads
            scores = torch.stack([query @ keys[group] / math.sqrt(c.head_dim) for keys, _ in past]).softmax(0)
            attended.append(
                sum(
                    (s * values[group] for s, (_, values) in zip(scores, past, strict=True)),
                    torch.zeros_like(query),
                )
            )
        out = (normed if c.norm_before_residual else state) + w[
            "layers.0.self_attn.o_proj.weight"
        ] @ torch.cat(attended)
        mlp_in = rms(out, w["layers.0.post_attention_layernorm.weight"], c.norm_eps)
        gate = torch.nn.functional.silu(w["layers.0.mlp.gate_proj.weight"] @ mlp_in)
        return out + w["layers.0.mlp.down_proj.weight"] @ (gate * (w["layers.0.mlp.up_proj.weight"] @ mlp_in))

    def logits(self, out: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ rms(out, self.w["norm.weight"], self.config.norm_eps)

    def chain(self, ids: list[int], taps: Tensor, start: int, steps: int) -> list[Tensor]:
        """Outputs of ``steps`` draft steps from row ``start``, reading the document's own tokens at every step."""
        past: list[tuple[list[Tensor], list[Tensor]]] = []
        out = torch.zeros(0)
        for p in range(start + 1):  # rows the target has seen: its own taps, the next token
            out = self.row(ids[p + 1], self.fuse(taps[p]), p, past)
        outs = [out]
        for s in range(1, steps):  # rows of the draft: its own state, one position further each
            state = (
                rms(out, self.w["norm.weight"], self.config.norm_eps) if self.config.normed_feedback else out
            )
            out = self.row(ids[start + 1 + s], state, start + s, past)
            outs.append(out)
        return outs

    def loss(
        self,
        ids: list[int],
        mask: list[bool],
        taps: Tensor,
        final: Tensor,
        head: Tensor,
        draft_ids: list[int],
        weights: list[float],
    ) -> Tensor:
        """Soft cross-entropy (less the target's entropy) summed over steps, each a mean over the chains that count."""
        total = torch.zeros((), dtype=torch.float64)
        for s, weight in enumerate(weights):
            terms, count = [], 0
            for start in range(len(ids)):
                if start + 2 + s >= len(ids) or not all(mask[start + 1 : start + 3 + s]):
                    continue
                count += 1
                target_logits = head @ final[start + 1 + s]
                if int(target_logits.argmax()) not in draft_ids:
                    continue
                p = target_logits[draft_ids].softmax(0)
                log_q = self.logits(self.chain(ids, taps, start, s + 1)[s]).log_softmax(0)
                terms.append((p * (p.log() - log_q)).sum())
            if terms:
                total = total + weight * torch.stack(terms).sum() / count
        return total
