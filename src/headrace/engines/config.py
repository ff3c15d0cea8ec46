"""What starting and checking a capture server can be told: the schema behind ``headrace serve`` and ``headrace doctor``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ByteSize, Field
from pydantic_settings import CliPositionalArg

from headrace.config import Section, ServerUrl

Reference = Literal["auto", "hf", "greedy", "none"]


class ServeConfig(Section):
    """Start SGLang ready for capture. Flags after ``--`` go to SGLang as they are: headrace serve MODEL -- --tp-size 8"""

    AFTER_DASHES: ClassVar[str] = "sglang_args"

    model: CliPositionalArg[str]
    """Target: a model folder or hub id."""
    revision: str = ""
    """Hub revision of the target."""
    taps: str = "eagle3"
    """Preset (eagle3, dflash, last) or a list such as 2,15,27,final."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=30000, ge=1, le=65535)
    """Port to listen on."""
    dtype: str = ""
    """dtype the model computes in; SGLang's choice when empty."""
    prefix_cache: bool = False
    """Keep SGLang's prefix cache, for other traffic; captures then carry a salt each and never hit it."""
    staging: str = "/dev/shm/headrace"
    """Folder for finished captures on their way to the client: in memory, on the client's host or shared with it."""
    staging_bytes: ByteSize = Field(default=ByteSize(0), ge=0)
    """Most bytes of captures there at once; 0 = half of what is free now, at most 64 GiB."""
    writers: int = Field(default=4, ge=1)
    """Threads in each scheduler that write captures."""
    host_bytes: ByteSize = Field(default=ByteSize(1 << 30), ge=1 << 20)
    """Pinned host memory of each scheduler for states on their way to the writers."""
    python: str = ""
    """Python of the environment SGLang is installed in; this one when empty."""
    print: bool = False
    """Print the command and start nothing."""
    sglang_args: list[str] = Field(default_factory=list)
    """SGLang's own flags; on the command line, all that follows `--`."""


class DoctorConfig(Section):
    """Check a capture server before trusting it: one line a check, exit code 3 when one fails."""

    url: CliPositionalArg[list[ServerUrl]]
    """Server URL; several are checked one after the other."""
    model: str
    """Target the server should be running: a model folder or hub id."""
    revision: str = ""
    """Hub revision of the target."""
    taps: str = "eagle3"
    """Taps you want to extract."""
    dtype: str = ""
    """dtype of the states; the target's own when empty."""
    engine: str = "sglang"
    """Kind of server: sglang or another engine that is one."""
    reference: Reference = "auto"
    """What states are compared with: hf (loads the model here), greedy (the server's own next token), none, or auto: hf when the weights are small enough."""
    staging: str = ""
    """Where the server's staging folder is seen from here, when under another path."""
