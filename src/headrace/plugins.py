"""Parts that other packages add by an entry point: engines, codecs, draft methods. Each group is looked up by name here.

Nothing is loaded before it is asked for by name, so an installed package that is broken disturbs nobody else.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from headrace.errors import ConfigError


def names(group: str) -> list[str]:
    """Names that installed packages offer in the entry-point group, sorted."""
    return sorted({point.name for point in importlib.metadata.entry_points(group=group)})


def load(group: str, name: str, base: type[Any], *, own: tuple[str, ...] = ()) -> Any:
    """The class registered as ``name`` in ``group``; ``own`` are names that Headrace has without an entry point.

    Raises ConfigError for an unknown name, for two packages claiming one name, and for something that is no ``base``.
    """
    what = group.removeprefix("headrace.").removesuffix("s")
    points = [p for p in importlib.metadata.entry_points(group=group) if p.name == name]
    if not points:
        there = sorted({*own, *names(group)})
        raise ConfigError(
            f"no {what} named {name!r} is installed; there are {there}. A package adds one by an entry point in {group!r}"
        )
    if len({p.value for p in points}) > 1:
        raise ConfigError(
            f"{what} {name!r} is claimed by several packages: {sorted(p.value for p in points)}; uninstall one"
        )
    found = points[0].load()
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{points[0].value}, registered as {name!r} in {group!r}, is not a subclass of {base.__module__}.{base.__name__}"
        )
    return found
