"""What the plug-in inside SGLang and a client outside agree on: its configuration, a request's wish, the reply's proof.

Everything travels through fields SGLang already has: the configuration in one environment variable (spawned schedulers
inherit it), the wish in ``sampling_params.custom_params``, the proof in the reply's ``meta_info``. No torch here.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from headrace.types import FINAL, Tap

PROTOCOL = 1
"""Version of this file and of the staged files; both sides must speak the same one."""
KEY = "headrace"
"""Key of a request's wish in ``custom_params`` and of the proof in ``meta_info``."""
ENVIRONMENT = "HEADRACE_SGLANG"
"""Environment variable with the :class:`PluginConfig` as JSON. Without it the plug-in does nothing at all."""

Source = Literal["native", "hooks"]


def taps_to_text(taps: tuple[Tap, ...]) -> str:
    """``(2, 15, "final")`` → ``"2,15,final"``."""
    return ",".join(str(tap) for tap in taps)


def taps_from_text(text: str) -> tuple[Tap, ...]:
    """The inverse of :func:`taps_to_text`. Raises ValueError for anything else."""
    return tuple(FINAL if part == FINAL else int(part) for part in text.split(",")) if text else ()


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """What the plug-in captures and where it puts it; made by ``headrace serve``."""

    taps: tuple[Tap, ...]
    """Which states, in the order they are staged."""
    staging: str
    """Folder shared with the clients, best in memory."""
    staging_bytes: int
    """Most bytes of this server's captures in the staging folder at once, over all its ranks."""
    run: str
    """Name of this start of the server, unique in the staging folder."""
    source: Source
    """``native``: SGLang's own capture of auxiliary states (0.5.23); ``hooks``: ours, for older releases and for ``final`` alone."""
    writers: int = 4
    """Threads that write files."""
    host_bytes: int = 1 << 30
    """Host memory for states on their way from the device to a file; pinned when there is a device."""
    stall_s: float = 2.0
    """How long a full staging folder may hold the scheduler up before captures are refused."""
    keep_s: float = 600.0
    """Age after which a finished capture that nobody took may be deleted to make room."""

    def to_json(self) -> str:
        """The value of the environment variable."""
        return json.dumps({**dataclasses.asdict(self), "taps": taps_to_text(self.taps)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError when it is not what :meth:`to_json` writes."""
        values = json.loads(text)
        names = {f.name for f in dataclasses.fields(cls)}
        if (
            not isinstance(values, dict)
            or not {"taps", "staging", "staging_bytes", "run", "source"} <= values.keys() <= names
        ):
            raise ValueError(f"{ENVIRONMENT} must be a JSON object with the keys {sorted(names)}")
        return cls(**{**values, "taps": taps_from_text(values["taps"])})


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What one request asks of the plug-in."""

    owner: str
    """Name of the asking client: staged files begin with it. Letters, digits, at most 32."""
    taps: tuple[Tap, ...] = ()
    """Which of the server's taps, in the order wanted; empty asks for a reply with the server's facts and no capture."""

    def to_params(self) -> dict[str, Any]:
        """The value of ``sampling_params["custom_params"]``. Flat: SGLang carries scalars one level deep."""
        return {KEY: {"protocol": PROTOCOL, "owner": self.owner, "taps": taps_to_text(self.taps)}}

    @classmethod
    def from_params(cls, params: Any) -> Self | None:
        """The wish in a request's ``custom_params``; None when it asks for nothing. Raises ValueError for a malformed one."""
        value = params.get(KEY) if isinstance(params, dict) else None
        if value is None:
            return None
        if not isinstance(value, dict) or value.get("protocol") != PROTOCOL:
            raise ValueError(
                f"the request speaks another protocol than {PROTOCOL}; install the same Headrace on both sides"
            )
        owner = str(value.get("owner", ""))
        if not (owner.isascii() and owner.isalnum() and len(owner) <= 32):
            raise ValueError("owner must be 1 to 32 ASCII letters and digits")
        return cls(owner=owner, taps=taps_from_text(str(value.get("taps", ""))))


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a request got no capture."""

    kind: str
    """``staging_full``, ``too_large``, ``rows_missing``, ``bad_wish``, ``states_missing``, ``write_failed``, ``late``, ``aborted``."""
    message: str
    retryable: bool = True


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Where a finished capture lies. It is whole and under its name before the reply is sent."""

    name: str
    """Path inside the staging folder."""
    seal: str
    """Checksum of the file's header, ids and segment table (which holds the checksums of the states)."""
    size: int
    """Bytes of the file."""
    rows: int
    """Tokens of the prompt."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the plug-in is and what it runs in; the same in every reply of one rank."""

    plugin: str
    """Version of Headrace."""
    engine: str
    """Version of SGLang."""
    run: str
    rank: int
    """Data-parallel rank that served the request."""
    staging: str
    staging_bytes: int
    """This rank's part of the budget."""
    taps: tuple[Tap, ...]
    source: str
    dtype: str
    num_layers: int
    hidden_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Whatever may change a number or a speed: chunk size, cache, parallelism, attention backend, device."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The value of ``meta_info["headrace"][0]``: the proof that the plug-in is active, and its result."""

    facts: Facts
    staging_used: int = 0
    """Bytes of the budget in use when the reply was made."""
    staged: Staged | None = None
    refusal: Refusal | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        value = dataclasses.asdict(self)
        value["facts"]["taps"] = taps_to_text(self.facts.taps)
        return {"protocol": PROTOCOL, **value}

    @classmethod
    def from_meta(cls, meta_info: dict[str, Any]) -> Self:
        """Read a reply. Raises ValueError when there is none (the plug-in is not active) or it speaks another protocol."""
        value = meta_info.get(KEY)
        if isinstance(value, list):
            value = value[0] if len(value) == 1 else None
        if not isinstance(value, dict):
            raise ValueError("the reply carries no proof of the capture plug-in")
        if value.get("protocol") != PROTOCOL:
            raise ValueError(f"the plug-in speaks protocol {value.get('protocol')!r}, this client {PROTOCOL}")
        facts = Facts(**{**value["facts"], "taps": taps_from_text(value["facts"]["taps"])})
        return cls(
            facts=facts,
            staging_used=value["staging_used"],
            staged=Staged(**value["staged"]) if value["staged"] else None,
            refusal=Refusal(**value["refusal"]) if value["refusal"] else None,
        )
