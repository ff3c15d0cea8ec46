"""``headrace serve``: start SGLang ready for capture, or print the command that would."""

from __future__ import annotations

import logging
import os

from headrace.cli.output import Output
from headrace.engines.config import ServeConfig as Config

__all__ = ["Config", "run"]

_LOG = logging.getLogger(__name__)


def run(config: Config, output: Output) -> None:
    """Build the command; print it, or become it."""
    from headrace.engines.sglang.launch import build_launch
    from headrace.target import Target

    launch = build_launch(config, Target.open(config.model, config.revision))
    plugin = launch.config
    output.set(
        command=launch.command,
        environment=launch.environment,
        sglang=launch.version,
        tested=launch.tested,
        taps=list(plugin.taps),
        source=plugin.source,
        staging=plugin.staging,
        staging_bytes=plugin.staging_bytes,
    )
    if not launch.tested:
        _LOG.warning(
            f"SGLang {launch.version} is newer than the releases tested with this Headrace; run headrace doctor"
        )
    if config.print:
        output.say(launch.shell())
        return
    _LOG.info(
        f"SGLang {launch.version} with taps {list(plugin.taps)}, staging {plugin.staging} ({plugin.staging_bytes / 1e9:.1f} GB)"
    )
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.environment})
