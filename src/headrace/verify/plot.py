"""The plot of ``headrace compare``: how the relative errors of each tap are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.files import atomic_write


def plot_errors(path: Path, taps: Sequence[str], bins: np.ndarray, counts: np.ndarray) -> str:
    """Draw one line a tap (share of tokens by relative error) and return the file's name; ``""`` without matplotlib.

    ``bins`` [n + 1] are edges of relative error, ``counts`` [taps, n] tokens. States that are equal fall below the first edge.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:  # the plot is an extra; the report holds the numbers
        return ""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    centres = np.sqrt(bins[1:] * bins[:-1])
    for tap, row in zip(taps, counts, strict=True):
        axes.plot(
            centres,
            row / max(1, row.sum()),
            label=f"boundary {tap}" if tap.isdigit() else "final state",
            drawstyle="steps-mid",
        )
    axes.set_xscale("log")
    axes.set_xlabel("relative error of a token's state")
    axes.set_ylabel("share of tokens")
    axes.legend()
    axes.grid(alpha=0.3)
    with atomic_write(path) as file:
        FigureCanvasAgg(figure).print_png(file)
    return path.name
