"""`headrace evaluate` as a function: every drafter on every prompt set, offline, at a server, or both, and one report."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace._version import __version__
from headrace.config import build
from headrace.draft.checkpoint import OWN_METHOD, read_config
from headrace.draft.config import DraftConfig
from headrace.draft.method import open_drafter
from headrace.errors import CorruptError, SpecMismatchError
from headrace.evaluate.acceptance import Acceptance
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.offline import Offline, Part, draft_name
from headrace.evaluate.prompts import PromptSet, read_sets
from headrace.files import read_json, write_json
from headrace.target import Target
from headrace.types import CaptureSpec, hash_json

Say = Callable[[str], None]
FORMAT = "headrace-evaluation"
# Settings that change where a number is written or measured, not the number itself.
_NOT_MEASURED = {"drafts", "model", "revision", "prompts", "out", "limit", "offline", "server", "concurrency"}


def evaluate(config: EvaluateConfig, say: Say) -> dict[str, Any]:
    """Run the evaluation and return its report, which is also ``manifest.json`` in ``config.out``.

    Raises InputError for prompts, ConfigError and SpecMismatchError for drafters that do not fit, and what the engine
    or the server raises. An output that differs from plain decoding does not raise: see ``output_ok`` in the report.
    """
    start = time.perf_counter()
    sets = read_sets(config.prompts, config.limit)
    target = Target.open(config.model, config.revision)
    drafts = [Candidate.read(path, draft_name(path, config.drafts), target) for path in config.drafts]
    if config.out is not None:
        (config.out / "parts").mkdir(parents=True, exist_ok=True)
    report = _header(config, target, sets)
    report["drafts"] = []
    bench = _Bench(config, target, say)
    parts: list[Part] = []
    for draft in drafts:
        parts = [bench.part(draft, prompt_set) for prompt_set in sets] if config.offline else []
        report["drafts"].append(_draft_report(draft, parts, config.steps))
    if config.server:
        from headrace.evaluate.served import measure_server

        report["served"] = measure_server(config, target, sets, report["drafts"][0], parts, say)
    parts_reports = [p for d in report["drafts"] for p in d["parts"]]
    report["output_ok"] = not any(p["different"] for p in parts_reports)
    report["prompts"] = sum(map(len, sets))
    report["answers"] = sum(p["answers"] for p in parts_reports)
    figures = report["drafts"][0]["all"] or report["served"]
    report["acceptance_length"] = figures["acceptance_length"]
    report["seconds"] = round(time.perf_counter() - start, 3)
    if config.out is not None:
        write_json(config.out / "manifest.json", report)
    return report


@dataclass(frozen=True)
class Candidate:
    """A drafter to evaluate, known by its config alone; its weights are read when it is measured here."""

    name: str
    path: Path
    shape: dict[str, Any]
    """``draft`` of its config.json."""
    weights_hash: str

    @classmethod
    def read(cls, path: Path, name: str, target: Target) -> Candidate:
        """Raises ConfigError for a folder that is no drafter, SpecMismatchError for a drafter of another target."""
        document = read_config(path)
        try:
            spec = CaptureSpec.from_dict(document["spec"])
        except (ValueError, TypeError) as exc:
            raise SpecMismatchError(f"drafter {path}: {exc}; train or import it again") from exc
        target.require(spec, f"drafter {path}")
        shape = dict(document["draft"])
        if document.get("architecture", OWN_METHOD) == OWN_METHOD:
            shape = build(DraftConfig, shape, f"drafter {path}").model_dump(mode="json")
        return cls(name, path, shape, str(document["weights"]["hash"]))


class _Bench:
    """Measures parts, or takes them from an earlier run of the same measurement; loads the target when first needed."""

    def __init__(self, config: EvaluateConfig, target: Target, say: Say) -> None:
        self._config = config
        self._target = target
        self._say = say
        self._offline: Offline | None = None

    def part(self, draft: Candidate, prompt_set: PromptSet) -> Part:
        file = self._file(draft, prompt_set)
        if file is not None and file.is_file():
            self._say(f"{draft.name}, {prompt_set.name}: measured before, see {file}")
            return _read_part(file)
        if self._offline is None:
            self._say(f"loading {self._target.name}")
            self._offline = Offline(self._target, self._config)
        dtype = getattr(torch, self._config.dtype)
        loaded = open_drafter(draft.path, self._target, str(self._offline.device), dtype)
        part = self._offline.measure(loaded, prompt_set, self._say, title=f"{draft.name}, {prompt_set.name}")
        if file is not None:
            write_json(file, dataclasses.asdict(part))
        return part

    def _file(self, draft: Candidate, prompt_set: PromptSet) -> Path | None:
        if self._config.out is None:
            return None
        settings = self._config.model_dump(mode="json", exclude=_NOT_MEASURED)
        identity = {
            "settings": settings,
            "draft": [draft.weights_hash, draft.shape],
            "prompts": prompt_set.sha,
            "target": [self._target.config_hash, self._target.weights_hash, self._target.template_hash],
            "version": [__version__, torch.__version__],
        }
        return self._config.out / "parts" / f"{prompt_set.name}-{hash_json(identity)}.json"


def _read_part(file: Path) -> Part:
    try:
        return Part(**read_json(file))
    except TypeError as exc:
        raise CorruptError(
            f"{file} is not a part of an evaluation ({exc}); delete it and run the command again"
        ) from exc


def _header(config: EvaluateConfig, target: Target, sets: list[PromptSet]) -> dict[str, Any]:
    import transformers

    return {
        "format": FORMAT,
        "version": 1,
        "headrace": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "out": None if config.out is None else str(config.out),
        "target": {
            "name": target.name,
            "config_hash": target.config_hash,
            "weights_hash": target.weights_hash,
        },
        "settings": config.model_dump(mode="json", exclude={"drafts", "model", "prompts", "out"}),
        "verify_tokens": config.verify_tokens,
        "sets": [{"name": s.name, "path": str(s.path), "prompts": len(s), "hash": s.sha} for s in sets],
    }


def _draft_report(draft: Candidate, parts: list[Part], steps: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": draft.name,
        "path": str(draft.path),
        "weights_hash": draft.weights_hash,
        "taps": list(draft.shape["taps"]),
        "draft_vocab_size": draft.shape.get("draft_vocab_size"),
        "parts": [part.summary(steps) for part in parts],
        "all": {},
    }
    if parts:
        out["all"] = Acceptance.pooled([part.acceptance(steps) for part in parts]).to_dict()
        out["all"]["answers"] = sum(len(part.records) for part in parts)
        out["all"]["equal"] = sum(part.matches("equal") for part in parts)
        seconds, plain = sum(p.seconds for p in parts), sum(p.plain_seconds for p in parts)
        if seconds and plain:
            rate = sum(p.tokens for p in parts) / seconds
            out["all"]["tokens_per_second"] = round(rate, 1)
            out["all"]["speedup"] = round(rate * plain / sum(p.plain_tokens for p in parts), 3)
    return out
