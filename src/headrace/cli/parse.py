"""From command-line arguments and an optional TOML section to a validated config; the schema is the only source."""

from __future__ import annotations

import copy
import difflib
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliPositionalArg, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from headrace.config import Section, SectionT, explain
from headrace.errors import ConfigError
from headrace.recipe import Recipe

_POSITIONAL = get_args(CliPositionalArg)[1]  # the marker that the schema puts on positional fields


def parse(model: type[SectionT], command: str, summary: str, args: list[str]) -> SectionT:
    """Build ``model`` from ``args``; ``--config FILE.toml`` supplies defaults from the section named like the command.

    Raises ConfigError (exit 2) for anything invalid; ``--help`` prints and exits through SystemExit, as argparse does.
    """
    args, passed_on = _split_dashes(args)
    args, toml_path = _take_config(args)
    args = _fill_bare(args, model.BARE)
    defaults: dict[str, Any] = {}
    where = f"headrace {command}"
    if toml_path is not None:
        defaults = Recipe.read(toml_path).defaults(command, set(model.model_fields))
        where = f"{toml_path} [{command.replace('-', '_')}] and the command line"
    if passed_on:
        if not model.AFTER_DASHES:
            raise ConfigError(f"headrace {command} passes nothing on, but {passed_on[0]!r} follows --")
        defaults = {**defaults, model.AFTER_DASHES: passed_on}
    settings = _settings_class(model, command, summary, defaults)
    try:
        parsed = settings(_cli_parse_args=args, **defaults)
        return model.model_validate({name: getattr(parsed, name) for name in parsed.model_fields_set})
    except ValidationError as exc:
        raise ConfigError(f"{where}: {explain(exc)}; see headrace {command} --help") from exc
    except SettingsError as exc:
        said = str(exc).splitlines()[0].removeprefix("error parsing CLI: ")
        raise ConfigError(f"{where}: {said}{_meant(said, model)}; see headrace {command} --help") from exc


def _meant(said: str, model: type[Section]) -> str:
    """What was probably meant by an option that argparse does not know."""
    unknown = said.removeprefix("unrecognized arguments:").split()
    known = {name.replace("_", "-"): info for name, info in model.model_fields.items()}
    for word in (word[2:].split("=")[0] for word in unknown if word.startswith("--")):
        for close in difflib.get_close_matches(word, known, n=1):
            positional = _POSITIONAL in known[close].metadata
            return (
                f"; {close.upper()} stands without --{close}" if positional else f"; did you mean --{close}?"
            )
    return ""


def _split_dashes(args: list[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and what follows ``--``: flags of a program that the command starts."""
    cut = args.index("--") if "--" in args else len(args)
    return args[:cut], args[cut + 1 :]


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


def _fill_bare(args: list[str], bare: dict[str, str]) -> list[str]:
    """Options that stand alone, with the value that they then have."""
    out = []
    for word, following in zip(args, [*args[1:], None], strict=False):
        name = word.removeprefix("--").replace("-", "_")
        alone = following is None or following.startswith("-")
        out.append(f"{word}={bare[name]}" if word.startswith("--") and name in bare and alone else word)
    return out


def _settings_class(model: type[Section], command: str, summary: str, defaults: dict[str, Any]) -> type[Any]:
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
        cli_exit_on_error=False,
        nested_model_default_partial_update=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )
    namespace: dict[str, Any] = {"__annotations__": {}}
    for name, info in model.model_fields.items():
        # argparse insists on a positional unless the schema has a default for it; the recipe's value becomes one.
        if name in defaults and _POSITIONAL in info.metadata:
            optional = copy.copy(info)
            optional.default = defaults[name]
            namespace["__annotations__"][name] = Annotated[info.annotation, *info.metadata]
            namespace[name] = optional
    namespace |= {
        "__doc__": model.__doc__ or summary,
        "__module__": __name__,
        "model_config": config,
        "settings_customise_sources": classmethod(sources),
    }
    return type(model.__name__, (model, BaseSettings), namespace)


if sys.flags.optimize > 1:  # python -OO strips the docstrings that the help is made of
    sys.stderr.write("headrace: running under -OO, help texts are missing\n")
