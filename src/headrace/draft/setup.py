"""Everything a training run is made of, checked against each other before any work: target, store, rows, drafter, teacher."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from headrace.cores import available_cores
from headrace.demo import cache_root
from headrace.draft.checkpoint import load_draft
from headrace.draft.config import ShapeOptions, TrainConfig
from headrace.draft.data import Placing, StorePacks
from headrace.draft.model import Eagle3Draft
from headrace.draft.options import TrainOptions
from headrace.draft.shape import DraftConfig
from headrace.draft.teacher import Teacher
from headrace.draft.trainer import Machine
from headrace.draft.vocab import DraftVocab, choose_vocab, count_tokens
from headrace.draft.warm import copy_layer, initialize
from headrace.draft.workers import Workers
from headrace.errors import ConfigError, HeadraceError, InputError, SpecMismatchError
from headrace.remote import is_url
from headrace.target import Target
from headrace.types import FINAL, CaptureSpec, hash_json

if TYPE_CHECKING:
    from headrace.data.rows import RowFolder
    from headrace.store import Store
    from headrace.store.cache import Cache

MOST_READERS = 4
CORES_A_READER = 4


def _cache(config: TrainConfig) -> Cache | None:
    """The disk cache for a store at a URL."""
    from headrace.store.cache import Cache

    if not is_url(config.store) or not config.cache_bytes:
        return None
    return Cache(config.cache or cache_root() / "blocks", int(config.cache_bytes))


def _states(config: TrainConfig, target: Target, rows: RowFolder) -> Store:
    """Where states are read: a store, or an engine behind the part of a store that training uses."""
    from headrace.store import Store

    if not config.from_engine:
        return Store.open(config.store, cache=_cache(config))
    from headrace.draft.live import open_live

    return cast(Store, open_live(config, target, rows))


@dataclass(frozen=True)
class Data:
    """The store and which of its captures train and validate."""

    store: Store
    rows: RowFolder
    train: list[str]
    validation: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    """For the lineage: counts, hashes, provenance."""

    @classmethod
    def open(cls, config: TrainConfig, target: Target) -> Data:
        """Raises SpecMismatchError for a store of another target or other rows, InputError when a split has nothing."""
        from headrace.data.rows import RowFolder

        rows = RowFolder.open(config.rows)
        store = _states(config, target, rows)
        try:
            return cls._checked(config, target, store, rows)
        except HeadraceError:
            store.close()
            raise

    @classmethod
    def _checked(cls, config: TrainConfig, target: Target, store: Store, rows: RowFolder) -> Data:
        where = f"store {config.store}" if config.store else store.name
        target.require(store.spec, where)
        if FINAL not in store.spec.taps:
            raise SpecMismatchError(
                f"{where} has no final state, so there is nothing to learn from; extract with taps that end in final"
            )
        here = set(store.keys())
        splits = {
            split: [key for key in rows.keys(split) if key in here] for split in ("train", "validation")
        }
        missing = len(rows) - sum(map(len, splits.values()))
        if not splits["train"] and len(rows):
            raise SpecMismatchError(
                f"none of the {len(rows)} rows of {config.rows} is in {where}; give the rows it was extracted from"
            )
        for split, keys in splits.items():
            if not keys:
                raise InputError(
                    f"the {split} split of {config.rows} has no row in {where}; prepare with a validation share, and extract all rows"
                )
        lengths = store.lengths_of(splits["train"])
        facts = {
            "train_rows": len(splits["train"]),
            "train_tokens": int(lengths.sum()),
            "longest_row": int(lengths.max()),
            "validation_rows": len(splits["validation"]),
            "rows_not_in_store": missing,
            "keys_hash": hash_json(splits),
            "provenance": store.provenance,
        }
        return cls(store, rows, splits["train"], splits["validation"], facts)

    def close(self) -> None:
        """Let go of where the states come from: open shards, or an engine. Idempotent."""
        self.store.close()


@dataclass(frozen=True)
class Parts:
    """A drafter to train and what judges it, on the device."""

    model: Eagle3Draft
    spec: CaptureSpec
    vocab: DraftVocab
    teacher: Teacher
    """Teaches (at the loss's temperature)."""
    judge: Teacher
    """Validates (at temperature 1)."""
    supervised: int
    """Supervised tokens in the training rows."""


def draft_config(shape: ShapeOptions, target: Target, store_spec: CaptureSpec) -> DraftConfig:
    """The shape of a new drafter. Raises ConfigError for taps that the store lacks."""
    held = tuple(tap for tap in store_spec.taps if isinstance(tap, int))
    changes: dict[str, Any] = {
        name: value
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        if (value := getattr(shape, name))
    }
    if shape.variant == "eagle3.1":
        changes |= {"fc_norm": "each", "normed_feedback": True}
    if shape.fc_norm:
        changes["fc_norm"] = shape.fc_norm
    changes |= {"norm_before_residual": shape.norm_before_residual, "own_embedding": shape.own_embedding}
    vocab = min(shape.vocab or target.vocab_size, target.vocab_size)
    config = DraftConfig.for_target(target, tuple(shape.taps) or held, vocab, **changes)
    config.require_spec(store_spec, "the store")
    return config


def make_parts(config: TrainConfig, target: Target, data: Data, machine: Machine) -> Parts:
    """The drafter (new, or from another one), and the target's head as its teacher."""
    vocab_size = target.vocab_size
    counts = _frequencies(data, vocab_size)
    if config.start is not None:
        model, vocab = _started(config, target, data, counts)
    else:
        shape = draft_config(config.shape, target, data.store.spec)
        model, vocab = new_drafter(shape, target, counts, config)
    model.lm_head.weight.requires_grad_(config.shape.train_lm_head)
    place_model(model, machine)
    teacher = make_teacher(target, vocab, machine, config.loss.temperature)
    judge = make_teacher(target, vocab, machine)
    return Parts(model, data.store.spec, vocab, teacher, judge, supervised=int(counts.sum()))


def new_drafter(
    shape: DraftConfig, target: Target, counts: np.ndarray, options: TrainOptions
) -> tuple[Eagle3Draft, DraftVocab]:
    """A drafter with its first weights, and the vocabulary chosen by ``counts``."""
    vocab = choose_vocab(shape.draft_vocab_size, target.vocab_size, counts)
    model = Eagle3Draft(shape)
    initialize(model, target, torch.from_numpy(vocab.ids), options.seed)
    if options.init == "target":
        copy_layer(model, target, target.num_layers - 1)
    return model, vocab


def make_teacher(target: Target, vocab: DraftVocab, machine: Machine, temperature: float = 1.0) -> Teacher:
    """The target's head over ``vocab``, on the machine."""
    ids = torch.from_numpy(vocab.ids)
    return Teacher(target.head, ids, temperature=temperature).to(machine.device, machine.dtype)


def place_model(model: Eagle3Draft, machine: Machine) -> None:
    """Move to the device; frozen matrices take the machine's dtype, trained ones are float32 masters."""
    model.to(machine.device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else machine.dtype)


def _frequencies(data: Data, vocab_size: int) -> np.ndarray:
    chosen = set(data.train)
    return count_tokens((row for row in data.rows.rows("train") if row.key in chosen), vocab_size)


def _started(
    config: TrainConfig, target: Target, data: Data, counts: np.ndarray
) -> tuple[Eagle3Draft, DraftVocab]:
    assert config.start is not None
    if config.shape != ShapeOptions(train_lm_head=config.shape.train_lm_head):
        raise ConfigError(
            "--from keeps the shape of the drafter it starts from; leave out the shape options (train_lm_head may be given)"
        )
    draft = load_draft(config.start, target)
    draft.model.config.require_spec(data.store.spec, f"store {config.store}")
    ids = draft.model.t2d.nonzero()[:, 0].numpy()
    known = int(counts.sum())
    vocab = DraftVocab(ids, target.vocab_size, float(counts[ids].sum() / known) if known else 0.0)
    return draft.model.requires_grad_(True), _keep_embedding_frozen(draft.model, vocab)


def _keep_embedding_frozen(model: Eagle3Draft, vocab: DraftVocab) -> DraftVocab:
    model.embed_tokens.weight.requires_grad_(model.config.own_embedding)
    return vocab


def readers(config: TrainConfig) -> int:
    """Threads that read: with an engine each waits for one capture, so there are as many as shall be in flight."""
    return config.live.in_flight if config.from_engine else config.threads


def reader_processes(config: TrainConfig, machine: Machine) -> int:
    """Processes that read, for each worker."""
    cores = available_cores()
    if config.readers >= 0 or config.from_engine:
        return 0 if config.from_engine else min(config.readers, cores)
    if machine.device.type != "cuda" or is_url(config.store):
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: workers of this host
    return min(MOST_READERS, cores // here // CORES_A_READER)


def train_packs(
    config: TrainConfig, data: Data, target: Target, taps: tuple[int, ...], machine: Machine, workers: Workers
) -> StorePacks:
    """This worker's share of the shuffled packs without end, padded to one shape where code is compiled."""
    placing = Placing(
        machine.device,
        machine.dtype,
        padded=machine.compiled,
        everywhere=config.loss.everywhere,
        final_norm=None if data.store.spec.final_normed else target.final_norm,
    )
    loader = {
        "token_budget": config.tokens_per_pack,
        "seed": config.seed,
        "epochs": None,
        "rank": workers.rank,
        "workers": workers.count,
        "threads": readers(config),
        "processes": reader_processes(config, machine),
    }
    return StorePacks(data.store, data.train, taps, placing, loader)


def validation_packs(
    config: TrainConfig, data: Data, target: Target, taps: tuple[int, ...], machine: Machine, workers: Workers
) -> StorePacks:
    """This worker's share of one pass over the first rows of the validation split, in order."""
    lengths = data.store.lengths_of(data.validation)
    count = int(np.searchsorted(np.cumsum(lengths), config.validation_tokens, side="right"))
    placing = Placing(
        machine.device,
        machine.dtype,
        padded=machine.compiled,
        final_norm=None if data.store.spec.final_normed else target.final_norm,
    )
    loader = {
        "token_budget": config.tokens_per_pack,
        "epochs": 1,
        "shuffle": False,
        "rank": workers.rank,
        "workers": workers.count,
        "threads": readers(config),
    }
    return StorePacks(data.store, data.validation[: max(1, count)], taps, placing, loader)
