"""Losses and their written-out gradients against autograd in float64; the chunked objective against the plain formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.draft.losses import HYBRID_RATE, loss_and_gradient
from headrace.draft.metrics import Accuracy, implied_length
from headrace.draft.objective import COUNTERS, Objective
from headrace.draft.teacher import Teacher, matmul32
from headrace.errors import TrainingError
from headrace.target import Head

KINDS = ["kl", "ce", "tv", "lk", "hybrid"]


def plain(kind: str, logits: torch.Tensor, full_target: torch.Tensor, size: int) -> torch.Tensor:
    """The definitions, from the target's distribution over its whole vocabulary (draft tokens first)."""
    q, p_full = logits.softmax(-1), full_target[..., :size]
    p = p_full / p_full.sum(-1, keepdim=True)
    accepted = torch.minimum(p_full, q).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    if kind == "kl":
        return kl
    if kind == "ce":
        return -q.log().gather(-1, p.argmax(-1, keepdim=True).expand(*q.shape[:-1], 1))[..., 0]
    if kind == "tv":
        return 1 - accepted
    if kind == "lk":
        return -accepted.log()
    weight = torch.exp(-HYBRID_RATE * accepted.detach())
    return weight * kl + (1 - weight) * (1 - accepted)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_equals_autograd(kind: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 7, 9, dtype=torch.float64, requires_grad=True)
    target = (torch.randn(7, 14, dtype=torch.float64) * 2).softmax(-1)
    expected = plain(kind, logits, target, 9)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    draft = target[:, :9]
    loss, slope = loss_and_gradient(
        kind, logits.detach(), (draft / draft.sum(-1, keepdim=True)).log(), draft.sum(-1), draft.argmax(-1)
    )  # type: ignore[arg-type]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(slope, gradient)


def test_tr05_gradient_near_the_optimum() -> None:
    """p and q almost equal: the float32 gradient of the divergence stays within 1 % of float64's (bf16 loses it whole)."""
    torch.manual_seed(1)
    base = torch.randn(64, 4096) * 3
    near = base + 1e-3 * torch.randn(64, 4096)

    def slope(dtype: torch.dtype) -> torch.Tensor:
        target = base.to(dtype).log_softmax(-1)
        ones = torch.ones(64, dtype=dtype)
        return loss_and_gradient("kl", near.to(dtype), target, ones, target.argmax(-1))[1].double()

    exact = slope(torch.float64)
    assert (slope(torch.float32) - exact).norm() / exact.norm() < 0.01
    assert (slope(torch.bfloat16) - exact).norm() / exact.norm() > 0.5


def test_tr08_out_of_vocabulary_labels() -> None:
    """Draft vocabulary {3,5,9,12} of 16; labels 3, 7, 5, 9; the draft says 3, -, 5, 12: loss on 3, accuracy 2/4, coverage 3/4."""
    vocab = torch.tensor([3, 5, 9, 12])
    labels = [3, 7, 5, 9]
    said = [0, 0, 1, 3]  # draft ids of 3, (anything), 5, 12
    head = torch.eye(16)
    final = torch.stack([head[label] * 8 for label in labels])
    lm_head = torch.eye(4)
    states = (torch.eye(4)[said] * 8)[None]
    room = torch.tensor([1, 1, 1, 1])
    outcome = Objective(Teacher(Head(head), vocab), "kl", (1.0,))(states, lm_head, final, room)
    accuracy = Accuracy(outcome.counts.numpy(), outcome.sums.double().numpy())
    count = dict(zip(COUNTERS, outcome.counts[:, 0].tolist(), strict=True))
    assert (count["counted"], count["covered"], count["accepted"]) == (4, 3, 2)
    assert accuracy.conditional == [0.5]
    assert accuracy.conditional_in_vocab == [pytest.approx(2 / 3)]
    assert accuracy.coverage == 0.75


def test_tr08_missing_label_gives_no_gradient() -> None:
    head = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    vocab = torch.tensor([3, 5, 9, 12])
    final = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    best = (final @ head.T).argmax(-1)
    inside = torch.isin(best, vocab)
    assert 3 < inside.sum() < 37
    states = torch.randn(1, 40, 8, requires_grad=True)
    Objective(Teacher(Head(head), vocab), "kl", (1.0,), chunk=7)(
        states, torch.randn(4, 8), final, torch.ones(40, dtype=torch.long)
    ).loss.backward()
    assert states.grad is not None
    assert torch.equal(states.grad[0].abs().sum(-1) > 0, inside)


