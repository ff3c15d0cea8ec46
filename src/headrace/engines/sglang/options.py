"""Options of the ``sglang`` engine."""

from __future__ import annotations

from pydantic import Field

from headrace.config import ServerUrl
from headrace.engines.base import EngineOptions
from headrace.engines.config import Reference


class SglangOptions(EngineOptions):
    """Options of the ``sglang`` engine."""

    url: list[ServerUrl] = Field(default_factory=lambda: ["http://127.0.0.1:30000"], min_length=1)
    """Server URLs; rows go to whichever answers soonest."""
    staging: str = ""
    """Where the servers' staging folder is seen from here; as the servers name it when empty."""
    tokens_in_flight: int = Field(default=0, ge=0)
    """Tokens sent and not answered, over all servers; 0 = eight forwards' worth a server, less if its staging holds less, shared by the clients."""
    clients: int = Field(default=1, ge=1)
    """Clients of the same servers at one time, this one included: each has its part of what the servers hold for them."""
    attempts: int = Field(default=3, ge=1)
    """Tries of a row whose answer fails verification."""
    timeout_s: float = Field(default=900.0, gt=0)
    """Longest wait for one answer."""
    patience_s: float = Field(default=60.0, ge=0)
    """How long all servers may be down before the engine gives up."""
    reference: Reference = "auto"
    """What the preflight compares states with: hf, greedy, none, or auto (hf when the weights are small enough)."""
