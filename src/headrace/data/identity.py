"""What rows are made of, as one hash: equal hashes mean equal rows, so a finished folder can be reused.

It covers the bytes of every input, the template's text, the tokenizer (its fingerprint and its files), every option
that can change a row, the versions of Headrace and of the row format. It leaves out what cannot: worker counts and places.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from headrace._version import __version__
from headrace.data.config import PrepareConfig
from headrace.data.folder import file_hash
from headrace.data.rows import FORMAT
from headrace.data.sources import Sources, dataset_identity, find_sources

_NOT_PART = {"files", "out", "mirror", "model", "workers", "stall_seconds"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt",
                    "added_tokens.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")  # fmt: skip


def inputs_key(config: PrepareConfig, sources: Sources, model: Path, fingerprints: Mapping[str, str]) -> str:
    """32 hex digits. A dataset that cannot say what it holds gives another key each time, so it is read anew."""
    inputs = []
    for item in sources.items:
        group = sources.groups[item.group]
        if item.path is not None:
            content = file_hash(item.path)
        else:
            content = dataset_identity(group) or secrets.token_hex(16)
        inputs.append([content, item.name, group.weight, group.limit, group.head, list(group.options)])
    folder = Path(config.model).expanduser()
    files = {name: file_hash(folder / name) for name in _TOKENIZER_FILES if (folder / name).is_file()}
    sets = find_sources([spec.rpartition("=")[2] for spec in config.evaluation_prompts])
    prompts = [file_hash(item.path) for item in sets.items if item.path is not None]
    parts = {
        "inputs": inputs,
        "tokenizer_files": files,
        "evaluation_prompts": prompts,
        "options": config.model_dump(mode="json", exclude=_NOT_PART),
        "version": __version__,
        "format": FORMAT,
        **fingerprints,
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
