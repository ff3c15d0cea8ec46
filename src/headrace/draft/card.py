"""The model card of an export: how to serve it, and where every part of it came from."""

from __future__ import annotations

import json
from typing import Any

from headrace.draft.checkpoint import Draft


def model_card(manifest: dict[str, Any], draft: Draft) -> str:
    """Markdown with the front matter that model hubs read."""
    base = manifest["served_model"]
    parts = [
        _front_matter(base),
        f"# EAGLE-3 drafter for {base}\n\n"
        f"A speculative-decoding drafter, exported by Headrace {manifest['headrace']} for **{manifest['engine']} "
        f"{manifest['engine_version']}**. Its tap ids follow that engine's convention; another engine needs its own export.",
        "## Serving\n\n" + _command(manifest),
        "## Shape\n\n" + _shape(manifest, draft),
        "## Lineage\n\n" + _lineage(manifest, draft),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(base: str) -> str:
    return f"---\nbase_model: {json.dumps(base)}\ntags:\n- speculative-decoding\n- eagle3\n---"


def _command(manifest: dict[str, Any]) -> str:
    base, steps = manifest["served_model"], manifest["steps"]
    if manifest["engine"] == "sglang":
        lines = [
            f"python -m sglang.launch_server --model-path {base} \\",
            "  --speculative-algorithm EAGLE3 --speculative-draft-model-path THIS_FOLDER \\",
            f"  --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}",
        ]
    else:
        settings = json.dumps({"model": "THIS_FOLDER", "method": "eagle3", "num_speculative_tokens": steps})
        lines = [f"vllm serve {base} \\", f"  --speculative-config '{settings}'"]
    return "```sh\n" + "\n".join(lines) + "\n```"


def _shape(manifest: dict[str, Any], draft: Draft) -> str:
    config = draft.model.config
    vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    rows = [
        (
            "boundaries of the target it reads",
            f"{manifest['taps']} of {draft.spec.num_layers} layers (engine ids {manifest['engine_tap_ids']})",
        ),
        (
            "hidden, MLP, heads",
            f"{config.hidden_size}, {config.intermediate_size}, {config.num_heads}/{config.num_kv_heads} of {config.head_dim}",
        ),
        ("vocabulary", "full" if config.full_vocabulary else vocabulary),
        ("positions", f"{config.rope.type}, theta {config.rope.theta:g}"),
        ("norm of the taps", config.fc_norm),
        ("norm before residual", str(config.norm_before_residual).lower()),
        ("normed feedback", str(config.normed_feedback).lower()),
        ("weights", f"{manifest['bytes']:,} bytes"),
    ]
    return _table(rows)


def _lineage(manifest: dict[str, Any], draft: Draft) -> str:
    rows = [
        ("drafter weights", f"`{manifest['draft']['weights_hash']}`"),
        ("exported weights", f"`{manifest['weights_hash']}`"),
        (
            "target",
            f"{manifest['target']['name']}, config `{manifest['target']['config_hash']}`, weights `{manifest['target']['weights_hash']}`",
        ),
        ("tokenizer, template", f"`{draft.spec.tokenizer_hash or '-'}`, `{draft.spec.template_hash or '-'}`"),
        ("states", f"taps {list(draft.spec.taps)}, {draft.spec.dtype}, final norm {draft.spec.norm_kind}"),
    ]
    rows += [(key, _value(value)) for key, value in draft.lineage.items()]
    return _table(rows)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"`{text}`" if isinstance(value, dict | list) else text


def _table(rows: list[tuple[str, str]]) -> str:
    body = [f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in rows]
    return "\n".join(["| | |", "|---|---|", *body])
