"""Trained tokens a second and model FLOPs utilization, beside a peer's trainer on the same packs, shape and steps.

    python bench/train.py                          # ours: compiled and eager (CUDA), eager alone on a CPU
    python bench/train.py --peer FOLDER            # FOLDER holds the peer's package (speculators) and what it imports

States are random: speed does not depend on them. Every contestant does whole updates (forward, backward, optimizer) on
the same packs, interleaved, after a warm-up that is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import common
from headrace.draft.data import Document, MemoryPacks, Placing
from headrace.draft.metrics import Accuracy
from headrace.draft.model import Eagle3Draft
from headrace.draft.options import TrainOptions
from headrace.draft.setup import place_model
from headrace.draft.shape import DraftConfig, RopeConfig
from headrace.draft.teacher import Teacher
from headrace.draft.trainer import Machine, Trainer
from headrace.draft.ttt import Pack
from headrace.draft.workers import Workers
from headrace.target import Head

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense bf16


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", type=Path, help="folder to import the peer's package from")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="also write where the time of ten updates goes"
    )
    parser.add_argument("--variant", choices=["eagle3", "eagle3.1"], default="eagle3.1")
    parser.add_argument("--steps", type=int, default=5, help="test-time-training steps")
    parser.add_argument("--pack", type=int, default=4096, help="tokens of a pack")
    parser.add_argument("--updates", type=int, default=20, help="updates a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3])
    parser.add_argument("--mlp", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--document", type=int, default=326, help="mean tokens of a document")
    parser.add_argument(
        "--supervised", type=float, default=0.74, help="share of a document that the target wrote"
    )


def settle(args: argparse.Namespace) -> None:
    """Quick mode: the same code on a small shape."""
    args.hidden, args.heads, args.mlp, args.vocab, args.draft_vocab = 64, [4, 2], 128, 512, 256
    args.pack, args.updates, args.repeats, args.document, args.steps = 256, 1, 5, 60, 3


def shape_of(args: argparse.Namespace) -> DraftConfig:
    heads, kv_heads = args.heads
    return DraftConfig(
        taps=(2, 15, 27),
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=args.hidden // heads,
        vocab_size=args.vocab,
        draft_vocab_size=args.draft_vocab,
        fc_norm="each" if args.variant == "eagle3.1" else "none",
        normed_feedback=args.variant == "eagle3.1",
        rope=RopeConfig(theta=100000.0),
        max_positions=8192,
    )


def make_documents(args: argparse.Namespace, device: torch.device, count: int) -> list[Document]:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.gamma(4.0, args.document / 4.0, count).astype(int), 8, args.pack)
    documents = []
    for length in lengths.tolist():
        mask = np.arange(length) >= round(length * (1 - args.supervised))
        states = torch.randn(4, length, args.hidden, device=device, dtype=torch.bfloat16)
        documents.append(Document(generator.integers(0, args.vocab, length).astype(np.int32), mask, states))
    return documents


def parts(args: argparse.Namespace, machine: Machine) -> tuple[Eagle3Draft, Teacher, TrainOptions]:
    """A drafter, its teacher and options of a run without end, on the machine."""
    torch.manual_seed(0)
    model = Eagle3Draft(shape_of(args))
    model.lm_head.weight.requires_grad_(False)
    place_model(model, machine)
    head = Head(torch.randn(args.vocab, args.hidden) * 0.05)
    teacher = Teacher(head, torch.arange(args.draft_vocab)).to(machine.device, machine.dtype)
    options = TrainOptions.model_validate(
        {"ttt_steps": args.steps, "max_steps": 10**9, "optim": {"kind": args.optimizer}}
    )
    return model, teacher, options


class Watch:
    """What the training loop reports, line by line; nothing is validated or saved."""

    def __init__(self) -> None:
        self.reports: list[dict[str, float]] = []

    def trained(self, step: int, accuracy: Accuracy, extra: dict[str, float]) -> None:
        self.reports.append(extra)

    def validate(self, step: int) -> None: ...

    def checkpoint(self, step: int, last: bool) -> None: ...

    def all(self, name: str) -> list[float]:
        """One figure of every report; 0 where it is not measured, as on a CPU."""
        return [report.get(name, 0.0) for report in self.reports]


# --- ours ------------------------------------------------------------------------------------------------------------


class Ours:
    """The product's own trainer, one update a call."""

    def __init__(self, args: argparse.Namespace, documents: list[Document], machine: Machine) -> None:
        model, teacher, options = parts(args, machine)
        placing = Placing(machine.device, machine.dtype, padded=machine.compiled)
        packs = MemoryPacks(documents, placing, token_budget=args.pack)
        self.trainer = Trainer(model, teacher, packs, options, machine, Workers())
        self.stream: Iterator[Pack] = iter(packs)
        self.tokens = self.flops = 0.0
        self.args = args

    def update(self) -> None:
        pack = next(self.stream)
        self.trainer.add_gradients(pack)
        self.trainer.optimizers.step(self.trainer.step)
        self.trainer.step += 1
        self.tokens += pack.tokens
        self.flops += useful_flops(self.args, pack.tokens, int((pack.layout.room > 0).sum()))