@pytest.mark.parametrize("chunk", [1, 4, 5, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_nothing(kind: str, chunk: int) -> None:
    """Loss, both gradients and all counts, for any chunk, with chains of several runs and a bias, scale and soft cap."""
    torch.manual_seed(2)
    room = torch.tensor([3, 2, 1, 1, 5, 4, 3, 2, 1, 2, 1, 0, 0])
    head = Head(torch.randn(20, 6), torch.randn(20), scale=0.7, softcap=5.0)
    vocab = torch.tensor([1, 2, 5, 7, 8, 11, 12, 13, 17, 19])
    final = torch.randn(13, 6, dtype=torch.float64)
    base, matrix = torch.randn(3, 13, 6, dtype=torch.float64), torch.randn(10, 6, dtype=torch.float64)

    states, lm_head = base.clone().requires_grad_(True), matrix.clone().requires_grad_(True)
    weights = (1.0, 0.5, 0.25)
    outcome = Objective(Teacher(head, vocab), kind, weights, chunk=chunk)(states, lm_head, final, room)  # type: ignore[arg-type]
    outcome.loss.backward()

    plain_states, plain_head = base.clone().requires_grad_(True), matrix.clone().requires_grad_(True)
    order = torch.cat([vocab, torch.tensor([i for i in range(20) if i not in vocab.tolist()])])
    assert head.bias is not None
    raw = (final @ head.weight.double().T + head.bias.double()) * 0.7
    target = (torch.tanh(raw / 5.0) * 5.0)[:, order].softmax(-1)
    total, covered_counts = torch.zeros((), dtype=torch.float64), []
    for s in range(3):
        chains = [m for m in range(13) if room[m] > s]
        used = [m for m in chains if target[m + s].argmax() < 10]
        covered_counts.append(len(used))
        logits = plain_states[s, used] @ plain_head.T
        total = total + weights[s] * plain(kind, logits, target[[m + s for m in used]], 10).sum() / len(
            chains
        )
    total.backward()
    torch.testing.assert_close(outcome.loss, total)
    torch.testing.assert_close(states.grad, plain_states.grad)
    torch.testing.assert_close(lm_head.grad, plain_head.grad)
    assert outcome.counts[0].tolist() == [11, 7, 4]
    assert outcome.counts[1].tolist() == covered_counts


def test_conditional_counts_follow_each_chain() -> None:
    """Hits are conditional on the same chain's earlier steps, over the chains that have room."""
    torch.manual_seed(3)
    room = torch.tensor([4, 3, 2, 1, 3, 2, 1])
    head, states = torch.randn(8, 5), torch.randn(3, 7, 5)
    final = torch.randn(7, 5)
    counts = Objective(Teacher(Head(head), torch.arange(8)), "kl", (1.0,) * 3, chunk=2)(
        states, head, final, room
    ).counts
    best = (states @ head.T).argmax(-1)
    label = (final @ head.T).argmax(-1)
    reached, accepted = [0, 0, 0], [0, 0, 0]
    for m in range(7):
        for s in range(min(3, int(room[m]))):
            reached[s] += 1
            if best[s, m] != label[m + s]:
                break
            accepted[s] += 1
    assert counts[COUNTERS.index("reached")].tolist() == reached
    assert counts[COUNTERS.index("accepted")].tolist() == accepted


def test_tr12_implied_length() -> None:
    """1 + 0.8 + 0.56 + 0.336."""
    assert implied_length([0.8, 0.7, 0.6]) == pytest.approx(2.696)
    counts = np.array(
        [[1000] * 3, [1000] * 3, [800, 700, 600], [1000, 800, 560], [1000, 800, 560], [800, 560, 336]]
    )
    assert Accuracy(counts, np.zeros(3)).length == pytest.approx(2.696)


def test_tr11_counts_pool_and_are_bounded() -> None:
    """Four workers with 8 of 10 right give 0.80; counts that were added twice on one side are refused."""
    one = np.array([[10], [10], [8], [10], [10], [8]])
    four = sum((Accuracy(one, np.zeros(1)) for _ in range(4)), Accuracy.zero(1))
    assert four.conditional == [0.8]
    twice = one.copy()
    twice[5] *= 4
    with pytest.raises(TrainingError, match="added twice"):
        _ = Accuracy(twice, np.zeros(1)).conditional


def test_matmul_is_float32_even_for_bf16_weights() -> None:
    states, weight = torch.randn(4, 64), torch.randn(9, 64).to(torch.bfloat16)
    out = matmul32(states, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, states @ weight.float().T)


def test_temperature_sharpens_the_lesson_only() -> None:
    """A teacher at 0.5 squares the probabilities it teaches, and says the same of vocabulary, mass and best token."""
    torch.manual_seed(4)
    head, final = Head(torch.randn(12, 6)), torch.randn(5, 6)
    vocab = torch.tensor([0, 2, 4, 6, 8])
    plain_labels, sharp = (
        Teacher(head, vocab).labels(final),
        Teacher(head, vocab, temperature=0.5).labels(final),
    )
    squared = plain_labels.log_probs.exp() ** 2
    torch.testing.assert_close(sharp.log_probs.exp(), squared / squared.sum(-1, keepdim=True))
    assert torch.equal(plain_labels.best, sharp.best)
    torch.testing.assert_close(plain_labels.mass, sharp.mass)
