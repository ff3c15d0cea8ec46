"""Lossless sampling: whatever the drafter says, the output has exactly the target's distribution.

A toy target and a toy drafter are Markov chains over a handful of tokens, so the distribution of the first tokens is known
in closed form; chi-square compares it with what the loop's own acceptance rules produce.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.evaluate.proposal import Proposal, Verdict
from headrace.evaluate.sampling import Greedy, Sampling, nucleus

VOCAB, SAMPLES, LENGTH = 5, 60_000, 3
TARGET = torch.tensor(
    [
        [2.0, 0.5, -1.0, 0.0, 0.3],
        [0.1, 1.5, 0.2, -2.0, 0.0],
        [-0.5, 0.0, 0.0, 1.0, 2.0],
        [1.0, 1.0, 1.0, -1.0, 0.0],
        [0.0, -3.0, 2.5, 0.5, 0.5],
    ]
)
# Agrees with the target in part, is confidently wrong elsewhere, and cannot propose token 3 at all.
DRAFT = torch.tensor(
    [
        [1.5, 0.5, 0.0, -math.inf, 0.0],
        [3.0, 0.0, 0.2, -math.inf, 0.0],
        [0.0, 0.0, 1.0, -math.inf, 2.0],
        [1.0, 1.0, 1.0, -math.inf, 1.0],
        [0.0, 2.0, 2.5, -math.inf, 0.5],
    ]
)

Draft = Callable[[Tensor], Proposal]


def generate(rule: Sampling, draft: Draft) -> Tensor:
    """[SAMPLES, LENGTH] tokens after token 0, by rounds of drafting and judging as the real loop does."""
    out = torch.full((SAMPLES, LENGTH + 8), -1)
    roots = torch.zeros(SAMPLES, dtype=torch.long)
    lengths = torch.zeros(SAMPLES, dtype=torch.long)
    while int(lengths.min()) < LENGTH:
        proposal = draft(roots)
        tokens = torch.cat([roots[:, None], proposal.tokens], 1)
        verdict = rule.judge(proposal, TARGET[tokens])
        for step in range(verdict.tokens.shape[1]):
            used = (step < verdict.counts) & (lengths + step < out.shape[1])
            out[used, (lengths + step)[used]] = verdict.tokens[used, step]
        roots = verdict.tokens.gather(1, verdict.counts[:, None] - 1)[:, 0]
        lengths = (lengths + verdict.counts).clamp(max=LENGTH + 4)
    return out[:, :LENGTH]


def p_value(tokens: Tensor, temperature: float, top_p: float = 1.0) -> float:
    """Of the chi-square test that ``tokens`` follow the target's chain, over all sequences of LENGTH tokens."""
    chain = nucleus((TARGET / temperature).softmax(-1), top_p).double()
    expected = chain[0]
    for _ in range(LENGTH - 1):
        expected = (expected[:, None] * chain[torch.arange(len(expected)) % VOCAB]).flatten()
    codes = (tokens * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    observed = torch.bincount(codes, minlength=VOCAB**LENGTH).double()
    assert observed[expected == 0].sum() == 0, "a sequence outside the nucleus was produced"
    kept = expected * SAMPLES >= 5
    rest = (~kept) & (expected > 0)
    seen = torch.cat([observed[kept], observed[rest].sum()[None]])
    wanted = torch.cat([expected[kept], expected[rest].sum()[None]]) * SAMPLES
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def sampled_chain(rule: Sampling, steps: int) -> Draft:
    def draft(roots: Tensor) -> Proposal:
        tokens, probs, last = [], [], roots
        for _ in range(steps):
            last, distribution = rule.draw(DRAFT[last])
            tokens.append(last)
            probs.append(distribution)
        if probs[0] is None:
            return Proposal.chain(torch.stack(tokens, 1))
        return Proposal.chain(torch.stack(tokens, 1), torch.stack(probs, 1))

    return draft


def small_tree(roots: Tensor) -> Proposal:
    """The drafter's two best tokens, and the best one after each of them."""
    pair = DRAFT[roots].topk(2, -1).indices
    tokens = torch.cat([pair, DRAFT[pair].argmax(-1)], 1)
    parents = torch.tensor([0, 0, 1, 2]).expand_as(tokens)
    return Proposal(tokens, parents, torch.tensor([1, 1, 2, 2]).expand_as(tokens))


def rule_of(temperature: float, top_p: float = 1.0, *, sampled: bool = False) -> Sampling:
    generator = torch.Generator().manual_seed(7)
    return Sampling(temperature, top_p, generator, sampled_proposals=sampled)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 1.0), (1.5, 0.8)])
