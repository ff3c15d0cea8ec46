"""Which releases of SGLang this Headrace was made for; no torch, for whoever only compares versions."""

from __future__ import annotations

FIRST, LAST = (0, 5, 17), (0, 5, 23)
"""Read from the first to the last (docs/engines.md says what was run where). Newer ones are tried, and refused when a name is gone."""
NATIVE_SINCE = (0, 5, 23)
"""First release that captures auxiliary states by itself."""


def release(text: str) -> tuple[int, ...]:
    """``0.5.15.post1`` → ``(0, 5, 15)``; a local build's suffix is ignored."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers[:3])
