"""Configuration as frozen values: one TOML for a whole run, unknown keys refused, the command line from the same schema.

Each package declares its own section in its ``config.py`` (torch-free), derived from :class:`Section`; a command
line is that section's schema, and a TOML section gives its defaults. There is no second representation.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from headrace.errors import ConfigError


class Section(BaseModel):
    """Base of every config section: frozen, unknown keys refused, field docstrings become the help text."""

    AFTER_DASHES: ClassVar[str] = ""
    """Field that takes what follows ``--`` on the command line, for commands that start another program."""

    BARE: ClassVar[dict[str, str]] = {}
    """Text options that may stand without a value on the command line, and the value they then have."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,  # a refused value may be a URL with a password in it
    )


SectionT = TypeVar("SectionT", bound=Section)


def _join(value: Any) -> Any:
    return ",".join(str(tap) for tap in value) if isinstance(value, list) else value


Taps = Annotated[str, BeforeValidator(_join)]
"""Taps of a capture. TOML may spell them as a list, ``[3, 31, 59, "final"]``; inside it is the command line's ``"3,31,59,final"``."""


def address(value: str) -> str:
    """``value``, the address of a server. Raises ValueError when it is none: without a scheme, say."""
    try:
        parts = urlsplit(value)
    except ValueError as exc:  # a bracket that is not closed, say
        raise ValueError(f"{exc}; give an address such as http://127.0.0.1:30000") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give an address such as http://127.0.0.1:30000")
    return value


ServerUrl = Annotated[str, AfterValidator(address)]
"""Address of a server, with its scheme."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError naming the file (and line, from the parser)."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not valid TOML: {exc}") from exc


def build(model: type[SectionT], values: dict[str, Any], where: str) -> SectionT:
    """Validate ``values`` into ``model``. Raises ConfigError with every wrong key; ``where`` names the file or command."""
    try:
        return model(**values)
    except ValidationError as exc:
        raise ConfigError(f"{where}: {explain(exc)}") from exc


def explain(error: ValidationError) -> str:
    """The errors of a pydantic validation as one line: ``key: what is wrong``."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "options"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            message = "is required"
        elif item["type"] == "extra_forbidden":
            message = "is not a known key"
        lines.append(f"{key}: {message}")
    return "; ".join(lines)
