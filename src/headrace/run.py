"""A whole run from one recipe: conversations → rows → store → proof → drafter → measured acceptance, and one report.

Every stage keeps its own folder and goes on where it stopped, so running a recipe again after a kill redoes nothing that is
sound. All sections are checked before the first stage starts: a typing error in the last one costs no hour of the first.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_settings import CliPositionalArg

from headrace.config import Section, build
from headrace.errors import ConfigError, StoreError
from headrace.files import write_json
from headrace.recipe import Recipe

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """Where a stage's schema and function live; imported only when needed, since stages are heavy."""

    name: str
    schema: str
    function: str

    def load(self, path: str) -> Any:
        """The object at ``module:name``."""
        module, name = path.split(":")
        return getattr(importlib.import_module(module), name)


STAGES = (
    Stage("prepare", "headrace.data.config:PrepareConfig", "headrace.data.prepare:prepare"),
    Stage("extract", "headrace.extract.config:ExtractConfig", "headrace.extract.run:extract"),
    Stage("verify", "headrace.verify.config:VerifyConfig", "headrace.verify.run:verify"),
    Stage("train", "headrace.draft.config:TrainConfig", "headrace.draft.train:train"),
    Stage("evaluate", "headrace.evaluate.config:EvaluateConfig", "headrace.evaluate.run:evaluate"),
)


class RunConfig(Section):
    """Run every stage of a recipe, in order: prepare, extract, verify, train, evaluate. Run it again to go on."""

    recipe: CliPositionalArg[Path]
    """TOML file with a table for each stage; see recipes/."""
    folder: Path | None = None
    """Folder of the run, instead of the recipe's."""
    until: str = "evaluate"
    """Last stage to run."""


def run(config: RunConfig, say: Say) -> dict[str, Any]:
    """Run the recipe and return its report, also written to ``FOLDER/report.json``.

    Raises ConfigError for any wrong key of any section before anything runs, StoreError when the store is rejected by its
    verification (no drafter is trained on it), and what a stage raises.
    """
    recipe = Recipe.read(config.recipe)
    folder = config.folder or recipe.folder
    if folder is None:
        raise ConfigError(
            f'{config.recipe} names no folder for the run; add folder = "runs/NAME" or give --folder'
        )
    recipe = Recipe(recipe.path, recipe.model, recipe.revision, folder, recipe.sections)
    names = [stage.name for stage in STAGES]
    if config.until not in names:
        raise ConfigError(f"--until {config.until} is not one of {names}")
    stages = STAGES[: names.index(config.until) + 1]
    configs = {stage.name: _section(stage, recipe) for stage in stages}
    started = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    for number, stage in enumerate(stages, 1):
        say(f"[{number}/{len(stages)}] {stage.name}")
        begun = time.monotonic()
        results[stage.name] = stage.load(stage.function)(configs[stage.name], say)
        results[stage.name]["wall_seconds"] = round(time.monotonic() - begun, 1)
        if stage.name == "verify" and not results["verify"]["verify_ok"]:
            faults = ", ".join(fault["code"] for fault in results["verify"]["faults"])
            raise StoreError(
                f"the store is rejected ({faults}); no drafter is trained on it. See {folder / 'verify'}"
            )
    report = summarize(recipe, results, time.monotonic() - started)
    write_json(folder / "report.json", report)
    return report


def _section(stage: Stage, recipe: Recipe) -> Section:
    schema: type[Section] = stage.load(stage.schema)
    values = recipe.defaults(stage.name, set(schema.model_fields))
    return build(schema, values, f"{recipe.path} [{stage.name}]")


def summarize(recipe: Recipe, results: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The figures of a run that its owner asks for first, and the stages' own reports under ``stages``."""
    report: dict[str, Any] = {
        "recipe": str(recipe.path),
        "folder": str(recipe.folder),
        "model": recipe.model,
        "seconds": round(seconds, 1),
        "seconds_by_stage": {name: result["wall_seconds"] for name, result in results.items()},
    }
    if "extract" in results:
        extract = results["extract"]
        report |= {
            "rows": extract["captures"],
            "tokens": extract["tokens_stored"],
            "bytes_raw": extract["bytes_raw"],
            "bytes_stored": extract["bytes_stored"],
        }
    if "verify" in results:
        report["verify_ok"] = results["verify"]["verify_ok"]
    if "val_accuracy" in results.get("train", {}):  # an added method may have no such figure
        report["val_accuracy"] = results["train"]["val_accuracy"]
        report["val_acceptance_length"] = results["train"]["val_acceptance_length"]
    if "evaluate" in results:
        report["acceptance_length"] = results["evaluate"]["acceptance_length"]
        report["output_ok"] = results["evaluate"]["output_ok"]
    return {**report, "stages": results}


def closing_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The closing table of a run: what, and its figures."""
    stages = report["stages"]
    rows: list[tuple[str, str]] = []
    if "rows" in report:
        ratio = report["bytes_stored"] / max(1, report["bytes_raw"])
        rows += [
            ("rows", f"{report['rows']:,}"),
            ("tokens", f"{report['tokens']:,}"),
            (
                "states",
                f"{report['bytes_raw'] / 1e6:,.1f} MB raw, {report['bytes_stored'] / 1e6:,.1f} MB stored, ratio {ratio:.3f}",
            ),
        ]
    if "verify" in stages:
        errors = [f"{tap['tap']}: {tap['median']:.1e}" for tap in stages["verify"]["taps"]]
        verdict = "proven" if report["verify_ok"] else "REJECTED"
        rows.append(("store", f"{verdict}; median relative error a tap: {', '.join(errors)}"))
    if "val_accuracy" in report:
        accuracy = " ".join(f"{value:.3f}" for value in report["val_accuracy"])
        rows.append(
            (
                "held-out accuracy",
                f"{accuracy} by position, implied length {report['val_acceptance_length']:.2f}",
            )
        )
    if "acceptance_length" in report:
        same = (
            "output equal to plain decoding" if report["output_ok"] else "OUTPUT DIFFERS from plain decoding"
        )
        rows.append(
            (
                "acceptance length",
                f"{report['acceptance_length']:.3f} measured, against 1.0 without a drafter; {same}",
            )
        )
    speed = stages.get("evaluate", {}).get("drafts", [{}])[0].get("all", {})
    if speed.get("speedup"):
        plain = speed["tokens_per_second"] / speed["speedup"]
        rows.append(
            (
                "decoding",
                f"{speed['tokens_per_second']:.0f} tokens/s speculative, {plain:.0f} plain ({speed['speedup']:.2f}x)",
            )
        )
    rows.append(
        ("time", ", ".join(f"{name} {value:.0f} s" for name, value in report["seconds_by_stage"].items()))
    )
    folder = Path(report["folder"])
    rows += [("where", f"{folder}/: rows, store, verify, draft, evaluate, report.json")]
    return rows
