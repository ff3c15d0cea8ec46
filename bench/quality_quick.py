"""What `quality.py --quick` runs on: a tiny random target with the demo model's tokenizer and a few conversations it did not write.

The numbers mean nothing; every line of the benchmark runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path


def settle(args: argparse.Namespace) -> None:
    """Fill in arguments for a run of seconds on a CPU."""
    from headrace.demo import cached_demo_model
    from headrace.testing.models import make_tiny_model

    folder = Path(tempfile.mkdtemp(prefix="headrace-quality-"))
    model = make_tiny_model(folder / "model", layers=7, hidden=32, tokenizer=cached_demo_model())
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} plus {i + 1}?"},
                {
                    "role": "assistant",
                    "content": f"The sum of {i} and {i + 1} is {2 * i + 1}. " * (1 + i % 3),
                },
            ],
            "finish_reasons": ["stop" if i % 4 else "length"],
        }
        for i in range(16)
    ]
    data = folder / "conversations.jsonl"
    data.write_text("".join(json.dumps(t) + "\n" for t in talks), encoding="utf-8")
    prompts = folder / "tiny.jsonl"
    prompts.write_text(json.dumps({"turns": ["Say something."]}) + "\n", encoding="utf-8")
    args.model, args.data, args.prompts = str(model), data, [prompts]
    args.rows_cache = folder / "rows.npz"
    args.held_out, args.prompt_limit, args.max_new_tokens, args.steps = 4, 1, 8, 3
    common = "ttt_steps=2 epochs=1 tokens_per_pack=256 shape.vocab=0 log_every=1"
    args.run = [f"base {common}", f"muon {common} optim.average=0.9"]
    args.trees = [6]
    args.device = "cpu"
