"""What per-tap norms say at a glance: a layer captured twice, one that is dead, one whose values have moved."""

from __future__ import annotations

import itertools
from typing import Any

from headrace.extract.norms import tap_name

SAME = ("mean", "largest", "low", "quartile", "median", "third_quartile", "high")
MOVED = 1.5
"""A median that has changed by this factor is said."""
SHRUNK = 0.25
"""Residual streams grow with depth; a later boundary this much smaller is said."""
ENOUGH = 1000
"""States before anything is said."""


def norm_warnings(taps: list[dict[str, Any]]) -> list[str]:
    """Sentences about norms that look wrong, given the ``taps`` of a ``norms`` event; empty when they look right."""
    if not taps or taps[0]["states"] < ENOUGH:
        return []
    out = [_alone(tap) for tap in taps]
    boundaries = [tap for tap in taps if tap["tap"] != "final"]
    for index, tap in enumerate(taps):
        for other in taps[index + 1 :]:
            if all(tap[q] == other[q] for q in SAME):
                out.append(
                    f"{tap_name(tap['tap'])} and {tap_name(other['tap'])} have equal norms throughout: is one layer captured twice?"
                )
    for before, after in itertools.pairwise(boundaries):
        if after["tap"] > before["tap"] and after["median"] < SHRUNK * before["median"]:
            out.append(
                f"{tap_name(after['tap'])} has a median norm of {after['median']:.3g}, far below {before['median']:.3g} of "
                f"{tap_name(before['tap'])}: was it captured after a norm?"
            )
    return [text for text in out if text]


def _alone(tap: dict[str, Any]) -> str:
    name = tap_name(tap["tap"])
    if tap["low"] == tap["high"] and tap["largest"] < 1.1 * tap["high"]:
        return f"{name} has the same norm everywhere: is that layer dead?"
    moved = tap["recent_median"] / tap["median"] if tap["median"] else 1.0
    if not 1 / MOVED < moved < MOVED:
        return f"{name} has moved: median norm {tap['recent_median']:.3g} lately, {tap['median']:.3g} over the session"
    return ""
