"""The stage behind ``headrace train``: prepares, resumes, trains, keeps the best drafter, and writes down what it did.

OUT/
  config.json, model.safetensors   the best drafter so far, by held-out acceptance length
  manifest.json                    what the run is, and once it has ended: how it ended
  metrics.jsonl                    one line a log interval and one a validation
  tensorboard/                     the same as curves
  checkpoints/step-00000100/       what resuming needs
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace._version import __version__
from headrace.draft.checkpoint import CONFIG, OWN_METHOD, save_draft
from headrace.draft.config import TrainConfig
from headrace.draft.memory import need, require_room
from headrace.draft.method import method_class, method_options
from headrace.draft.metrics import Accuracy
from headrace.draft.mirror import MANIFEST, Mirror
from headrace.draft.objective import Objective
from headrace.draft.record import Curves, Progress, require_wandb
from headrace.draft.setup import Data, Parts, make_parts, train_packs, validation_packs
from headrace.draft.sharding import unsharded
from headrace.draft.state import load_state, save_state
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.validate import pool, validate
from headrace.draft.workers import Workers, join
from headrace.errors import ConfigError
from headrace.files import read_json, write_json
from headrace.target import Target

Say = Callable[[str], None]
KIND = "headrace.train"
# Options that may differ when a run is continued: they change no number.
_FREE = frozenset(
    {
        "out",
        "threads",
        "readers",
        "save_minutes",
        "tensorboard",
        "log_every",
        "store",
        "from_engine",
        "live",
        "rows",
        "model",
        "cache",
        "cache_bytes",
        "mirror",
        "wandb",
    }
)
_FOR_ANY_METHOD = frozenset(
    {"store", "rows", "model", "cache", "cache_bytes", "revision", "out", "method", "method_options"}
)


def train(config: TrainConfig, say: Say) -> dict[str, Any]:
    """Train, or go on training, and return the result that is also in ``OUT/manifest.json`` (nothing on other workers than the first).

    Raises ConfigError for options that do not fit or an ``out`` that holds another run, SpecMismatchError for parts that
    do not belong together, InputError for an empty split, TrainingError when training cannot go on.
    """
    if config.method != OWN_METHOD:
        return _train_added(config, say)
    require_wandb(config.wandb)
    workers = join(config.machine)
    target = Target.open(config.model, config.revision)
    if config.from_engine and workers.count > 1:
        raise ConfigError("--from-engine feeds one training process; extract first to train with several")
    data = Data.open(config, target)
    try:
        return _train_own(config, data, target, workers, say)
    finally:
        data.close()


def _train_own(config: TrainConfig, data: Data, target: Target, workers: Workers, say: Say) -> dict[str, Any]:
    started = time.monotonic()
    identity = _identity(config, data)
    mirror = Mirror(config.mirror, config.out, say) if config.mirror and workers.first else None
    if mirror is not None:
        mirror.fetch(identity)
    workers.barrier()
    finished = _look(config.out, identity)
    if workers.agree(finished is not None):
        say(f"{config.out} holds this run already, finished; nothing to do")
        return finished or {}
    machine = Machine.settle(config.machine, workers.device)
    torch.manual_seed(config.seed)
    parts = make_parts(config, target, data, machine)
    _require_room(config, parts, data, machine, workers)
    run = _Run(config, parts, data, target, machine, workers, say if workers.first else _silent)
    run.mirror = mirror
    run.announce()
    run.claim(identity)
    run.resume()
    run.trainer.run(run)
    return run.finish(identity, time.monotonic() - started)


def _train_added(config: TrainConfig, say: Say) -> dict[str, Any]:
    """Train by a method that an installed package added; it has a process of its own and its own options alone."""
    method = method_class(config.method)
    options = method_options(config.method, config.method_options)
    foreign = sorted(config.model_fields_set - _FOR_ANY_METHOD)
    if foreign:
        raise ConfigError(
            f"method {config.method} does not know {', '.join(foreign)}, which are {OWN_METHOD}'s; leave them out and use method_options"
        )
    started = time.monotonic()
    target = Target.open(config.model, config.revision)
    data = Data.open(config, target)
    identity = _identity(config, data)
    finished = _look(config.out, identity)
    if finished is not None:
        say(f"{config.out} holds this run already, finished; nothing to do")
        return finished
    _write_manifest(config.out, identity, None)
    result = {"out": str(config.out), **method.train(data, target, options, config.out, say)}
    result["seconds"] = round(time.monotonic() - started, 1)
    _write_manifest(config.out, identity, result)
    return result


def _identity(config: TrainConfig, data: Data) -> dict[str, Any]:
    """What makes a run this run and no other; how many workers share it is no part of that."""
    free: dict[str, Any] = dict.fromkeys(_FREE, True)
    return {
        "settings": config.model_dump(mode="json", exclude={**free, "machine": {"parallel"}}),
        "data": data.facts["keys_hash"],
        "store": data.store.spec.to_dict() | {"target": ""},
    }


def _write_manifest(out: Path, identity: dict[str, Any], result: dict[str, Any] | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    done = {} if result is None else {"result": result}
    manifest = {"kind": KIND, "complete": result is not None, "version": __version__, "identity": identity}
    write_json(out / MANIFEST, manifest | done)


def _require_room(config: TrainConfig, parts: Parts, data: Data, machine: Machine, workers: Workers) -> None:
    longest = int(data.facts["longest_row"])
    shards = workers.count if config.machine.parallel == "shard" else 1
    found = need(
        parts.model.config,
        config,
        machine,
        starts_share=1.0
        if config.loss.everywhere
        else min(1.0, parts.supervised / data.facts["train_tokens"]),
        longest=longest,
        shards=shards,
        train_lm_head=config.shape.train_lm_head,
    )
    require_room(found, config, machine, longest=longest)


def _silent(_: str) -> None:
    """What workers other than the first say."""


def _look(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The result of this very run, if ``out`` holds it, finished. Raises ConfigError when ``out`` is something else's."""
    file = out / MANIFEST
    if not file.is_file():
        if (out / CONFIG).exists():
            raise ConfigError(f"{out} holds a drafter that no training run made there; give another --out")
        return None
    manifest = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise ConfigError(f"{out} holds something else than a training run; give another --out")
    theirs = dict(manifest.get("identity", {}))
    if theirs != identity:
        settings = theirs.get("settings", {})
        changed = [k for k, value in identity["settings"].items() if settings.get(k) != value]
        what = ", ".join(changed or [k for k in identity if theirs.get(k) != identity[k]])
        raise ConfigError(
            f"{out} holds a training run that differs in: {what}; give another --out, or the settings it was started with"
        )
    return dict(manifest["result"]) if manifest.get("complete") else None


