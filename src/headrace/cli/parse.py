"""From command-line arguments and an optional TOML section to a validated config; the schema is the only source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from headrace.config import Section, SectionT, explain, read_toml
from headrace.errors import ConfigError


def parse(model: type[SectionT], command: str, summary: str, args: list[str]) -> SectionT:
    """Build ``model`` from ``args``; ``--config FILE.toml`` supplies defaults from the section named like the command.

    Raises ConfigError (exit 2) for anything invalid; ``--help`` prints and exits through SystemExit, as argparse does.
    """
    args, toml_path = _take_config(args)
    defaults: dict[str, Any] = {}
    where = f"headrace {command}"
    if toml_path is not None:
        key = command.replace("-", "_")
        document = read_toml(toml_path)
        defaults = {k: v for k, v in document.items() if not isinstance(v, dict) and k in model.model_fields}
        section = document.get(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{toml_path}: [{key}] must be a table")
        defaults.update(section)
        where = f"{toml_path} [{key}] and the command line"
    settings = _settings_class(model, command, summary)
    try:
        parsed = settings(_cli_parse_args=args, **defaults)
        return model.model_validate({name: getattr(parsed, name) for name in parsed.model_fields_set})
    except ValidationError as exc:
        raise ConfigError(f"{where}: {explain(exc)}. See headrace {command} --help") from exc
    except SettingsError as exc:
        raise ConfigError(f"{where}: {str(exc).splitlines()[0]}. See headrace {command} --help") from exc


def _take_config(args: list[str]) -> tuple[list[str], Path | None]:
    """Take ``--config FILE`` and ``--json`` (handled by the caller) out of the arguments."""
    rest: list[str] = []
    path: Path | None = None
    words = iter(args)
    for word in words:
        if word == "--config":
            value = next(words, None)
            if value is None:
                raise ConfigError("--config needs a TOML file")
            path = Path(value)
        elif word.startswith("--config="):
            path = Path(word.removeprefix("--config="))
        elif word != "--json":
            rest.append(word)
    return rest, path


def _settings_class(model: type[Section], command: str, summary: str) -> type[Any]:
    """The schema once more, as a class that parses a command line and reads neither environment nor files."""

    def sources(
        cls: type[BaseSettings],
        /,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        **_: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    config = SettingsConfigDict(
        cli_prog_name=f"headrace {command}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        nested_model_default_partial_update=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )
    namespace = {
        "__doc__": model.__doc__ or summary,
        "__module__": __name__,
        "model_config": config,
        "settings_customise_sources": classmethod(sources),
    }
    return type(model.__name__, (model, BaseSettings), namespace)


if sys.flags.optimize > 1:  # python -OO strips the docstrings that the help is made of
    sys.stderr.write("headrace: running under -OO, help texts are missing\n")
