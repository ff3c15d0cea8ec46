"""What data preparation can be told: the schemas behind ``prepare``, ``show``, ``stats``, ``merge`` and ``regenerate``."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import CliPositionalArg

from headrace.config import Section
from headrace.remote import Place

Shape = Literal["auto", "messages", "conversations", "alpaca", "prompt", "text", "tokens"]


class PrepareConfig(Section):
    """Conversations → rows, by the target's own chat template. Killed and run again, it goes on."""

    # --- what goes in and out ---------------------------------------------------------------------------------
    files: CliPositionalArg[list[str]]
    """Files (.jsonl .json .parquet, also .gz .zst), folders of them, or hf://DATASET; each may end in ?weight=0.5&limit=1000&head=100&split=train&config=NAME&name=NAME."""
    model: str
    """Target: a model folder or hub id; its tokenizer and chat template are used."""
    revision: str = ""
    """Hub revision of the target."""
    out: Path
    """Row folder to make; an existing one is reused when nothing changed, else replaced."""
    mirror: Place = ""
    """Also copy the finished row folder to this URL, such as s3://bucket/rows; commands that take rows take the URL too."""
    shape: Shape = "auto"
    """Shape of the records, when it must not be told from their keys."""
    role_aliases: dict[str, str] = Field(default_factory=dict)
    """Further role names: my-model-7b=assistant,bot=assistant."""

    # --- rendering --------------------------------------------------------------------------------------------
    date: str = ""
    """Date (YYYY-MM-DD) for templates that print one; without it those are refused."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking=false."""
    content_tokens: Literal["plain", "reject", "as-served"] = "plain"
    """Control tokens inside message text: encode them as plain text, drop the conversation, or let them act as a server that parses them does."""
    rewritten_history: Literal["fan-out", "last-turn", "refuse"] = "fan-out"
    """When a template shows earlier turns otherwise than they were generated: more rows, only the turns the last rendering holds, or drop."""
    last_turn_only: bool = False
    """Supervise the last assistant turn only."""
    cut_turns: Literal["keep", "drop"] = "keep"
    """Turns ended by the token limit: keep them without the end-of-turn they never had, or leave them unsupervised."""

    # --- length -----------------------------------------------------------------------------------------------
    max_length: int = Field(default=4096, ge=0)
    """Longest row in tokens; 0 = no limit."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What to do with a longer row."""
    min_supervised: int = Field(default=1, ge=1)
    """Drop rows with fewer supervised tokens."""

    # --- hygiene ----------------------------------------------------------------------------------------------
    near_duplicates: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop conversations at least so similar (Jaccard of 5-word shingles, MinHash) to one kept before; 0 = off. Takes about 3 KB of memory a conversation."""
    evaluation_prompts: list[str] = Field(default_factory=list)
    """Prompt sets (FILE or NAME=FILE) that no row may overlap with."""
    overlap_words: int = Field(default=13, ge=3)
    """Words in a row that make an overlap with an evaluation prompt; shorter prompts must match whole."""
    outliers: Literal["report", "drop"] = "report"
    """Rows of unusual length or supervised share (beyond 5 robust standard deviations): list them in the manifest or drop them."""

    # --- choice, order and split ------------------------------------------------------------------------------
    seed: int = 0
    """Seed of shuffle, split and samples."""
    validation: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of conversations that become validation rows, chosen by hash: stable when data is added."""
    limit: int = Field(default=0, ge=0)
    """Keep at most so many rows, an unbiased sample of all; 0 = all."""

    # --- the run ----------------------------------------------------------------------------------------------
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A record that cannot be read or understood: stop with file and line, or count it and go on."""
    max_dropped: float = Field(default=1.0, ge=0.0, le=1.0)
    """Fail (exit 1) when a larger share of the records is dropped."""
    allow_empty: bool = False
    """Accept a result without rows."""
    workers: int = Field(default=1, ge=1)
    """Processes that render and tokenize; the rows do not depend on it."""
    stall_seconds: float = Field(default=300.0, gt=0)
    """Stop when a worker makes no progress for so long, naming its record."""

    @field_validator("date")
    @classmethod
    def _is_date(cls, value: str) -> str:
        if value:
            datetime.date.fromisoformat(value)
        return value

    @field_validator("files")
    @classmethod
    def _has_files(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("give at least one file, folder or hf://DATASET")
        return value


class ShowConfig(Section):
    """Print rows with their supervised tokens marked, so that a person can see the mask."""

    rows: CliPositionalArg[Path]
    """Row folder."""
    which: CliPositionalArg[list[str]] = Field(default_factory=list)
    """Keys, beginnings of keys, or numbers counted from 0; the first row when none is given."""
    model: str = ""
    """Target whose tokenizer is used; the one in the manifest when empty."""
    split: str = ""
    """Count numbers within this split only."""
    ids: bool = False
    """Print one token a line with its position and id."""
    color: bool | None = None
    """Colours on or off; by the terminal when not given."""


class StatsConfig(Section):
    """Length and mask histograms of a row folder, as a table and a picture."""

    rows: CliPositionalArg[Path]
    """Row folder."""
    picture: Path | None = None
    """Write the picture here (.png or .svg)."""
    bins: int = Field(default=24, ge=2, le=200)
    """Bars of the length histogram."""


class MergeConfig(Section):
    """Several row folders → one: exact duplicates once, shuffled; a row that is validation anywhere stays validation."""

    folders: CliPositionalArg[list[Path]]
    """Row folders made with the same tokenizer and template."""
    out: Path
    """Row folder to make."""
    seed: int = 0
    """Seed of the shuffle."""

    @field_validator("folders")
    @classmethod
    def _has_folders(cls, value: list[Path]) -> list[Path]:
        if not value:
            raise ValueError("give at least one row folder")
        return value


class RegenerateConfig(Section):
    """The target's own answers to the prompts of a data set, through an OpenAI-compatible endpoint."""

    # --- what goes in and out ---------------------------------------------------------------------------------
    files: CliPositionalArg[list[str]]
    """Conversations, as for `headrace prepare`; their assistant turns are replaced."""
    out: Path
    """JSONL file of finished conversations; an existing one is continued."""
    url: str
    """Base URL of the endpoint, such as http://127.0.0.1:30000/v1 or https://openrouter.ai/api/v1."""
    model: str
    """Model name to ask for."""
    tokenizer: str = ""
    """Target's model folder; with it, SGLang and vLLM are asked for token ids and their tokenizer is compared first."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; the key itself is never written anywhere."""
    role_aliases: dict[str, str] = Field(default_factory=dict)
    """Further role names, as for prepare."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A record that cannot be read: stop, or count it and go on."""

    # --- sampling ---------------------------------------------------------------------------------------------
    max_tokens: int = Field(default=2048, ge=1)
    """Tokens of one answer, reasoning included, at most."""
    temperature: float = Field(default=0.6, ge=0.0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling."""
    seed: int | None = None
    """Sampling seed; each answer gets its own, derived from it."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request."""
    turns: Literal["all", "last", "first"] = "all"
    """Regenerate every assistant turn on the regenerated history, or only the last or first."""
    keep_cut: bool = True
    """Keep answers ended by the token limit (with finish reason length); else the conversation fails."""
    token_ids: Literal["auto", "require", "off"] = "auto"
    """Ask the server for the sampled token ids: when it can, always (else fail), or never."""

    # --- provider ---------------------------------------------------------------------------------------------
    provider: str = ""
    """Provider to pin (OpenRouter); fallbacks are then switched off."""
    quantization: str = ""
    """Quantization to pin (OpenRouter), such as bf16."""

    # --- limits -----------------------------------------------------------------------------------------------
    in_flight: int = Field(default=32, ge=1)
    """Requests in flight."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds for one request."""
    tries: int = Field(default=6, ge=1)
    """Tries for one request when the server is busy or fails."""
    max_wait: float = Field(default=60.0, gt=0)
    """Longest pause between tries, in seconds."""
    give_up_after: int = Field(default=20, ge=1)
    """Stop when so many conversations in a row fail."""
    max_cost: float = Field(default=0.0, ge=0)
    """Stop before more than so many US dollars are spent; 0 = no limit."""
    price_in: float = Field(default=0.0, ge=0)
    """US dollars a million prompt tokens, for servers that do not report a cost."""
    price_out: float = Field(default=0.0, ge=0)
    """US dollars a million answer tokens, for servers that do not report a cost."""
    max_total_tokens: int = Field(default=0, ge=0)
    """Stop when so many answer tokens were received; 0 = no limit."""
    limit: int = Field(default=0, ge=0)
    """Regenerate at most so many conversations; 0 = all."""
