"""How good a drafter Headrace trains from given conversations, end to end on one GPU: states, training, real acceptance.

    python bench/quality.py --model M --data conversations.jsonl.gz --prompts gsm8k.jsonl humaneval.jsonl \
        --run base --run "muon optim.kind=muon optim.muon_rate=0.01" --seeds 0 1 2 --json quality.json

Each ``--run`` is a name and any training or shape options; runs without options take them from RECIPES. States are
extracted once and stay in memory on the device. Held out: the last ``--held-out`` conversations. The JSON file is
rewritten after every run, so a run that is cut short keeps what it finished.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
from headrace.config import build
from headrace.draft.checkpoint import Draft, save_draft
from headrace.draft.config import ShapeOptions
from headrace.draft.data import Document, MemoryPacks, Placing
from headrace.draft.metrics import Accuracy
from headrace.draft.model import Eagle3Draft
from headrace.draft.objective import Objective
from headrace.draft.options import TrainOptions
from headrace.draft.setup import draft_config, make_teacher, new_drafter, place_model
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.validate import Validation, validate
from headrace.draft.vocab import count_tokens
from headrace.draft.workers import Workers
from headrace.taps import ResidualTaps
from headrace.target import Target
from headrace.types import FINAL, CaptureSpec, Row, Tap

# A peer's trainer on the same data and shape, measured on one H200: what is to be beaten.
ANCHOR = {"gsm8k": 3.593, "humaneval": 2.883, "accuracy_1": 0.748}
TARGETS = {"gsm8k": 3.70, "humaneval": 3.00, "accuracy_1": 0.760}
# The peer's steps and tokens; and the published shape and optimizer, of which each run says what it changes.
BUDGET = {
    "ttt_steps": "5",
    "epochs": "3.39",
    "tokens_per_pack": "4096",
    "shape.variant": "eagle3",
    "optim.kind": "adamw",
    "optim.decay": "cosine",
    "loss.step_decay": "1.0",
}
RECIPES: dict[str, dict[str, str]] = {
    "base": {},
    "muon": {"optim.kind": "muon", "optim.muon_rate": "0.01", "optim.learning_rate": "0.002"},
    "eagle3.1": {"shape.variant": "eagle3.1"},
    "random-init": {"init": "random"},
    "hybrid": {"loss.kind": "hybrid"},
    "lk": {"loss.kind": "lk"},
    "sharp": {"loss.temperature": "0.7"},
    "everywhere": {"loss.everywhere": "true"},
    "decay": {"loss.step_decay": "0.8"},
    "best": {
        "shape.variant": "eagle3.1",
        "optim.kind": "muon",
        "optim.decay": "linear",
        "loss.step_decay": "0.6",
        "loss.everywhere": "true",
        "loss.temperature": "0.8",
    },
    "average": {"optim.average": "0.999"},
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="target folder (quick mode makes a tiny one)")
    parser.add_argument("--data", type=Path, help="conversations, .jsonl or .jsonl.gz")
    parser.add_argument(
        "--rows-cache",
        type=Path,
        help=".npz of the tokenized conversations, read if it is there, else written",
    )
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="prompt files with `turns`")
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="'NAME [KEY=VALUE ...]'",
        help="a configuration; may be repeated",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--taps", default="eagle3")
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument(
        "--limit", type=int, default=0, help="use only the last N conversations before the held-out ones"
    )
    parser.add_argument("--max-tokens", type=int, default=2048, help="rows are cut here")
    parser.add_argument("--prompt-limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="K of chain drafting")
    parser.add_argument(
        "--trees",
        type=int,
        nargs="*",
        default=[],
        metavar="NODES",
        help="also decode the first seed with dynamic trees that verify so many drafted tokens (a chain verifies --steps)",
    )
    parser.add_argument("--topk", type=int, default=4, help="nodes of a level that such a tree expands")
    parser.add_argument(
        "--extract-tokens", type=int, default=65536, help="tokens of one forward of the target"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="keep the drafters under this folder")


# --- rows ----------------------------------------------------------------------------------------------------------


def read_rows(args: argparse.Namespace, target: Target) -> list[Row]:
    """All conversations as rows, in file order; from the cache when there is one."""
    if args.rows_cache and args.rows_cache.exists():
        with np.load(args.rows_cache) as data:
            ends = np.cumsum(data["lengths"])
            parts = zip(np.split(data["ids"], ends[:-1]), np.split(data["mask"], ends[:-1]), strict=True)
            return [Row.make(ids, mask) for ids, mask in parts]
    rows = list(render_rows(args.data, target, args.max_tokens))
    if args.rows_cache:
        lengths = np.array([len(r) for r in rows])
        np.savez_compressed(
            args.rows_cache,
            lengths=lengths,
            ids=np.concatenate([r.ids for r in rows]),
            mask=np.concatenate([r.mask for r in rows]),
        )
    return rows


def render_rows(path: Path, target: Target, max_tokens: int) -> Iterator[Row]:
    """One row a conversation, by the product's own rendering: an answer that was cut has no end-of-turn to learn."""
    from headrace.data.records import Conversation, RecordReader
    from headrace.data.render import Renderer
    from headrace.data.template import ChatTemplate

    reader, renderer = RecordReader(), Renderer(ChatTemplate(target.tokenizer))
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        for line in file:
            item = reader.read(reader.parse(line))
            assert isinstance(item, Conversation), f"{path} holds something else than conversations"
            for draft in renderer.rows(item):
                yield Row.make(draft.ids[:max_tokens], draft.mask[:max_tokens])


