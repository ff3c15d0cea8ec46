"""The shape of a drafter: frozen values that give its weights their meaning. No torch, so that any tool can read them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.config import Section
from headrace.errors import ConfigError, SpecMismatchError
from headrace.target import Target
from headrace.types import CaptureSpec

RopeType = Literal["default", "linear", "llama3", "yarn"]
FcNorm = Literal["none", "joint", "each"]


class RopeConfig(Section):
    """Rotary position embedding, as `transformers` computes it for these four types."""

    theta: float = Field(default=10000.0, gt=0)
    """Base of the frequencies."""
    type: RopeType = "default"
    """Kind of scaling."""
    factor: float = Field(default=1.0, gt=0)
    """How far the context is stretched (linear, llama3, yarn)."""
    original_max_positions: int = 0
    """Context the unscaled frequencies were trained for (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original/low are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original/high are left alone."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is left alone."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is stretched by the whole factor."""
    attention_factor: float | None = None
    """yarn: factor on cos and sin; computed from ``factor`` when absent."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """Read ``rope_theta``/``rope_scaling``/``rope_parameters`` of a Hugging Face config.

        Raises ConfigError for a type whose frequencies are not known here: they are never approximated.
        """
        values = dict(config.get("rope_parameters") or {})
        if values and all(
            isinstance(v, dict) for v in values.values()
        ):  # one entry an attention kind (Gemma 3)
            values = dict(values.get("full_attention") or next(iter(values.values())))
        values = {**dict(config.get("rope_scaling") or {}), **values}
        kind = str(values.get("rope_type") or values.get("type") or "default")
        if kind == "mrope":  # text positions are equal on all three axes, which is plain rotary
            kind = "default"
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise ConfigError(
                f"rope type {kind!r} is not known to Headrace; set draft.rope to default, linear, llama3 or yarn"
            )
        theta = values.get("rope_theta", config.get("rope_theta", 10000.0))
        original = values.get("original_max_position_embeddings") or config.get("max_position_embeddings", 0)
        optional = {
            k: values[k]
            for k in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
            if values.get(k)
        }
        if kind == "yarn" and values.get("attention_factor"):
            optional["attention_factor"] = values["attention_factor"]
        scaled: dict[str, Any] = {} if kind == "default" else {"factor": values.get("factor", 1.0)}
        if kind in ("llama3", "yarn"):
            scaled["original_max_positions"] = int(original)
        return cls(theta=float(theta), type=kind, **scaled, **optional)  # type: ignore[arg-type]

    def to_hf(self) -> dict[str, Any]:
        """The ``rope_parameters`` of a Hugging Face config (transformers 5 names)."""
        out: dict[str, Any] = {"rope_theta": self.theta, "rope_type": self.type}
        if self.type != "default":
            out["factor"] = self.factor
        if self.type in ("llama3", "yarn"):
            out["original_max_position_embeddings"] = self.original_max_positions
        if self.type == "llama3":
            out |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.type == "yarn":
            out |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
            if self.attention_factor is not None:
                out["attention_factor"] = self.attention_factor
        return out


class DraftConfig(Section):
    """Shape and variant of one EAGLE-3 drafter: everything its weights need to mean something."""

    taps: tuple[int, ...]
    """Boundaries of the target that are fused, in the order of the columns of ``fc``."""
    hidden_size: int = Field(ge=1)
    """Width of the drafter, equal to the target's."""
    intermediate_size: int = Field(ge=1)
    """Width of the MLP."""
    num_heads: int = Field(ge=1)
    """Query heads."""
    num_kv_heads: int = Field(ge=1)
    """Key and value heads."""
    head_dim: int = Field(ge=2)
    """Width of a head; even."""
    vocab_size: int = Field(ge=1)
    """Rows of the target's embedding."""
    draft_vocab_size: int = Field(ge=1)
    """Tokens the drafter can propose; equal to ``vocab_size`` for the full vocabulary."""
    norm_eps: float = 1e-5
    """Epsilon of every norm of the drafter."""
    rope: RopeConfig = RopeConfig()
    """Rotary positions."""
    max_positions: int = Field(ge=1)
    """The target's served context; the length trained on is in the lineage."""
    fc_norm: FcNorm = "none"
    """Norm of the taps before they are fused: none (EAGLE-3), one over all columns, or one a tap (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """Whether the residual of the layer starts from the normed state; stock SGLang cannot serve this."""
    normed_feedback: bool = False
    """Whether the next step gets the state after the final norm (EAGLE-3.1) or before it (EAGLE-3)."""
    attention_bias: bool = False
    """Biases on q, k, v and o."""
    own_embedding: bool = False
    """Whether the weights hold an embedding of their own; otherwise it is the target's."""

    @field_validator("taps")
    @classmethod
    def _taps(cls, taps: tuple[int, ...]) -> tuple[int, ...]:
        if not taps or len(set(taps)) != len(taps) or min(taps) < 0:
            raise ValueError(f"taps {list(taps)} must be distinct boundaries, at least one")
        return taps

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary positions")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        return self

    @property
    def full_vocabulary(self) -> bool:
        """Whether every target token can be proposed (the map is then the identity)."""
        return self.draft_vocab_size == self.vocab_size

    @classmethod
    def for_target(
        cls, target: Target, taps: tuple[int, ...], draft_vocab_size: int, **changes: Any
    ) -> DraftConfig:
        """The default shape for ``target``: its own width, MLP, heads and rotary positions, one Llama layer.

        Targets without plain heads (multi-head latent attention) get heads of 128, with 8 key/value heads where they
        divide. Pass ``changes`` for any other field.
        """
        config = target.config
        hidden = target.hidden_size
        values: dict[str, Any] = {
            "taps": taps,
            "hidden_size": hidden,
            "intermediate_size": int(config.get("intermediate_size") or 4 * hidden),
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size or target.vocab_size,
            "norm_eps": target.norm_eps,
            "max_positions": int(config.get("max_position_embeddings") or 8192),
            **_heads(config, hidden),
        }
        if "rope" not in changes:
            values["rope"] = RopeConfig.from_hf(config)
        return cls(**{**values, **changes})

    def require_spec(self, spec: CaptureSpec, what: str) -> None:
        """Raise SpecMismatchError unless states of ``spec`` can feed this drafter: its taps, width and a final state."""
        missing = [tap for tap in self.taps if tap not in spec.taps]
        if missing:
            raise SpecMismatchError(
                f"{what} holds taps {list(spec.taps)}, the drafter needs boundary {missing[0]}; extract with its taps {list(self.taps)}"
            )
        if spec.hidden_size != self.hidden_size:
            raise SpecMismatchError(
                f"{what} has states of width {spec.hidden_size}, the drafter has {self.hidden_size}; use the store of its target"
            )


def _heads(config: dict[str, Any], hidden: int) -> dict[str, int]:
    heads = int(config.get("num_attention_heads") or 0)
    latent = "kv_lora_rank" in config or "q_lora_rank" in config
    if heads and not latent:
        head_dim = int(config.get("head_dim") or hidden // heads)
        if head_dim % 2 == 0:
            return {
                "num_heads": heads,
                "num_kv_heads": int(config.get("num_key_value_heads") or heads),
                "head_dim": head_dim,
            }
    head_dim = (
        128 if hidden % 128 == 0 else max(d for d in (64, 32, 16, 8, 4, 2) if hidden % d == 0 or d == 2)
    )
    heads = max(1, hidden // head_dim)
    return {"num_heads": heads, "num_kv_heads": 8 if heads % 8 == 0 else heads, "head_dim": head_dim}
