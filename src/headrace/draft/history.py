"""What the record of a training run says about whether it had finished learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

FEW_TOKENS = 1_000_000


def undertraining(
    lineage: dict[str, Any], folder: Path | None
) -> tuple[Literal["fault", "suspect", "ok", "unknown"], str, str]:
    """Verdict, what was measured, and the mend, from a drafter's lineage and its ``metrics.jsonl``."""
    seen, data = int(lineage.get("tokens_seen", 0)), dict(lineage.get("data") or {})
    if not seen:
        return "unknown", "its lineage does not say how it was trained", ""
    epochs = seen / max(1, int(data.get("train_tokens", 0)))
    curve = _curve(folder)
    slope, text = 0.0, ""
    if len(curve) >= 3:
        steps, lengths = (
            np.array(column, dtype=float) for column in zip(*curve[-max(3, len(curve) // 3) :], strict=True)
        )
        # Length gained if the last third of the curve went on for another half of the run.
        slope = float(np.polyfit(steps, lengths, 1)[0] * steps[-1] / 2)
        text = f"; held-out length rose by {slope:+.3f} per half run at its end"
    measured = f"{seen:,} tokens seen, {epochs:.1f} epochs{text}"
    if slope > 0.1 or epochs < 1:
        return (
            "fault",
            measured,
            "it had not finished learning: raise --epochs (the learning rate then falls later)",
        )
    if slope > 0.03 or seen < FEW_TOKENS:
        return "suspect", measured, "more rows, or more --epochs while held-out length still rises"
    return "ok", measured, ""


def _curve(folder: Path | None) -> list[tuple[int, float]]:
    file = folder / "metrics.jsonl" if folder is not None else None
    if file is None or not file.is_file():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return [(line["step"], line["implied_length"]) for line in lines if line["kind"] == "validation"]