class _Run:
    """One run: what the training loop reports to."""

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        data: Data,
        target: Target,
        machine: Machine,
        workers: Workers,
        say: Say,
    ) -> None:
        self.config, self.parts, self.data, self.target, self.workers, self.say = (
            config,
            parts,
            data,
            target,
            workers,
            say,
        )
        taps = parts.model.config.taps
        packs = train_packs(config, data, target, taps, machine, workers)
        self.trainer = Trainer(parts.model, parts.teacher, packs, config, machine, workers)
        self.held_out = functools.partial(validation_packs, config, data, target, taps, machine, workers)
        weights = (1.0,) * config.validation_steps
        self.judge = Objective(parts.judge, "kl", weights, chunk=config.loss.chunk, compiled=machine.compiled)
        self.curves = Curves(config.out, config.tensorboard, config.wandb, on=workers.first)
        self.progress = Progress(self.trainer.total_steps, say)
        self.best: dict[str, Any] = {}
        self.latest: dict[str, Any] = {}
        self.warned = False
        self.saved_at = time.monotonic()
        self.mirror: Mirror | None = None

    def announce(self) -> None:
        """Say what is about to be trained, with the numbers that are asked for when it fails."""
        facts, model, vocab = self.data.facts, self.parts.model, self.parts.vocab
        trained = sum(p.numel() for p in self.trainer.optimizers.parameters)
        self.say(
            f"drafter: taps {list(model.config.taps)}, {trained / 1e6:.2f}M trained parameters, draft vocabulary {len(vocab.ids):,} of "
            f"{vocab.vocab_size:,} (covers {vocab.coverage:.2%} of supervised tokens)"
        )
        if vocab.coverage < 0.95:
            self.say(
                f"warning: the draft vocabulary covers only {vocab.coverage:.1%}; every token outside it is a miss. Raise --shape.vocab"
            )
        if facts["rows_not_in_store"]:
            self.say(
                f"note: {facts['rows_not_in_store']:,} rows of {self.config.rows} are not in the store and take no part"
            )
        machine = self.trainer.machine
        self.say(
            f"data: {facts['train_rows']:,} rows, {facts['train_tokens']:,} tokens; {facts['validation_rows']:,} rows held out; "
            f"{self.trainer.total_steps:,} steps on {machine.device} ({machine.attention} attention, "
            f"{'bfloat16' if machine.bfloat16 else 'float32'}{', compiled' if machine.compiled else ''}, {self.workers.count} worker(s){', sharded' if self.trainer.sharded else ''})"
        )

    def claim(self, identity: dict[str, Any]) -> None:
        """Mark ``out`` as this run's; the first thing written, when nothing can be refused any more."""
        if self.workers.first:
            _write_manifest(self.config.out, identity, None)
            if self.mirror is not None:
                self.mirror.begin()
        self.workers.barrier()

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        facts = load_state(self.config.out / "checkpoints", self.trainer, self.say)
        if facts is not None:
            self.best, self.latest = dict(facts["best"]), dict(facts["latest"])
            self.say(f"resumed at step {self.trainer.step:,} of {self.trainer.total_steps:,}")
        self.curves.begin(self.trainer.step, self.config.model_dump(mode="json"))
        self.progress.begin(self.trainer.step)

    # --- what the training loop calls -------------------------------------------------------------------------

    def trained(self, step: int, accuracy: Accuracy, extra: dict[str, float]) -> None:
        """Write the window's metrics and show how far the run is."""
        self.curves.write("train", step, {**accuracy.summary(), **extra})
        self.progress.show(step, accuracy, extra)

    def validate(self, step: int) -> None:
        """Judge the drafter on held-out rows, shared by all workers; keep it if it is the best so far."""
        trainer = self.trainer
        steps, autocast = self.config.validation_steps, trainer.machine.autocast()
        mine = validate(self.parts.model, trainer.unroll, self.judge, self.held_out(), steps, autocast)
        found = pool(mine, self.workers)
        self.latest = {"step": step, **found.summary()}
        self.curves.write("validation", step, found.summary())
        better = not self.best or self.latest["implied_length"] > self.best["implied_length"]
        shown = " ".join(f"{a:.3f}" for a in found.accuracy.conditional)
        self.progress.say(
            f"step {step:,}: held-out accuracy {shown}, implied length {found.accuracy.length:.3f}, simulated {found.simulated.length:.3f}"
            + (" (best)" if better else "")
        )
        if not found.on_policy and not self.warned:
            self.warned = True
            self.say(
                f"warning: {self.latest['text_agreement']:.0%} of the held-out tokens are the target's best: it did not write this text, so these "
                "lengths are off-policy and not to be compared with others; see headrace diagnose"
            )
        if better:
            self.best = self.latest
            if self.workers.first:
                save_draft(self.config.out, unsharded(self.parts.model), self.parts.spec, self.lineage())
                if self.mirror is not None:
                    self.mirror.drafter()

    def checkpoint(self, step: int, last: bool) -> None:
        """Save every few minutes, all workers at the same step."""
        if not last and step % self.config.log_every:
            return
        if last or self.workers.agree(time.monotonic() - self.saved_at > 60 * self.config.save_minutes):
            path = save_state(
                self.config.out / "checkpoints", self.trainer, {"best": self.best, "latest": self.latest}
            )
            if self.mirror is not None:
                self.mirror.checkpoint(path)
            self.saved_at = time.monotonic()

    # --- the end ----------------------------------------------------------------------------------------------

    def lineage(self) -> dict[str, Any]:
        """What made the weights that are saved now."""
        return {
            "headrace": __version__,
            "step": self.trainer.step,
            "tokens_seen": self.trainer.tokens,
            "data": self.data.facts,
            "settings": self.config.model_dump(mode="json", by_alias=False),
            "vocabulary": {
                "size": len(self.parts.vocab.ids),
                "coverage": self.parts.vocab.coverage,
                "hash": self.parts.vocab.hash,
            },
            "validation": self.best,
        }

    def finish(self, identity: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Close the records and write how the run ended."""
        self.progress.end()
        self.curves.close()
        best = self.best
        result = {
            "out": str(self.config.out),
            "steps": self.trainer.step,
            "tokens_seen": self.trainer.tokens,
            "train_rows": self.data.facts["train_rows"],
            "train_tokens": self.data.facts["train_tokens"],
            "validation_rows": self.data.facts["validation_rows"],
            "draft_vocab": len(self.parts.vocab.ids),
            "coverage": self.parts.vocab.coverage,
            "best_step": best.get("step", 0),
            "val_accuracy": best.get("accuracy", []),
            "val_accuracy_in_vocab": best.get("accuracy_in_vocab", []),
            "val_acceptance_length": best.get("implied_length", 0.0),
            "val_simulated_length": best.get("simulated_length", 0.0),
            "val_on_policy": best.get("on_policy", True),
            "last": self.latest,
            "tokens_per_second": self.progress.rate,
            "seconds": round(seconds, 1),
        }
        self.workers.barrier()
        if self.workers.first:
            _write_manifest(self.config.out, identity, result)
            if self.mirror is not None:
                self.mirror.finish()
        return result if self.workers.first else {}
