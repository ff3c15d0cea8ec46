"""What a run checks before it trusts rows, store, engine and disk to belong together. Each check raises, or is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from headrace.data.rows import RowFolder
from headrace.engines.base import Check, EngineInfo, engine_class
from headrace.errors import ConfigError, PreflightError, SpecMismatchError
from headrace.extract.admission import default_budget, least_budget
from headrace.extract.config import ExtractConfig
from headrace.extract.disk import gigabytes, space
from headrace.extract.ledger import Selection
from headrace.extract.plan import stored_ratio
from headrace.remote import is_url
from headrace.store import Store
from headrace.store.codecs import default_codec
from headrace.store.dataset import Dataset, read_dataset
from headrace.store.folder import DATASET, open_folder
from headrace.store.repair import heal_store
from headrace.target import Target
from headrace.types import CaptureSpec, Row

TRUST_BYTES = 2 << 30
"""Payload of an existing store that is read before it is added to: all of a smaller one, a random sample of a larger one."""


class Described(Protocol):
    """An engine, or many that are alike."""

    @property
    def info(self) -> EngineInfo:
        """What it declares about itself."""

    def preflight(self) -> list[Check]:
        """Checks made before a run trusts it."""


def check_rows(config: ExtractConfig, rows: RowFolder, spec: CaptureSpec) -> None:
    """The rows have the split asked for and were made with the target's tokenizer."""
    if config.split and config.split not in rows.splits:
        raise ConfigError(f"--split {config.split}: {config.rows} has {list(rows.splits)}")
    theirs = rows.manifest.get("tokenizer_hash", "")
    if theirs and spec.tokenizer_hash and theirs != spec.tokenizer_hash:
        raise SpecMismatchError(
            f"rows {config.rows} were made with another tokenizer (hash {theirs}) than {config.model} has "
            f"({spec.tokenizer_hash}); prepare them with this model"
        )


def check_ids(row: Row, target: Target) -> None:
    """Every id of ``row`` is in the target's vocabulary: an engine given another one reads outside its embedding."""
    low, high = int(row.ids.min()), int(row.ids.max())
    if low < 0 or high >= target.vocab_size:
        wrong = low if low < 0 else high
        raise SpecMismatchError(
            f"row {row.key} has token id {wrong} and {target.name} has ids 0..{target.vocab_size - 1}; prepare the rows with this model"
        )


def join_store(config: ExtractConfig, spec: CaptureSpec) -> Store | None:
    """The store at ``--store`` or ``--out`` if there is one that this run may add to, healed: what is broken in it is taken out.

    Raises SpecMismatchError, before anything is touched, when it holds states of another meaning or in another form.
    """
    folder = open_folder(config.place)
    if folder.read_file(DATASET) is None and not folder.shard_names():
        return None
    found = read_dataset(folder)
    codec = config.codec or found.codec
    found.require_same(
        Dataset(spec=spec, codec=codec, final_positions=config.final_positions), f"store {config.place}"
    )
    heal_store(folder, found, TRUST_BYTES)
    return Store.open(config.place)


def check_provenance(config: ExtractConfig, store: Store, engine: Described) -> None:
    """One store, one engine: another name or version never continues it, other settings only when allowed."""
    before = store.provenance.get("engine") or {}
    if not before:
        return
    now = engine_provenance(engine)
    if (before.get("name"), before.get("version")) != (now["name"], now["version"]):
        raise SpecMismatchError(
            f"store {config.place} was begun with engine {before.get('name')} {before.get('version')}, this is "
            f"{now['name']} {now['version']}; use the same, or another store (states of two engines never share a store)"
        )
    then, current = before.get("settings", {}), now["settings"]
    differ = [
        f"{k}: {then.get(k)!r} != {current.get(k)!r}"
        for k in sorted({*then, *current})
        if then.get(k) != current.get(k)
    ]
    if differ and not config.allow_other_settings:
        raise SpecMismatchError(
            f"store {config.place} was begun with other settings of engine {now['name']}: {'; '.join(differ)} (store != now). "
            "Use the same, or --allow-other-settings if they change no number that matters"
        )


def check_engine(config: ExtractConfig, engine: Described, say: Any) -> None:
    """The engine's own preflight passes, unless the user starts anyway."""
    failing = [check for check in engine.preflight() if not check.ok]
    for check in failing:
        say(f"check failed: {check.name}: {check.value}. {check.mend}")
    if failing and not config.skip_preflight:
        first = failing[0]
        raise PreflightError(
            f"{len(failing)} checks of engine {engine.info.name} failed, first {first.name}: {first.value}. "
            f"{first.mend or 'See headrace doctor'} (--skip-preflight starts anyway)"
        )


def codec_of(config: ExtractConfig, store: Store | None, spec: CaptureSpec) -> str:
    """The codec this run writes with."""
    return config.codec or (store.codec if store is not None else default_codec(spec.dtype))


def check_space(config: ExtractConfig, selection: Selection, spec: CaptureSpec, codec: str) -> None:
    """The store will fit where it goes; a bucket has no end."""
    if is_url(config.place):
        return
    need = int(selection.tokens * spec.bytes_per_token * stored_ratio(codec)) + int(config.min_free)
    free = space(Path(config.place)).free
    if free < need and not config.skip_preflight:
        raise PreflightError(
            f"the store needs about {gigabytes(need)} ({selection.tokens:,} tokens with codec {codec}, and --min-free) and the "
            f"file system of {config.place} has {gigabytes(free)}; free some, choose a smaller codec, or --skip-preflight to fill it and "
            "pause when it is full"
        )


def budget_tokens(config: ExtractConfig, engine: Described, longest: int) -> int:
    """Tokens between admission and disk at most. Raises ConfigError for a budget under which the engine would wait for ever."""
    least = least_budget(engine.info.tokens_in_flight, longest)
    if 0 < config.tokens_in_flight < least:
        raise ConfigError(
            f"--tokens-in-flight {config.tokens_in_flight} is less than engine {engine.info.name} needs ({least}: what it asks for "
            "and two of the longest rows); give at least that, or lower the engine's own option"
        )
    return config.tokens_in_flight or default_budget(engine.info.tokens_in_flight, longest)


def engine_provenance(engine: Described) -> dict[str, Any]:
    """What a store remembers of the engine that fills it."""
    return {"name": engine.info.name, "version": engine.info.version, "settings": engine.info.settings}


def engine_options(config: ExtractConfig) -> dict[str, Any]:
    """The engine's own options, with ``url`` and ``device`` put where its schema has them.

    Raises ConfigError when the engine has no place for one of them, or takes one URL and several are given.
    """
    fields = engine_class(config.engine).Options.model_fields
    options = dict(config.engine_options)
    if config.device:
        if "device" not in fields:
            raise ConfigError(f"--device: engine {config.engine} has no such option; it has {sorted(fields)}")
        options["device"] = config.device
    if config.url:
        if "url" not in fields:
            raise ConfigError(
                f"--url: engine {config.engine} is no server; it has the options {sorted(fields)}"
            )
        if fields["url"].annotation is not str:
            options["url"] = list(config.url)
        elif len(config.url) == 1:
            options["url"] = config.url[0]
        else:
            raise ConfigError(f"--url: engine {config.engine} takes one URL, {len(config.url)} are given")
    return options
