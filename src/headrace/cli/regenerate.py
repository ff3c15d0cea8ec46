"""``headrace regenerate``: the target's own answers through an OpenAI-compatible endpoint."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.data.config import RegenerateConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Regenerate, and print the account."""
    from headrace.data.regenerate import regenerate

    result = regenerate(config, output.say)
    output.set(**result)
    lines = [("answered now", f"{result['answered']:,}"), ("answered in all", f"{result['conversations']:,}")]
    lines += [(f"finish: {reason}", f"{n:,}") for reason, n in result["finish_reasons"].items()]
    lines += [(f"provider: {name}", f"{n:,}") for name, n in result["providers"].items()]
    lines += [(f"skipped: {reason}", f"{n:,}") for reason, n in result["skipped"].items()]
    lines += [("with token ids", f"{result['with_token_ids']:,}"), ("requests", f"{result['requests']:,}")]
    lines += [
        ("retries", f"{result['retries']:,}"),
        ("answer tokens", f"{result['tokens']:,}"),
        ("cost", f"${result['cost']:.4f}"),
    ]
    output.table(f"Regenerated into {result['out']}", ["", ""], lines)
    rate = result["tokens"] / max(1e-9, result["seconds"])
    output.say(f"{result['out']}: {result['seconds']:.1f} s, {rate:,.0f} tokens/s")
