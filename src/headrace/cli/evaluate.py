"""``headrace evaluate``: acceptance by real speculative decoding, and the proof that the output is the target's own."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.errors import HeadraceError
from headrace.evaluate.config import EvaluateConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Evaluate and print the report. Raises HeadraceError (exit code 1) when an output differs from plain decoding."""
    from headrace.evaluate.report import draw, tables
    from headrace.evaluate.run import evaluate

    report = evaluate(config, output.say)
    output.set(**report)
    for title, columns, rows in tables(report):
        output.table(title, columns, rows)
    if config.out is not None:
        plot = draw(report, config.out)
        output.say(f"report: {config.out / 'manifest.json'}" + (f", plot: {plot}" if plot else ""))
    if not report["output_ok"]:
        wrong = [
            f"{p['different']} of {p['checked']} in {p['set']}"
            for d in report["drafts"]
            for p in d["parts"]
            if p["different"]
        ]
        raise HeadraceError(
            f"speculative output is not the target's own greedy output ({', '.join(wrong)}); the acceptance figures cannot be "
            "trusted. Run with --dtype float32; if it persists, the target's forward pass depends on what is batched with it"
        )
