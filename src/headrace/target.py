"""The target model as files: config, tokenizer, and the few weights a drafter needs, read without loading the model.

Data preparation, every engine and the drafter meet here, so that one reading of a model folder gives all of them
the same layer count, norm, hashes and vocabulary. Nothing here runs the model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, SpecMismatchError
from headrace.modelfiles import WeightFiles, download, load_errors, tokenizer_fingerprint
from headrace.types import FINAL, CaptureSpec, NormKind, Tap, hash_json, parse_taps

if TYPE_CHECKING:
    import torch

# Config fields that say how or by what a checkpoint was saved, and change none of its numbers.
_NOT_IDENTITY = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "architectures",
        "_attn_implementation",
    }
)
# Families whose RMSNorm multiplies by 1 + w (read in transformers: models/gemma, gemma2, gemma3, qwen3_next, qwen3_5).
_RMS_1P = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "recurrent_gemma",
)
_LAYER_NORM = (
    "gpt2",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "phi",
    "stablelm",
    "cohere",
    "cohere2",
    "starcoder2",
)


@dataclass(frozen=True)
class Head:
    """What turns a final state into logits: ``logits = softcap(scale * (final @ weight.T + bias))``."""

    weight: torch.Tensor
    """[vocab, hidden]"""
    bias: torch.Tensor | None = None
    """[vocab]"""
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, final: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """float32 logits [..., vocab] of final states [..., hidden]; ``rows`` picks a part of the vocabulary."""
        import torch

        weight = self.weight if rows is None else self.weight[rows]
        out = torch.nn.functional.linear(final.to(weight.dtype), weight).float()
        if self.bias is not None:
            out = out + (self.bias if rows is None else self.bias[rows]).float()
        out = out * self.scale
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out


class Target:
    """A target model's folder. Open with :meth:`open`; everything is read lazily and kept."""

    def __init__(self, path: Path, name: str, config: dict[str, Any], revision: str = "") -> None:
        self.path = path
        self.name = name
        self.revision = revision
        self.raw_config = config
        self.config: dict[str, Any] = config.get("text_config") or config.get("language_config") or config

    @classmethod
    def open(cls, name: str, revision: str = "") -> Target:
        """Open a local folder or a hub id. Raises ConfigError when there is no readable ``config.json``."""
        path = Path(name).expanduser()
        if not path.is_dir():
            if path.suffix or name.startswith((".", "/", "~")) or name.count("/") != 1:
                raise ConfigError(
                    f"model folder {name} does not exist; give a folder with config.json or a hub id"
                )
            path = download(name, revision)
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no config.json; give the folder of a Hugging Face model")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as exc:
            raise ConfigError(
                f"{file} is not valid JSON ({exc}); restore it from the model's source"
            ) from exc
        return cls(path, name, config, revision)

    # --- what the config says ---------------------------------------------------------------------------------

    def _number(self, *keys: str) -> int:
        for key in keys:
            if isinstance(self.config.get(key), int):
                return int(self.config[key])
        raise ConfigError(
            f"{self.path / 'config.json'} has none of {list(keys)}; this model family is not known to Headrace"
        )

    @property
    def num_layers(self) -> int:
        """N, the number of decoder layers."""
        return self._number("num_hidden_layers", "n_layer", "num_layers")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._number("hidden_size", "n_embd", "d_model")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._number("vocab_size")

    @property
    def model_type(self) -> str:
        """``model_type`` of the language model (inside a multimodal wrapper, of its text part)."""
        return str(self.config.get("model_type", ""))

    @property
    def dtype(self) -> str:
        """dtype the weights are stored in: bfloat16, float16 or float32 (bfloat16 when the config is silent)."""
        value = str(
            self.config.get("dtype")
            or self.config.get("torch_dtype")
            or self.raw_config.get("torch_dtype")
            or "bfloat16"
        )
        value = value.removeprefix("torch.")
        return value if value in ("bfloat16", "float16", "float32") else "bfloat16"

    @property
    def quantization(self) -> str:
        """Quantization method named in the config, ``""`` for none."""
        quant = self.raw_config.get("quantization_config") or self.config.get("quantization_config") or {}
        return str(quant.get("quant_method", "unnamed")) if quant else ""

    @property
    def norm_kind(self) -> NormKind:
        """Kind of the final norm. Raises ConfigError for a family whose norm is not known: it is never guessed."""
        kind = self.model_type
        if kind in _RMS_1P:
            return "rms1p"
        if kind in _LAYER_NORM:
            return "layernorm"
        if "rms_norm_eps" in self.config or "rms_norm_epsilon" in self.config:
            return "rms"
        raise ConfigError(
            f"the final norm of model type {kind!r} is not known to Headrace (no rms_norm_eps in config.json)"
        )

    @property
    def norm_eps(self) -> float:
        """Epsilon of the final norm."""
        for key in (
            "rms_norm_eps",
            "rms_norm_epsilon",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "norm_epsilon",
        ):
            if key in self.config:
                return float(self.config[key])
        return 1e-5

    @functools.cached_property
    def config_hash(self) -> str:
        """Hash of the config without fields that change no number."""
        return hash_json({k: v for k, v in self.raw_config.items() if k not in _NOT_IDENTITY})

    # --- weights ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _weights(self) -> WeightFiles:
        return WeightFiles(self.path)

    @functools.cached_property
    def weights_hash(self) -> str:
        """Fingerprint of the weights: each file's header, size and 64 KiB at 17 places. ``""`` if there are none."""
        return self._weights.fingerprint()

    @property
    def weights_bytes(self) -> int:
        """Size of the weight files; 0 if there are none."""
        return sum(file.stat().st_size for file in self._weights.files)

    def tensor(self, *suffixes: str) -> torch.Tensor | None:
        """The one weight whose name ends with one of ``suffixes`` (first suffix that matches), or None.

        Raises ConfigError when several match, so that a wrapper's second tower is never taken by luck.
        """
        return self._weights.tensor(*suffixes)

    def _required(self, what: str, *suffixes: str) -> torch.Tensor:
        tensor = self.tensor(*suffixes)
        if tensor is None:
            raise ConfigError(
                f"{self.path} has no {what} ({' or '.join(suffixes)}) in its .safetensors files; give the full model folder"
            )
        return tensor

    @functools.cached_property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden] input embedding, dtype of the file."""
        return self._required(
            "embedding", "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight"
        )

    @functools.cached_property
    def head(self) -> Head:
        """What turns a final state into logits; the embedding when the model ties the two."""
        config = self.config
        tied = bool(config.get("tie_word_embeddings", self.raw_config.get("tie_word_embeddings", False)))
        weight = self.tensor("lm_head.weight", "embed_out.weight", "output.weight")
        if weight is None:
            if not tied and self._weights.files and "tie_word_embeddings" in config:
                raise ConfigError(
                    f"{self.path} has no lm_head.weight and does not tie it to the embedding; the folder is incomplete"
                )
            weight = self.embedding
        scale = float(config.get("logit_scale", 1.0))
        if "logits_scaling" in config:
            scale /= float(config["logits_scaling"])
        softcap = config.get("final_logit_softcapping")
        return Head(weight, self.tensor("lm_head.bias"), scale, None if softcap is None else float(softcap))

    @functools.cached_property
    def final_norm(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The final norm as a function on states [..., hidden]; float32 inside, the input's dtype outside."""
        import torch

        weight = self._required(
            "final norm",
            "model.norm.weight",
            "language_model.norm.weight",
            "ln_f.weight",
            "final_layer_norm.weight",
            "final_layernorm.weight",
            "norm.weight",
        ).float()
        bias = self.tensor("model.norm.bias", "ln_f.bias", "final_layer_norm.bias", "final_layernorm.bias")
        kind, eps = self.norm_kind, self.norm_eps

        def norm(states: torch.Tensor) -> torch.Tensor:
            x = states.float()
            w = weight.to(x.device)
            if kind == "layernorm":
                out = torch.nn.functional.layer_norm(
                    x, x.shape[-1:], w, None if bias is None else bias.float().to(x.device), eps
                )
                return out.to(states.dtype)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
            if kind == "rms1p":
                return (x * (1.0 + w)).to(states.dtype)
            # Llama-family code rounds to the states' dtype before the weight is applied; so does this.
            return (w.to(states.dtype) * x.to(states.dtype)).to(states.dtype)

        return norm

    # --- tokenizer --------------------------------------------------------------------------------------------

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The target's own tokenizer. Raises ConfigError when the folder has none."""
        from transformers import AutoTokenizer

        if not self.has_tokenizer:
            raise ConfigError(
                f"{self.path} has no usable tokenizer; copy tokenizer.json and tokenizer_config.json of the model into it"
            )
        try:
            return AutoTokenizer.from_pretrained(str(self.path), local_files_only=True)
        except load_errors() as exc:
            raise ConfigError(
                f"{self.path} has no usable tokenizer ({type(exc).__name__}: {' '.join(str(exc).split())}); "
                "take config.json, tokenizer.json and tokenizer_config.json from the model's source again"
            ) from exc

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder holds tokenizer files (dummy and benchmark targets do not)."""
        return any(
            (self.path / n).exists()
            for n in ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenizer.model")
        )

    @functools.cached_property
    def tokenizer_hash(self) -> str:
        """Fingerprint: every special token's id and the encodings of a dozen probe strings; ``""`` without a tokenizer."""
        return tokenizer_fingerprint(self.tokenizer) if self.has_tokenizer else ""

    @functools.cached_property
    def template_hash(self) -> str:
        """Hash of the chat template's text; ``""`` when there is none."""
        template = self.tokenizer.chat_template if self.has_tokenizer else None
        return hash_json(template) if template else ""

    # --- specs ------------------------------------------------------------------------------------------------

    def spec(
        self,
        taps: str | list[Tap] | tuple[Tap, ...] = "eagle3",
        *,
        dtype: str = "",
        final_normed: bool = True,
    ) -> CaptureSpec:
        """The spec of states captured from this target. Raises ConfigError for taps it cannot have."""
        try:
            parsed = parse_taps(taps, self.num_layers)
        except ValueError as exc:
            raise ConfigError(f"taps for {self.name}: {exc}") from exc
        return CaptureSpec(
            target=self.name,
            revision=self.revision,
            config_hash=self.config_hash,
            weights_hash=self.weights_hash,
            quantization=self.quantization,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            dtype=dtype or self.dtype,
            taps=parsed,
            final_normed=final_normed if FINAL in parsed else True,
            norm_kind=self.norm_kind,
            norm_eps=self.norm_eps,
            tokenizer_hash=self.tokenizer_hash,
            template_hash=self.template_hash,
        )

    def require(self, spec: CaptureSpec, what: str) -> None:
        """Raise SpecMismatchError unless ``spec`` (of ``what``, a phrase for the message) was made with this target."""
        theirs = self.spec(spec.taps, dtype=spec.dtype, final_normed=spec.final_normed)
        lines = spec.differences(theirs)
        if lines:
            raise SpecMismatchError(
                f"{what} was made for another target than {self.name}: {'; '.join(lines)}. Use the model it was made with"
            )