@pytest.mark.parametrize("way", ["sampled chain", "argmax chain", "tree", "nothing"])
def test_output_has_the_distribution_of_the_target(way: str, temperature: float, top_p: float) -> None:
    rule = rule_of(temperature, top_p, sampled=way == "sampled chain")
    drafts: dict[str, Draft] = {
        "sampled chain": sampled_chain(rule, 3),
        "argmax chain": sampled_chain(rule, 3),
        "tree": small_tree,
        "nothing": lambda roots: Proposal.nothing(len(roots), roots.device),
    }
    assert p_value(generate(rule, drafts[way]), temperature, top_p) > 1e-3


def test_the_statistical_test_notices_a_lossy_rule() -> None:
    """Accepting with probability min(1, p / q) but replacing by p itself, not by what is left of it, is the classic mistake."""

    class Lossy(Sampling):
        def _reject(self, tokens: Tensor, drafted: Tensor, target: Tensor) -> Verdict:
            verdict = super()._reject(tokens, drafted, target)
            last = verdict.counts - 1
            again = self._sample(target[torch.arange(len(target)), last])
            return Verdict(
                verdict.path, verdict.counts, verdict.tokens.scatter(1, last[:, None], again[:, None])
            )

    rule = Lossy(1.0, 1.0, torch.Generator().manual_seed(7), sampled_proposals=True)
    assert p_value(generate(rule, sampled_chain(rule, 3)), 1.0) < 1e-6


def test_sampled_proposals_are_accepted_with_probability_one_minus_total_variation() -> None:
    rule = rule_of(1.0, sampled=True)
    roots = torch.zeros(SAMPLES, dtype=torch.long)
    proposal = sampled_chain(rule, 1)(roots)
    verdict = rule.judge(proposal, TARGET[torch.cat([roots[:, None], proposal.tokens], 1)])
    p, q = TARGET[0].softmax(-1), DRAFT[0].softmax(-1)
    assert float((verdict.counts - 1).float().mean()) == pytest.approx(
        float(torch.minimum(p, q).sum()), abs=0.01
    )


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    rule = rule_of(1.0, sampled=True)
    roots = torch.randint(0, VOCAB, (2000,))
    drafted, probs = rule.draw(TARGET[roots])
    assert probs is not None
    verdict = rule.judge(
        Proposal.chain(drafted[:, None], probs[:, None]), TARGET[torch.stack([roots, drafted], 1)]
    )
    assert verdict.counts.tolist() == [2] * 2000


def test_greedy_is_the_limit_of_low_temperature() -> None:
    roots = torch.randint(0, VOCAB, (500,))
    proposal = small_tree(roots)
    logits = TARGET[torch.cat([roots[:, None], proposal.tokens], 1)]
    greedy, cold = Greedy().judge(proposal, logits), rule_of(1e-4).judge(proposal, logits)
    # Token 3's row has three equal best tokens: there the two may differ.
    clear = ~(torch.cat([roots[:, None], greedy.tokens], 1) == 3).any(1)
    assert torch.equal(greedy.counts[clear], cold.counts[clear])


def test_nucleus_keeps_the_smallest_set_that_reaches_top_p() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert nucleus(probs, 0.6).tolist() == [pytest.approx([0, 4 / 7, 0, 3 / 7])]
    assert nucleus(probs, 0.01).tolist() == [[0, 1, 0, 0]]
    assert nucleus(probs, 1.0) is probs