# --- states --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def extract(
    rows: list[Row], target: Target, taps: tuple[Tap, ...], device: torch.device, budget: int
) -> tuple[list[Document], float]:
    """States of all rows, left on the device in bf16; batches of similar length under a token budget. Tokens per second."""
    from headrace.engines.hf import load_model

    model = load_model(target, "bfloat16" if device.type == "cuda" else "float32", str(device))
    documents: dict[int, Document] = {}
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    started, begin = time.perf_counter(), 0
    while begin < len(order):
        longest = len(rows[order[begin]])
        batch = order[begin : begin + max(1, budget // longest)]
        begin += len(batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for place, i in enumerate(batch):
            ids[place, : len(rows[i])] = torch.from_numpy(rows[i].ids)
        with ResidualTaps(model, target.num_layers, taps) as recorded:
            model(input_ids=ids.to(device), use_cache=False, logits_to_keep=1)
        stacked = torch.stack([recorded.states[tap].to(torch.bfloat16) for tap in taps])
        for place, i in enumerate(batch):
            states = stacked[:, place, : len(rows[i])].clone()
            documents[i] = Document(rows[i].ids, rows[i].mask, states)
    if device.type == "cuda":
        torch.cuda.synchronize()
    tokens = sum(map(len, rows))
    return [documents[i] for i in range(len(rows))], tokens / (time.perf_counter() - started)


# --- one run ---------------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What the training loop tells; validates once, at the end."""

    name: str
    rates: list[float] = field(default_factory=list)
    tokens: float = 0.0
    validated: Any = None
    result: Validation | None = None

    def trained(self, step: int, accuracy: Accuracy, extra: dict[str, float]) -> None:
        self.rates.append(extra["tokens_per_second"])
        self.tokens = extra["tokens_seen"]
        if len(self.rates) % 20 == 1:
            shown = " ".join(f"{a:.3f}" for a in accuracy.conditional)
            print(
                f"  {self.name} step {step}: loss {sum(accuracy.losses):.3f} accuracy {shown} {self.rates[-1]:,.0f} tokens/s",
                flush=True,
            )

    def validate(self, step: int) -> None:
        self.result = self.validated()

    def checkpoint(self, step: int, last: bool) -> None:
        pass


@dataclass
class Bed:
    """What all runs share."""

    args: argparse.Namespace
    target: Target
    spec: CaptureSpec
    device: torch.device
    train: list[Document]
    held_out: list[Document]
    counts: np.ndarray
    offline: Any
    trees: dict[int, Any]
    """By drafted tokens that a verification holds."""

    def run(self, name: str, changes: dict[str, str], seed: int) -> dict[str, Any]:
        """Train one drafter and measure it."""
        options, shape = parse_options({**changes, "seed": str(seed)})
        machine = Machine.settle(options.machine, self.device)
        draft_shape = draft_config(shape, self.target, self.spec)
        model, vocab = new_drafter(draft_shape, self.target, self.counts, options)
        model.lm_head.weight.requires_grad_(shape.train_lm_head)
        place_model(model, machine)
        packs = MemoryPacks(
            self.train, self.placing(machine, options), token_budget=options.tokens_per_pack, seed=seed
        )
        teacher = make_teacher(self.target, vocab, machine, options.loss.temperature)
        trainer = Trainer(model, teacher, packs, options, machine, Workers())
        judge = Objective(
            make_teacher(self.target, vocab, machine),
            "kl",
            (1.0,) * self.args.steps,
            compiled=machine.compiled,
        )
        watch = Watch(f"{name}/{seed}")
        watch.validated = lambda: validate(
            model,
            trainer.unroll,
            judge,
            self.validation(machine, options),
            self.args.steps,
            machine.autocast(),
        )
        started = time.perf_counter()
        trainer.run(watch)
        seconds = time.perf_counter() - started
        with trainer.judged():
            acceptance = self.acceptance(model, name, seed)
        assert watch.result is not None
        found = watch.result.summary()
        return {
            "run": name,
            "seed": seed,
            "tokens_seen": int(watch.tokens),
            "seconds": round(seconds, 1),
            "tokens_per_second": round(statistics.median(watch.rates[len(watch.rates) // 3 :])),
            **{f"accuracy_{i + 1}": round(a, 4) for i, a in enumerate(found["accuracy"])},
            "implied": round(found["implied_length"], 4),
            "simulated": round(found["simulated_length"], 4),
            **acceptance,
            "options": " ".join(f"{k}={v}" for k, v in changes.items()),
        }

    def placing(self, machine: Machine, options: TrainOptions) -> Placing:
        everywhere = options.loss.everywhere
        return Placing(machine.device, machine.dtype, padded=machine.compiled, everywhere=everywhere)

    def validation(self, machine: Machine, options: TrainOptions) -> MemoryPacks:
        placing = self.placing(
            machine,
            options.model_copy(update={"loss": options.loss.model_copy(update={"everywhere": False})}),
        )
        return MemoryPacks(self.held_out, placing, token_budget=options.tokens_per_pack, epochs=1)

    def acceptance(self, model: Eagle3Draft, name: str, seed: int) -> dict[str, Any]:
        """Real speculative decoding in float32, greedy, a chain; per prompt set, and how many answers equal plain decoding."""
        from headrace.evaluate.prompts import read_prompts

        exact = Eagle3Draft(model.config)
        exact.load_state_dict(model.state_dict())
        draft = Draft(exact.to(self.device, torch.float32).eval().requires_grad_(False), self.spec)
        if self.args.out:
            save_draft(self.args.out / f"{name}-{seed}", model, self.spec, {"run": name, "seed": seed})
        out: dict[str, Any] = {}
        equal = answers = 0
        for path in self.args.prompts:
            part = self.offline.measure(draft, read_prompts(path, self.args.prompt_limit), lambda _: None)
            out[path.stem] = round(part.acceptance(self.args.steps).length, 4)
            equal += part.matches("equal")
            answers += len(part.records)
            for nodes, offline in self.trees.items() if seed == self.args.seeds[0] else ():
                part = offline.measure(draft, read_prompts(path, self.args.prompt_limit), lambda _: None)
                out[f"{path.stem} tree {nodes}"] = round(part.acceptance(self.args.steps).length, 4)
                equal += part.matches("equal")
                answers += len(part.records)
        return {**out, "equal": f"{equal}/{answers}"}


def parse_options(changes: dict[str, str]) -> tuple[TrainOptions, ShapeOptions]:
    """``a.b=value`` pairs → the product's own option schemas (which refuse what they do not know)."""
    train: dict[str, Any] = {}
    shape: dict[str, Any] = {}
    for key, value in {**BUDGET, **changes}.items():
        into = shape if key.startswith("shape.") else train
        *path, last = key.removeprefix("shape.").split(".")
        for part in path:
            into = into.setdefault(part, {})
        into[last] = json.loads(value) if value.startswith("[") else value
    return build(TrainOptions, train, "--run"), build(ShapeOptions, shape, "--run")


def parse_run(text: str) -> tuple[str, dict[str, str]]:
    name, *pairs = text.split()
    given = dict(pair.split("=", 1) for pair in pairs)
    return name, {**RECIPES.get(name, {}), **given}


# --- the benchmark -----------------------------------------------------------------------------------------------------


def judge_merged(bench: common.Bench) -> None:
    """Over all seeds, whichever runs they came from."""
    bench.targets.clear()
    bench.args.prompts = bench.args.prompts or [Path(name) for name in ("gsm8k", "humaneval")]
    judge(bench)


def run(bench: common.Bench) -> None:
    args = bench.args
    if bench.quick:
        import quality_quick

        quality_quick.settle(args)
    if not args.data and not args.rows_cache:
        print("quality needs --model, --data (or --rows-cache) and --prompts; nothing was measured")
        return
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    )
    # Many configurations in one process: each needs its own compiled code, and past the limit torch runs uncompiled.
    torch._dynamo.config.recompile_limit = 64
    bed = make_bed(args, device)
    for text in args.run or ["base"]:
        name, changes = parse_run(text)
        for seed in args.seeds:
            row = bed.run(name, changes, seed)
            bench.row(**row)
            print(json.dumps(row), flush=True)
            bench.save()
    judge(bench)


def make_bed(args: argparse.Namespace, device: torch.device) -> Bed:
    from headrace.evaluate.config import EvaluateConfig
    from headrace.evaluate.offline import Offline

    target = Target.open(args.model)
    rows = read_rows(args, target)
    train_rows, held_rows = rows[: -args.held_out], rows[-args.held_out :]
    train_rows = train_rows[-args.limit :] if args.limit else train_rows
    spec = target.spec(args.taps, dtype="bfloat16")
    assert spec.taps[-1] == FINAL, "give taps that end in final"
    documents, rate = extract([*train_rows, *held_rows], target, spec.taps, device, args.extract_tokens)
    tokens = sum(map(len, train_rows))
    print(
        f"{len(train_rows):,} rows, {tokens:,} tokens for training, {sum(map(len, held_rows)):,} held out; states at {rate:,.0f} tokens/s",
        flush=True,
    )
    values = {
        "drafts": ["-"],
        "model": args.model,
        "prompts": args.prompts or ["-"],
        "steps": args.steps,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.prompt_limit,
        "device": str(device),
    }
    offline = Offline(target, build(EvaluateConfig, values, "evaluation"))
    trees = {
        nodes: Offline(
            target, build(EvaluateConfig, {**values, "topk": args.topk, "tree_tokens": nodes}, "evaluation")
        )
        for nodes in args.trees
    }
    counts = count_tokens(train_rows, target.vocab_size)
    return Bed(
        args,
        target,
        spec,
        device,
        documents[: len(train_rows)],
        documents[len(train_rows) :],
        counts,
        offline,
        trees,
    )


def judge(bench: common.Bench) -> None:
    """The best configuration by mean over its seeds, of those with the most seeds, against the targets."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for row in bench.rows:
        by_run.setdefault(row["run"], []).append(row)
    most = max(map(len, by_run.values()))
    by_run = {name: rows for name, rows in by_run.items() if len(rows) == most}
    sets = [p.stem for p in bench.args.prompts]
    score = {
        n: statistics.mean(sum(r[s] for s in sets) if sets else r["implied"] for r in rows)
        for n, rows in by_run.items()
    }
    best = by_run[max(score, key=lambda n: score[n])]
    for name in (*sets, "accuracy_1"):
        values = [row[name] for row in best]
        if name in TARGETS:
            mean = statistics.mean(values)
            spread = max(values) - min(values)
            bench.target(
                f"{best[0]['run']}: {name} (anchor {ANCHOR[name]}, spread {spread:.4f}, {len(values)} seeds)",
                round(mean, 4),
                TARGETS[name],
                mean >= TARGETS[name],
            )


if __name__ == "__main__":
    common.main("quality", run, arguments, judge_merged)
