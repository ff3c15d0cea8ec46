"""Length and mask histograms of a row folder, as numbers and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.rows import RowFolder
from headrace.errors import ConfigError
from headrace.files import atomic_write

_TRAIN, _VALIDATION, _INK = "#2a6f97", "#e07a5f", "#333333"


@dataclass(frozen=True)
class Numbers:
    """What is drawn and printed: one entry a row, in stored order."""

    lengths: np.ndarray
    """int32 [rows]"""
    supervised: np.ndarray
    """int32 [rows]"""
    held_out: np.ndarray
    """bool [rows]"""
    sources: dict[str, int]

    @classmethod
    def read(cls, folder: RowFolder) -> Numbers:
        """Read the small columns of a folder."""
        supervised = [folder.column("supervised", s).to_numpy() for s in folder.splits]
        held_out = [
            np.full(len(part), s == "validation") for s, part in zip(folder.splits, supervised, strict=True)
        ]
        sources: dict[str, int] = {}
        for split in folder.splits:
            for entry in folder.column("source", split).value_counts().to_pylist():
                sources[entry["values"]] = sources.get(entry["values"], 0) + entry["counts"]
        return cls(
            folder.lengths(),
            np.concatenate(supervised),
            np.concatenate(held_out),
            dict(sorted(sources.items())),
        )

    @property
    def shares(self) -> np.ndarray:
        """Supervised share of each row."""
        shares: np.ndarray = self.supervised / np.maximum(self.lengths, 1)
        return shares

    def edges(self, bins: int) -> np.ndarray:
        """Bin edges for lengths: even in the logarithm, whole numbers."""
        low, high = int(self.lengths.min()), int(self.lengths.max()) + 1
        return np.unique(np.round(np.geomspace(low, max(high, low + 1), bins + 1)).astype(np.int64))

    def describe(self) -> dict[str, Any]:
        """Quantiles and totals as JSON values."""

        def quantiles(values: np.ndarray, digits: int) -> dict[str, float]:
            points = {"min": 0, "p10": 10, "median": 50, "p90": 90, "p99": 99, "max": 100}
            return {name: round(float(np.percentile(values, q)), digits) for name, q in points.items()}

        return {
            "rows": len(self.lengths),
            "tokens": int(self.lengths.sum(dtype=np.int64)),
            "supervised": int(self.supervised.sum(dtype=np.int64)),
            "supervised_share": round(float(self.supervised.sum() / self.lengths.sum()), 6),
            "lengths": quantiles(self.lengths, 1),
            "shares": quantiles(self.shares, 4),
            "sources": self.sources,
        }

    def length_table(self, bins: int) -> list[tuple[str, str, str, str]]:
        """(tokens from-to, rows, share of all tokens, bar) for each bin that has rows."""
        edges = self.edges(bins)
        counts, _ = np.histogram(self.lengths, edges)
        weights, _ = np.histogram(self.lengths, edges, weights=self.lengths.astype(np.float64))
        most = max(1, int(counts.max()))
        return [
            (f"{a:,}-{b - 1:,}", f"{n:,}", f"{w / self.lengths.sum():.1%}", "█" * round(30 * n / most) or "▏")
            for a, b, n, w in zip(
                edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), weights.tolist(), strict=True
            )
            if n
        ]


def draw(numbers: Numbers, title: str, bins: int, path: Path) -> None:
    """Draw lengths, tokens by length and supervised shares to ``path``. Raises ConfigError for another suffix or no matplotlib."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("png", "svg"):
        raise ConfigError(f"--picture {path}: name a .png or .svg file")
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("--picture needs matplotlib; pip install 'headrace[plot]'") from exc
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    rows, tokens, shares = figure.subplots(1, 3)
    held = numbers.held_out
    groups = [("train", numbers.lengths[~held], _TRAIN), ("validation", numbers.lengths[held], _VALIDATION)]
    edges = numbers.edges(bins)
    _bars(rows, edges, [(name, lengths, None, color) for name, lengths, color in groups])
    rows.set(xlabel="tokens in a row", ylabel="rows", title="Length")
    _bars(tokens, edges, [(name, lengths, lengths / 1e3, color) for name, lengths, color in groups])
    tokens.set(xlabel="tokens in a row", ylabel="thousand tokens", title="Where the tokens are")
    even = np.linspace(0, 1, bins + 1)
    _bars(
        shares,
        even,
        [
            ("train", numbers.shares[~held], None, _TRAIN),
            ("validation", numbers.shares[held], None, _VALIDATION),
        ],
    )
    shares.set(xlim=(0, 1), xlabel="supervised share of a row", ylabel="rows", title="Loss mask")
    shares.axvline(
        float(numbers.supervised.sum() / numbers.lengths.sum()),
        color=_INK,
        linestyle="--",
        linewidth=1,
        label="of all tokens",
    )
    for axes in (rows, tokens):
        _logarithmic(axes, int(edges[0]), int(edges[-1]))
    rows.legend(frameon=False)
    shares.legend(frameon=False)
    figure.suptitle(title)
    with atomic_write(path) as file:
        figure.savefig(file, format=kind, dpi=130)


def _bars(axes: Any, edges: np.ndarray, groups: list[tuple[str, np.ndarray, np.ndarray | None, str]]) -> None:
    """Stacked histogram of (name, values, weights, colour) groups, without frame lines that carry nothing."""
    from matplotlib.ticker import FuncFormatter

    weights = [np.ones(len(v)) if w is None else w for _, v, w, _ in groups]
    axes.hist(
        [v for _, v, _, _ in groups],
        bins=edges,
        weights=weights,
        stacked=True,
        color=[color for *_, color in groups],
        label=[f"{name} ({len(v):,})" for name, v, _, _ in groups],
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))


def _logarithmic(axes: Any, low: int, high: int) -> None:
    """A logarithmic x axis with plain numbers at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = [step * 10**power for power in range(9) for step in (1, 2, 5)]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high] or [low, high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
