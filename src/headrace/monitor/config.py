"""Options of ``headrace status``, ``monitor`` and ``report``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from headrace.config import Section


class StatusConfig(Section):
    """How an extraction stands: running, finished or crashed. Reads its records only; can be asked from any shell."""

    run: CliPositionalArg[Path]
    """The store (the `--out` of the extraction), or a run folder with a store in it."""
    watch: bool = False
    """Show it again and again until interrupted."""
    seconds: float = Field(default=2.0, gt=0)
    """Time between two looks with --watch."""


class MonitorConfig(Section):
    """A web page that follows an extraction, and /metrics for Prometheus. Only this machine can see it, unless told."""

    run: CliPositionalArg[Path]
    """The store (the `--out` of the extraction), or a run folder with a store in it."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but a loopback address needs a token; one is made if none is given."""
    port: int = Field(default=8787, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    token: str = ""
    """Secret that a visitor must show (in the address once, or as a bearer token)."""


class ReportConfig(Section):
    """One self-contained HTML file about a run, to hand to a colleague."""

    run: CliPositionalArg[Path]
    """The store (the `--out` of the extraction), or a run folder with a store in it."""
    out: Path = Path("report.html")
    """The file to write."""
