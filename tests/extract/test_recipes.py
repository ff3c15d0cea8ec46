"""Every recipe that ships: each table is its command's schema, and nothing in it is unknown."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from headrace.cli import COMMANDS
from headrace.config import Section, build
from headrace.extract.checks import engine_options
from headrace.extract.config import ExtractConfig
from headrace.recipe import Recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def schema(command: str) -> type[Section]:
    module = importlib.import_module(f"headrace.cli.{COMMANDS[command][0]}")
    config: type[Section] = module.Config
    return config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_table_is_valid(path: Path) -> None:
    recipe = Recipe.read(path)
    assert recipe.model and recipe.folder is not None
    assert {"prepare", "extract", "train", "evaluate"} <= set(recipe.sections)
    for table in recipe.sections:
        command = table.replace("_", "-")
        assert command in COMMANDS, f"{path.name}: [{table}] is no command"
        config = schema(command)
        build(config, recipe.defaults(command, set(config.model_fields)), f"{path.name} [{table}]")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_engine_knows_its_options(path: Path) -> None:
    recipe = Recipe.read(path)
    config = build(ExtractConfig, recipe.defaults("extract", set(ExtractConfig.model_fields)), path.name)
    from headrace.engines.base import engine_class

    build(engine_class(config.engine).Options, engine_options(config), path.name)


def test_the_mission_is_one_of_them() -> None:
    recipe = Recipe.read(next(path for path in RECIPES if path.stem == "kimi-k2.5"))
    config = build(ExtractConfig, recipe.defaults("extract", set(ExtractConfig.model_fields)), "extract")
    assert config.engine == "sglang" and config.taps == "3,31,59,final"
    assert recipe.sections["prepare"]["max_length"] == 8192
    assert recipe.sections["serve"]["sglang_args"][:2] == ["--tp-size", "8"]
    assert recipe.sections["serve"]["staging"].startswith("/dev/shm")
