"""``headrace doctor``: check a capture server before trusting it; exit code 3 when a check fails."""

from __future__ import annotations

from typing import Any

from headrace.cli.output import Output
from headrace.engines.config import DoctorConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Run the engine's preflight and print it. Raises PreflightError when a check fails."""
    from headrace.engines.base import engine_class, open_engine
    from headrace.errors import ConfigError, PreflightError
    from headrace.target import Target

    if not config.url:
        raise ConfigError("give the URL of a server")
    target = Target.open(config.model, config.revision)
    spec = target.spec(config.taps, dtype=config.dtype)
    fields = engine_class(config.engine).Options.model_fields
    if "url" not in fields:
        raise ConfigError(f"engine {config.engine} is no server; doctor checks servers")
    options: dict[str, Any] = {"reference": config.reference, "staging": config.staging}
    options = {name: value for name, value in options.items() if name in fields}
    options["url"] = config.url if fields["url"].annotation is not str else config.url[0]
    with open_engine(config.engine, target, spec, options) as engine:
        info, checks = engine.info, engine.preflight()
    output.set(
        engine=info.name,
        version=info.version,
        settings=info.settings,
        checks=[
            {"name": c.name, "ok": c.ok, "value": c.value, "mend": "" if c.ok else c.mend} for c in checks
        ],
    )
    rows = [
        ("pass" if c.ok else "FAIL", c.name, c.value if c.ok else f"{c.value}. Mend: {c.mend}")
        for c in checks
    ]
    output.table(f"{info.name} {info.version} at {', '.join(config.url)}", ["", "check", "measured"], rows)
    failing = [check for check in checks if not check.ok]
    if failing:
        raise PreflightError(
            f"{len(failing)} of {len(checks)} checks failed, first: {failing[0].name}: {failing[0].value}"
        )
