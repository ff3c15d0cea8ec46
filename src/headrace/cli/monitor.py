"""``headrace monitor``: a web page that follows a run."""

from __future__ import annotations

import importlib.util

from headrace.cli.output import Output
from headrace.errors import ConfigError
from headrace.monitor.config import MonitorConfig as Config

__all__ = ["Config", "run"]


def run(config: Config, output: Output) -> None:
    """Serve until interrupted."""
    missing = [
        name
        for name in ("starlette", "uvicorn", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(f"the monitor needs {', '.join(missing)}; pip install 'headrace[monitor]'")
    from headrace.monitor.web import serve

    serve(config, output.say)
