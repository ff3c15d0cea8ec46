"""Greedy generation with stock vLLM and a drafter, offline, in vLLM's own environment. Usage: vllm_generate.py IN.json OUT.json

IN: model, draft (or ""), steps, max_new_tokens, prompts (token ids), one_by_one. OUT: tokens of every prompt, and the
speculative counters after each call of generate.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own totals so far."""
    names = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "reached",
    }
    found = {}
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def main(source: str, to: str) -> None:
    """Run one job."""
    from vllm import LLM, SamplingParams

    job = json.loads(Path(source).read_text())
    speculative = {"model": job["draft"], "method": "eagle3", "num_speculative_tokens": job["steps"]}
    llm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculative if job["draft"] else None,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    tokens, totals = [], []
    for group in [[prompt] for prompt in prompts] if job["one_by_one"] else [prompts]:
        tokens += [list(out.outputs[0].token_ids) for out in llm.generate(group, params, use_tqdm=False)]
        totals.append(counters(llm))
    Path(to).write_text(json.dumps({"tokens": tokens, "totals": totals}))


if __name__ == "__main__":  # vLLM spawns workers that import this file
    main(*sys.argv[1:])
