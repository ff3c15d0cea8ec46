"""Which positions of a prompt have been captured. The first rows of a position win, so a re-prefill changes nothing."""

from __future__ import annotations

Span = tuple[int, int]
"""First position, position after the last."""


class Coverage:
    """A growing set of positions in ``[0, length)``, kept as sorted, disjoint, non-touching spans."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._spans: list[Span] = []

    def claim(self, start: int, stop: int) -> list[Span]:
        """Add ``[start, stop)`` cut to the prompt; returns the parts of it that were not there yet, in order."""
        start, stop = max(0, start), min(stop, self.length)
        fresh: list[Span] = []
        at = start
        for first, last in self._spans:
            if last <= at:
                continue
            if first >= stop:
                break
            if first > at:
                fresh.append((at, first))
            at = max(at, last)
        if at < stop:
            fresh.append((at, stop))
        if fresh:
            self._spans = _merge([*self._spans, *fresh])
        return fresh

    @property
    def complete(self) -> bool:
        """Whether every position is there."""
        return self._spans == [(0, self.length)]

    def missing(self) -> list[Span]:
        """The positions not there, as spans."""
        edges = [0, *(edge for span in self._spans for edge in span), self.length]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _merge(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged
