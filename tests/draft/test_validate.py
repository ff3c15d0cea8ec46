"""Validation: free-running chains against the serving step, the replay against a loop that decodes, and a toy learned by heart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.config import build
from headrace.data.rows import RowFolder, RowWriter
from headrace.draft.checkpoint import load_draft
from headrace.draft.config import TrainConfig
from headrace.draft.data import Document, MemoryPacks, Placing
from headrace.draft.model import DraftCache, Eagle3Draft
from headrace.draft.objective import Objective
from headrace.draft.teacher import Teacher
from headrace.draft.train import train
from headrace.draft.ttt import Pack, Unroll
from headrace.draft.validate import draft_freely, replay, validate
from headrace.store import Store, StoreWriter
from headrace.target import Head
from headrace.testing.models import make_tiny_model
from headrace.types import Row

from .conftest import World, capture_into, write_rows
from .toys import draft_ids, toy_config, toy_draft, toy_pack

MASKS = [[False] * 3 + [True] * 20, [True] * 9 + [False] * 3 + [True] * 8, [False, True, True]]


def decode(model: Eagle3Draft, ids: torch.Tensor, taps: torch.Tensor, start: int, steps: int) -> list[int]:
    """A chain by the serving step: prefill with the target's taps, then the drafter's own greedy tokens."""
    cache = DraftCache.allocate(model, 1, start + steps + 1)
    rows = torch.arange(start + 1)
    out = model.step(ids[rows + 1][None], model.fuse(taps[rows])[None], rows[None], cache)[:, -1:]
    tokens = [int(model.to_target(model.logits(out).argmax(-1)))]
    for s in range(1, steps):
        out = model.step(
            torch.tensor([[tokens[-1]]]), model.feedback(out), torch.tensor([[start + s]]), cache
        )
        tokens.append(int(model.to_target(model.logits(out).argmax(-1))))
    return tokens


def test_free_chains_equal_the_serving_step() -> None:
    model = toy_draft(toy_config(), dtype=torch.float64).requires_grad_(False)
    pack = toy_pack(toy_config(), MASKS, dtype=torch.float64)
    drafted = draft_freely(model, Unroll(model), pack, 4)
    for row, row_end, first, after in pack.layout.spans:
        for m in range(first, after):
            start = int(pack.layout.starts[m]) - row
            assert drafted[:, m].tolist() == decode(
                model, pack.ids[row:row_end], pack.taps[row:row_end], start, 4
            )


def test_replay_equals_a_decoding_loop() -> None:
    """Row by row: propose, accept what the text says, let the target add one, go on; the same rounds."""
    model = toy_draft(toy_config(vocab_size=6, draft_vocab_size=4)).requires_grad_(False)
    pack = toy_pack(model.config, MASKS, seed=2)
    rounds = []
    begin = 0
    for mask in MASKS:
        length = len(mask)
        ids, taps = pack.ids[begin : begin + length], pack.taps[begin : begin + length]
        known = 0
        while known < length:
            # known + 1 is the last certain token of the answer; the chain starts from the row before it
            if not (known + 2 < length and mask[known + 1] and mask[known + 2]):
                known += 1
                continue
            chain, accepted = decode(model, ids, taps, known, 3), 0
            while (
                accepted < 3
                and known + 2 + accepted < length
                and mask[known + 2 + accepted]
                and chain[accepted] == int(ids[known + 2 + accepted])
            ):
                accepted += 1
            rounds.append(accepted)
            known += accepted + 1
        begin += length
    found = replay(draft_freely(model, Unroll(model), pack, 3), pack)
    assert found.tolist() == rounds
    assert 0 < sum(rounds) < 3 * len(rounds)


def test_validation_pools_over_packs() -> None:
    """One pack or many: the same counts."""
    config = toy_config()
    model = toy_draft(config).requires_grad_(False)
    generator = np.random.default_rng(0)
    documents = [
        Document(
            generator.integers(0, 30, n).astype(np.int32),
            np.arange(n) > 2,
            torch.randn(4, n, 16).to(torch.bfloat16),
        )
        for n in (9, 14, 7, 12)
    ]
    teacher = Teacher(Head(torch.randn(30, 16)), draft_ids(model))
    objective = Objective(teacher, "kl", (1.0,) * 3, chunk=8)
    results = []
    for budget, placing in (
        (14, Placing(torch.device("cpu"))),
        (64, Placing(torch.device("cpu"), padded=True)),
    ):
        packs = MemoryPacks(documents, placing, token_budget=budget, epochs=1)
        results.append(
            validate(model, Unroll(model), objective, packs, 3, torch.autocast("cpu", enabled=False))
        )
    one, many = results
    assert (one.accuracy.counts == many.accuracy.counts).all()
    assert (
        one.simulated.rounds == many.simulated.rounds
        and (one.simulated.at_least == many.simulated.at_least).all()
    )
    assert 0 <= one.accuracy.conditional[0] <= 1 and one.simulated.length >= 1


def test_tr22_text_of_another_hand_is_told_and_marked(world: World, tmp_path: Path) -> None:
    """On rows that the target wrote nothing is said; on others every number is marked and the run warns, once."""
    said: list[str] = []
    result = train(_short(world, tmp_path / "own", world.store, world.rows), said.append)
    assert result["val_on_policy"] is True and result["last"]["text_agreement"] > 0.9
    assert not any("off-policy" in line for line in said)
    source, other = Store.open(world.store), World(world.model, tmp_path / "rows", tmp_path / "store")
    rows = RowFolder.open(world.rows)
    held = set(rows.keys("validation"))
    generator = np.random.default_rng(0)
    with (
        RowWriter(other.rows, {}) as writer,
        StoreWriter(other.store, source.spec) as store,
    ):
        for capture in map(source.get, source.keys()):
            assert capture.mask is not None
            row = Row.make(generator.integers(0, 96, len(capture.ids)), capture.mask)
            writer.add(row, "validation" if capture.key in held else "train")
            store.add(row, capture.states)
    said.clear()
    result = train(_short(world, tmp_path / "foreign", other.store, other.rows), said.append)
    assert result["val_on_policy"] is False and result["last"]["text_agreement"] < 0.2
    assert sum("off-policy" in line for line in said) == 1


def _short(world: World, out: Path, store: Path, rows: Path) -> TrainConfig:
    values = {
        "store": store, "rows": rows, "model": str(world.model), "out": out, "ttt_steps": 2, "tokens_per_pack": 256, "max_steps": 4,
        "validate_every": 2, "tensorboard": False, "shape": {"vocab": 0}, "machine": {"device": "cpu"},
    }  # fmt: skip
    return build(TrainConfig, values, "test")


@pytest.mark.slow
def test_eight_rows_learned_by_heart(tmp_path: Path) -> None:
    """A two-layer target, eight rows it wrote greedily: acceptance above 0.99 at every position, replay near the full chain.

    Taught the best token alone: a random target has near ties, which its soft distribution does not decide.
    """
    model = make_tiny_model(tmp_path / "model", layers=2, hidden=48, vocab=64, seed=1)
    rows = write_rows(model, 9, 24, seed=5)
    with RowWriter(tmp_path / "rows", {}) as writer:
        for number, row in enumerate(rows):
            writer.add(row, "train" if number < 8 else "validation")
    world = World(model, tmp_path / "rows", tmp_path / "store")
    capture_into(world, rows, (0, 1, 2, "final"))
    values = {
        "store": world.store, "rows": world.rows, "model": str(model), "out": tmp_path / "d", "ttt_steps": 4, "tokens_per_pack": 512,
        "max_steps": 250, "log_every": 100, "validate_every": 500, "tensorboard": False, "shape": {"vocab": 0},
        "optim": {"kind": "adamw", "learning_rate": 1e-2}, "loss": {"kind": "ce"}, "validation_steps": 4, "machine": {"device": "cpu"},
    }  # fmt: skip
    train(build(TrainConfig, values, "test"), lambda _: None)
    drafter = load_draft(tmp_path / "d", world.target).model
    store = Store.open(world.store)
    captures = [store.get(row.key) for row in rows[:8]]
    documents = [Document(c.ids, c.mask, c.states) for c in captures if c.mask is not None]
    teacher = Teacher(world.target.head, torch.arange(64))
    packs = MemoryPacks(documents, Placing(torch.device("cpu")), token_budget=512, epochs=1)
    found = validate(
        drafter,
        Unroll(drafter),
        Objective(teacher, "kl", (1.0,) * 4),
        packs,
        4,
        torch.autocast("cpu", enabled=False),
    )
    assert min(found.accuracy.conditional) > 0.99, found.summary()
    assert found.simulated.length > 4.5, found.summary()


def test_pack_is_the_documents(world: World) -> None:
    """States arrive in the drafter's order of taps, ids and labels in their place."""
    store = Store.open(world.store)
    capture = store.get(store.keys()[0], (4, 2, "final"))
    assert capture.mask is not None
    document = Document(capture.ids, capture.mask, capture.states)
    (pack,) = MemoryPacks([document], Placing(torch.device("cpu")), token_budget=64, epochs=1)
    assert isinstance(pack, Pack)
    hidden = store.spec.hidden_size
    torch.testing.assert_close(pack.taps[:, :hidden], store.get(capture.key, (4,)).states[0].float())
    torch.testing.assert_close(pack.taps[:, hidden:], store.get(capture.key, (2,)).states[0].float())
    assert pack.ids.tolist() == capture.ids.tolist()
    torch.testing.assert_close(pack.labels_final(), capture.states[-1].float()[pack.layout.starts + 1])
