"""Plots as text: small SVG figures for the report, which must be one file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from headrace.extract.norms import tap_name

WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 78, 14, 10, 26
Words = Callable[[float], str]


def line_plot(
    times: Sequence[float], values: Sequence[float], words: Words, time_words: Words, height: int = 200
) -> str:
    """``values`` over ``times`` (seconds), from zero; ``words`` and ``time_words`` turn figures into labels."""
    if len(times) < 2:
        return _note("too short for a plot")
    top = nice_top(max(values))
    span = (times[-1] - times[0]) or 1.0

    def x(t: float) -> float:
        return LEFT + (t - times[0]) / span * (WIDTH - LEFT - RIGHT)

    def y(v: float) -> float:
        return TOP + (1 - v / top) * (height - TOP - BOTTOM)

    points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in zip(times, values, strict=True))
    area = f"{LEFT},{y(0):.1f} {points} {x(times[-1]):.1f},{y(0):.1f}"
    parts = _grid_lines([(y(share * top), words(share * top)) for share in (0.0, 0.5, 1.0)])
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        parts.append(_text(x(times[0] + share * span), height - 6, time_words(share * span), anchor))
    parts += [f'<polygon class="area" points="{area}"/>', f'<polyline class="line" points="{points}"/>']
    return _figure(parts, height)


def bar_plot(labels: Sequence[str], values: Sequence[float], words: Words, height: int = 200) -> str:
    """One bar a label."""
    if not values:
        return _note("nothing to plot")
    top = nice_top(max(values))
    step = (WIDTH - LEFT - RIGHT) / len(values)
    floor = height - BOTTOM
    parts = _grid_lines(
        [(TOP + (1 - share) * (floor - TOP), words(share * top)) for share in (0.0, 0.5, 1.0)]
    )
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        size = value / top * (floor - TOP)
        left = LEFT + index * step
        parts.append(
            f'<rect class="bar" x="{left + step * 0.12:.1f}" y="{floor - size:.1f}" width="{step * 0.76:.1f}" height="{size:.1f}">'
            f"<title>{escape(label)}: {escape(words(value))}</title></rect>"
        )
        parts.append(_text(left + step / 2, height - 6, label, "middle"))
    return _figure(parts, height)


def norm_plot(taps: Sequence[dict[str, Any]]) -> str:
    """Box plots of the norms of each tap on one logarithmic axis: box: middle half; whiskers: 1st and 99th percentile."""
    if not taps:
        return _note("no norms were recorded")
    row, height = 34, 34 * len(taps) + 24
    left = LEFT + 40
    low = math.floor(math.log10(min(tap["low"] for tap in taps) * 0.9))
    high = max(low + 1, math.ceil(math.log10(max(tap["high"] for tap in taps) * 1.1)))

    def x(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (WIDTH - left - 110)

    parts = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 20}"/>')
        parts.append(_text(at, height - 5, f"{10.0**power:g}", "middle"))
    for index, tap in enumerate(taps):
        middle = index * row + row / 2
        box, end = x(tap["quartile"]), x(tap["third_quartile"])
        parts += [
            _text(0, middle + 4, tap_name(tap["tap"]), "start", "name"),
            f'<line class="line" x1="{x(tap["low"]):.1f}" x2="{x(tap["high"]):.1f}" y1="{middle}" y2="{middle}"/>',
            f'<rect class="box" x="{box:.1f}" y="{middle - 9}" width="{max(2.0, end - box):.1f}" height="18" rx="3"/>',
            f'<line class="line median" x1="{x(tap["median"]):.1f}" x2="{x(tap["median"]):.1f}" y1="{middle - 9}" y2="{middle + 9}"/>',
            _text(WIDTH - 4, middle + 4, f"median {tap['median']:.4g}", "end"),
        ]
    return _figure(parts, height)


def nice_top(value: float) -> float:
    """The next round figure above ``value``, for the end of an axis."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * size >= value)


def _grid_lines(lines: Sequence[tuple[float, str]]) -> list[str]:
    parts = []
    for y, label in lines:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, label, "end"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, name: str = "") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(parts: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _note(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'
