"""``headrace train``: store → drafter."""

from __future__ import annotations

from headrace.cli.output import Output
from headrace.draft.config import TrainConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Train, or go on training, and print what came of it."""
    from headrace.draft.train import train

    result = train(config, output.say)
    if not result:  # one of several workers; the first one speaks
        return
    output.set(**result)
    if config.method != "eagle3":  # its result is whatever its author finds worth telling
        facts = [(key, str(value)) for key, value in result.items() if not isinstance(value, (list, dict))]
        output.table(f"Trained by {config.method}", ["", ""], facts)
        return
    last, best = result["last"], result["val_accuracy"]
    rows = [
        (step + 1, f"{right:.3f}", f"{in_vocab:.3f}", f"{of_last:.3f}")
        for step, (right, in_vocab, of_last) in enumerate(
            zip(best, result["val_accuracy_in_vocab"], last["accuracy"], strict=True)
        )
    ]
    output.table(
        "Held-out accuracy by position, given that all before were right",
        ["position", "best drafter", "labels in its vocabulary", "last step"],
        rows,
    )
    output.say(
        f"{result['out']}: best at step {result['best_step']:,} of {result['steps']:,}; acceptance length {result['val_acceptance_length']:.3f} implied "
        f"(chain of {len(best)}, greedy, the target's own token included), {result['val_simulated_length']:.3f} simulated; "
        f"{result['tokens_seen']:,} tokens seen in {result['seconds']:,.0f} s"
    )