def useful_flops(args: argparse.Namespace, rows: int, starts: int) -> float:
    """Multiply-adds x 2 of one update's matrix products that the loss needs; padding and recomputation do not count."""
    hidden, steps = args.hidden, args.steps
    heads, kv = args.hidden, args.hidden * args.heads[1] // args.heads[0]
    every_row = 3 * hidden * hidden + 2 * hidden * 2 * kv
    every_step = 2 * hidden * heads + heads * hidden + 3 * hidden * args.mlp
    later = 2 * hidden * 2 * kv
    trained = 6.0 * (rows * every_row + starts * steps * every_step + starts * (steps - 1) * later)
    frozen = 4.0 * starts * steps * hidden * args.draft_vocab + 2.0 * starts * hidden * args.vocab
    return trained + frozen


# --- the peer ----------------------------------------------------------------------------------------------------------


class Peer:
    """speculators' own model, loss and optimizers on the same packs, uncompiled (its compiled path fails on recent torch)."""

    def __init__(self, args: argparse.Namespace, documents: list[Document], device: torch.device) -> None:
        self.device, self.args = device, args
        self.model = self._model().to(device)
        self.optimizers = self._optimizers()
        placing = Placing(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.stream = iter(MemoryPacks(documents, placing, token_budget=args.pack))
        self.tokens = 0.0
        from speculators.losses import resolve_loss_config

        self.loss = resolve_loss_config("kl_div", "fused" if device.type == "cuda" else "eager")

    def _model(self) -> torch.nn.Module:
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig

        args = self.args
        layer = LlamaConfig(
            hidden_size=args.hidden, intermediate_size=args.mlp, num_attention_heads=args.heads[0], num_key_value_heads=args.heads[1],
            head_dim=args.hidden // args.heads[0], num_hidden_layers=1, vocab_size=args.vocab, max_position_embeddings=8192,
            rope_theta=100000.0, pad_token_id=None,
        )  # fmt: skip
        layer._attn_implementation = "sdpa"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=args.draft_vocab,
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            eagle_aux_hidden_state_layer_ids=[2, 15, 27],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=args.steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
        model: torch.nn.Module = Eagle3DraftModel(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if not torch.isfinite(parameter).all():
                    parameter.normal_(0, 0.02)
        return model

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        from speculators.train.optimizers import build_optimizers

        settings = argparse.Namespace(
            optimizer=self.args.optimizer, lr=1e-3, weight_decay=0.01, muon_lr=1e-2, muon_momentum=0.95, muon_weight_decay=0.01,
            muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        found: list[torch.optim.Optimizer] = build_optimizers(self.model, settings)
        return found

    def update(self) -> None:
        pack = next(self.stream)
        mask = torch.zeros(pack.layout.tokens, dtype=torch.bool, device=self.device)
        mask[pack.layout.label_rows] = True
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"),
        ):
            _, loss, _ = self.model(
                hidden_states=pack.taps[None],
                input_ids=pack.ids[pack.layout.next_rows][None],
                document_ids=pack.layout.document[None],
                loss_mask=mask[None],
                position_ids=1 + pack.layout.positions[None],
                verifier_last_hidden_states=pack.final[pack.layout.next_rows][None],
                ttt_steps=self.args.steps,
                loss_config=self.loss,
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens += pack.tokens


# --- the benchmark -----------------------------------------------------------------------------------------------------


def run(bench: common.Bench) -> None:
    args = bench.args
    if bench.quick:
        settle(args)
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    )
    if device.type == "cpu" and not bench.quick:
        args.updates = 1
    documents = make_documents(args, device, 64 if bench.quick else 1000)
    contestants: dict[str, Ours | Peer] = {}
    if device.type == "cuda":
        contestants["headrace"] = Ours(args, documents, Machine(device, True, "flex", True, True))
        contestants["headrace, no CUDA graph"] = Ours(args, documents, Machine(device, True, "flex", True))
        contestants["headrace, not compiled"] = Ours(args, documents, Machine(device, True, "eager", False))
    else:
        contestants["headrace"] = Ours(args, documents, Machine(device, False, "eager", False))
    if args.peer:
        import sys

        sys.path.insert(0, str(args.peer))
        contestants["speculators, eager + sdpa"] = Peer(args, documents, device)
    for contestant in contestants.values():  # compilation, autotuning and allocation are not what is measured
        for _ in range(2 if device.type == "cpu" else 10):
            contestant.update()
    if args.trace:
        for name, contestant in contestants.items():
            trace(name, contestant, args.trace, device)
    report(bench, contestants, device)


def trace(name: str, contestant: Ours | Peer, folder: Path, device: torch.device) -> None:
    """Where the time of ten updates goes: kernels by their own time, the host's calls by theirs, and how busy the device was."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    work = work_of(contestant, 10, device)
    started = time.perf_counter()
    work()
    plain = time.perf_counter() - started
    with profile(activities=kinds) as recorded:
        work()
    averages = recorded.key_averages()
    lines = [f"{name}: {100 * plain:.2f} ms an update without the profiler"]
    if cuda:
        kernels = [e for e in averages if e.device_type == torch.autograd.DeviceType.CUDA]
        busy = sum(e.self_device_time_total for e in kernels) / 1e6
        launched = sum(e.count for e in kernels)
        lines.append(
            f"kernels: {100 * busy:.2f} ms and {launched / 10:.0f} launches an update, {busy / plain:.0%} of the time"
        )
        lines.append(averages.table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90))
    lines.append(averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name.replace(', ', '-').replace(' ', '_')}.txt").write_text(
        "\n".join(lines) + "\n", encoding="utf-8"
    )
    print(*lines[: 2 if cuda else 1], sep="\n", flush=True)


def report(bench: common.Bench, contestants: dict[str, Ours | Peer], device: torch.device) -> None:
    args = bench.args
    before = {name: c.tokens for name, c in contestants.items()}
    timings = common.interleaved(
        {n: work_of(c, args.updates, device) for n, c in contestants.items()}, args.repeats
    )
    updates = args.updates * (args.repeats + 1)
    rates = {}
    peak = next(
        (
            p
            for name, p in PEAK_TFLOPS.items()
            if device.type == "cuda" and name in torch.cuda.get_device_name(device)
        ),
        0.0,
    )
    for name, contestant in contestants.items():
        tokens = (contestant.tokens - before[name]) / updates * args.updates
        rates[name] = tokens / timings[name].median
        used = useful_flops(args, int(tokens), int(tokens * args.supervised)) / timings[name].median
        bench.row(
            trainer=name,
            tokens_per_second=round(rates[name]),
            spread=f"{timings[name].spread:.1%}",
            ms_per_update=round(1000 * timings[name].median / args.updates, 2),
            tflops=round(used / 1e12, 2),
            mfu=f"{used / 1e12 / peak:.1%}" if peak else "",
        )
    for name in list(rates)[1:]:
        ratio = rates["headrace"] / rates[name]
        if name.startswith("speculators"):
            bench.target(f"tokens/s, headrace over {name}", round(ratio, 2), 2.0, ratio >= 2.0)


def work_of(contestant: Ours | Peer, updates: int, device: torch.device) -> Callable[[], None]:
    def work() -> None:
        for _ in itertools.repeat(None, updates):
            contestant.update()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return work


if __name__ == "__main__":
    common.main("train", run, arguments)
