"""The shapes written in the signatures on the borders of ``draft/`` and ``store/`` are true: checked while the real code runs.

jaxtyping is no dependency of the package: the annotations are text there, and become checks here.
"""

from __future__ import annotations

import importlib
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from headrace.draft.losses import loss_and_gradient
from headrace.draft.model import DraftCache, Eagle3Draft
from headrace.draft.objective import Objective
from headrace.draft.shape import DraftConfig
from headrace.draft.teacher import Teacher
from headrace.store import Store, StoreWriter
from headrace.target import Head
from headrace.testing.store import make_row, make_spec, make_states

BORDERS = {
    "headrace.draft.losses": ["loss_and_gradient"],
    "headrace.draft.objective": ["Objective.__call__"],
    "headrace.draft.teacher": ["Teacher.labels", "Teacher.read", "matmul32"],
    "headrace.draft.model": ["Eagle3Draft.fuse", "Eagle3Draft.feedback", "Eagle3Draft.logits", "Eagle3Draft.to_target", "Eagle3Draft.step"],
    "headrace.store.writer": ["StoreWriter.add"],
}  # fmt: skip
NAMES = {"Float": jaxtyping.Float, "Int": jaxtyping.Int, "Bool": jaxtyping.Bool, "torch": torch}


def checked(function: types.FunctionType) -> types.FunctionType:
    """``function`` with its annotations made checks. Fails when it has no shapes to check."""
    hints = typing.get_type_hints(function, {**vars(importlib.import_module(function.__module__)), **NAMES})
    assert any("jaxtyping" in type(hint).__module__ or "jaxtyping" in str(hint) for hint in hints.values())

    code, defaults = function.__code__, function.__defaults__
    copy = types.FunctionType(code, function.__globals__, function.__name__, defaults, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, hints
    wrapped = jaxtyped(typechecker=beartype)(copy)
    return typing.cast("types.FunctionType", wrapped)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every border function checks its shapes, wherever it was imported to."""
    for module_name, names in BORDERS.items():
        module = importlib.import_module(module_name)
        for name in names:
            owner, _, last = name.rpartition(".")
            place = getattr(module, owner) if owner else module
            original = getattr(place, last)
            wrapped = checked(original)
            monkeypatch.setattr(place, last, wrapped)
            if not owner:
                for other in ("objective", "teacher"):
                    user = importlib.import_module(f"headrace.draft.{other}")
                    if getattr(user, last, None) is original:
                        monkeypatch.setattr(user, last, wrapped)
    yield


def small_draft() -> Eagle3Draft:
    config = DraftConfig(
        taps=(2, 3), hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=40,
        draft_vocab_size=24, max_positions=64,
    )  # fmt: skip
    return Eagle3Draft(config).eval()


def test_a_serving_step(shapes: None) -> None:
    model = small_draft()
    cache = DraftCache.allocate(model, 2, 9)
    fused = model.fuse(torch.randn(2, 3, 32))
    out = model.step(torch.zeros(2, 3, dtype=torch.long), fused, torch.arange(3).repeat(2, 1), cache)
    ids = model.to_target(model.logits(model.feedback(out)).argmax(-1))
    assert ids.shape == (2, 3)
    with pytest.raises(TypeCheckError):
        model.step(torch.zeros(2, 3, dtype=torch.long), fused[:, :2], torch.arange(3).repeat(2, 1), cache)
    with pytest.raises(TypeCheckError):
        model.step(torch.zeros(2, 3), fused, torch.arange(3).repeat(2, 1), cache)


@pytest.mark.parametrize("kind", ["kl", "ce", "tv", "lk", "hybrid"])
def test_the_loss_of_a_pack(shapes: None, kind: typing.Any) -> None:
    torch.manual_seed(0)
    head = Head(torch.randn(40, 16))
    teacher = Teacher(head, torch.arange(24))
    objective = Objective(teacher, kind, (1.0, 0.5), chunk=4)
    states, matrix = torch.randn(2, 7, 16, requires_grad=True), torch.randn(24, 16)
    room = torch.tensor([2, 2, 1, 0, 2, 1, 0])
    outcome = objective(states, matrix, torch.randn(7, 16), room)
    outcome.loss.backward()
    assert states.grad is not None and states.grad.shape == states.shape
    assert teacher.labels(torch.randn(3, 16)).log_probs.shape == (3, 24)
    with pytest.raises(TypeCheckError):
        objective(states, matrix, torch.randn(6, 16), room)
    with pytest.raises(TypeCheckError):
        objective(states, matrix[:, :8], torch.randn(7, 16), room)


def test_rows_and_labels_must_fit(shapes: None) -> None:
    losses = importlib.import_module("headrace.draft.losses")
    logits, best = torch.randn(3, 5, 8), torch.zeros(5, dtype=torch.long)
    target, mass = torch.randn(5, 8).log_softmax(-1), torch.ones(5)
    loss, slope = losses.loss_and_gradient("kl", logits, target, mass, best)
    assert loss.shape == (3, 5) and slope.shape == logits.shape
    with pytest.raises(TypeCheckError):
        losses.loss_and_gradient("kl", logits, target[:, :7], mass, best)


def test_a_capture_on_its_way_into_a_store(shapes: None, tmp_path: Path) -> None:
    spec, row = make_spec(), make_row(1, 12)
    with StoreWriter(tmp_path / "store", spec) as writer:
        assert writer.add(row, make_states(row, spec))
        with pytest.raises(TypeCheckError):
            writer.add(make_row(2, 9), make_states(row, spec)[0])
    assert Store.open(tmp_path / "store")[row.key].states.shape == (4, 12, 16)


def test_without_the_checks_nothing_is_wrapped() -> None:
    assert not hasattr(loss_and_gradient, "__wrapped__") and not hasattr(Objective.__call__, "__wrapped__")
