"""What `headrace evaluate` can be told. Torch-free: the command line is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliPositionalArg

from headrace.config import Section, address


class EvaluateConfig(Section):
    """Measure acceptance by real speculative decoding with the target, and prove that the output is the target's own."""

    drafts: CliPositionalArg[list[Path]] = Field(min_length=1)
    """Drafter folders; several are compared on the same prompts."""
    model: str
    """Folder or hub id of the target the drafters were trained for."""
    revision: str = ""
    """Hub revision of the target."""
    prompts: list[Path] = Field(min_length=1)
    """JSONL prompt files (`turns`, `messages`, `prompt` or `input_ids` a line); each file is one set."""
    out: Path | None = None
    """Folder for the report, the generated tokens and the plot. A finished part is not measured again."""
    limit: int = Field(0, ge=0)
    """Use only the first N prompts of each set; 0 = all."""
    max_new_tokens: int = Field(128, ge=1)
    """Most new tokens of one answer."""
    steps: int = Field(5, ge=1, le=64)
    """Tokens the drafter proposes in a row before the target verifies (K of a chain, depth of a tree)."""
    topk: int = Field(1, ge=1, le=64)
    """1 = a chain; more = a dynamic tree that expands the best `topk` nodes of every level."""
    tree_tokens: int = Field(0, ge=0, le=1024)
    """Drafted nodes that one verification of a tree holds; 0 = as many as a chain of `steps`."""
    temperature: float = Field(0.0, ge=0.0)
    """0 = greedy; above, sampling whose distribution is the target's exactly."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus of the target's distribution when sampling."""
    proposals: Literal["argmax", "sampled"] = "argmax"
    """How a chain is drafted when sampling: the drafter's best token (as SGLang and vLLM do) or a sample of its distribution."""
    seed: int = 0
    """Seed of sampling."""
    batch_size: int = Field(8, ge=1)
    """Prompts decoded together."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of target and drafter. Only float32 makes the output equal to plain decoding token by token; others up to ties."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto (CUDA when there is one)."""
    chat: bool = True
    """Render prompts with the target's chat template; off, texts are fed as they are."""
    plain: bool = True
    """Also decode without a drafter: gives the speed-up and, when greedy, checks the output."""
    offline: bool = True
    """Run the speculative decoding of Headrace itself; off, only the server is measured."""
    server: str = ""
    """Address of a running SGLang or vLLM server with the exported drafter: its counters are read and set beside ours."""
    concurrency: int = Field(8, ge=1)
    """Requests in flight at the server."""

    @field_validator("server")
    @classmethod
    def _http(cls, value: str) -> str:
        return address(value).rstrip("/") if value else ""

    @model_validator(mode="after")
    def _consistent(self) -> EvaluateConfig:
        if self.proposals == "sampled" and (self.temperature == 0 or self.topk > 1):
            raise ValueError("proposals = sampled needs a temperature above 0 and a chain (topk 1)")
        if self.tree_tokens and self.topk == 1:
            raise ValueError("tree_tokens is for trees; give topk above 1")
        if self.topk > 1 and self.tree_tokens and self.tree_tokens < self.steps:
            raise ValueError(f"tree_tokens {self.tree_tokens} cannot hold one path of {self.steps} steps")
        if not self.offline and not self.server:
            raise ValueError("with offline off there must be a server")
        if self.server and len(self.drafts) > 1:
            raise ValueError("a server serves one drafter; give the one it was exported from")
        return self

    @property
    def verify_tokens(self) -> int:
        """Drafted tokens that one verification holds (the last accepted token comes on top)."""
        return self.steps if self.topk == 1 else (self.tree_tokens or self.steps)
