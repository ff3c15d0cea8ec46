"""The files of a model folder: weights found by name without loading the model, and fingerprints that tell two models apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from headrace.errors import ConfigError, InputError
from headrace.types import hash_json

if TYPE_CHECKING:
    import torch

PROBES = (
    "Hello, world!",
    "  two leading spaces",
    "line\nbreak\r\nand\ttab",
    "1234567890 3.14159",
    "def f(x):\n    return x ** 2\n",
    "naïve café e\u0301 ヿ",
    "👩‍🚀 🚀",
    "中文字符 русский العربية",
    "<think>",
    "</think>",
    "<|im_start|>assistant\n",
    "<|eot_id|>",
)
"""Texts that tokenizers are told apart by. Fingerprints are made of them, so none may be added."""


class WeightFiles:
    """The ``.safetensors`` files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = sorted(folder.glob("*.safetensors"))

    def fingerprint(self) -> str:
        """16 hex digits over each file's header, size and 64 KiB at 17 places; ``""`` if there are no files."""
        if not self.files:
            return ""
        digest = xxhash.xxh3_64()
        for file in self.files:
            size = file.stat().st_size
            with open(file, "rb") as handle:
                header = int.from_bytes(handle.read(8), "little")
                digest.update(size.to_bytes(8, "little"))
                digest.update(handle.read(header))
                for part in range(17):
                    handle.seek(8 + header + (max(0, size - 8 - header - 65536) * part) // 16)
                    digest.update(handle.read(65536))
        return digest.hexdigest()

    @functools.cached_property
    def _places(self) -> Mapping[str, Path]:
        names: dict[str, Path] = {}
        for file in self.files:
            with _opened(file) as handle:
                names.update(dict.fromkeys(handle.keys(), file))
        return names

    def tensor(self, *suffixes: str) -> torch.Tensor | None:
        """The one weight whose name ends with one of ``suffixes`` (first suffix that matches), or None.

        Raises ConfigError when several match, so that a wrapper's second tower is never taken by luck.
        """
        for suffix in suffixes:
            names = [n for n in self._places if n == suffix or n.endswith("." + suffix)]
            names = [n for n in names if "vision" not in n and "visual" not in n and "mtp" not in n] or names
            if len(names) > 1:
                raise ConfigError(
                    f"{self.folder} has several weights ending in {suffix}: {sorted(names)[:4]}; cannot choose"
                )
            if names:
                with _opened(self._places[names[0]]) as handle:
                    found: torch.Tensor = handle.get_tensor(names[0])
                    return found
        return None


def load_errors() -> tuple[type[Exception], ...]:
    """What transformers lets out when a model folder is wrong: files missing, cut off, or saying things that cannot be."""
    from huggingface_hub import errors
    from safetensors import SafetensorError

    # A config that contradicts itself; huggingface_hub before 0.33 has no such check and no such error, and torch then finds
    # weights of another shape (RuntimeError).
    contradiction = getattr(errors, "StrictDataclassError", SafetensorError)
    return (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        ImportError,
        RuntimeError,
        SafetensorError,
        contradiction,
    )


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A weight file, open. Raises ConfigError when it is cut off or no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as exc:
        raise ConfigError(
            f"{file} is damaged or cut off ({exc}); copy it from the model's source again"
        ) from exc


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits over special ids and probe encodings: catches shifted special ids that text round trips hide."""
    special = sorted(
        (int(i), str(getattr(t, "content", t))) for i, t in tokenizer.added_tokens_decoder.items()
    )
    probes = [list(tokenizer.encode(p, add_special_tokens=False)) for p in PROBES]
    return hash_json({"special": special, "probes": probes, "size": len(tokenizer)})


def download(name: str, revision: str) -> Path:
    """The folder of a hub id in the local cache, fetched when it is not there. Raises InputError when it cannot be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.py", "*.txt"],
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as exc:
        raise InputError(
            f"{name} is neither a local model folder nor a hub id that can be fetched ({type(exc).__name__}); check the name or the network"
        ) from exc
