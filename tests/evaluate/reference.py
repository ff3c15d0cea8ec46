"""Speculative decoding written as plainly as possible: no cache, no batch, everything computed anew for every token.

It is the truth that the fast loop is compared with, verification by verification.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headrace.draft.model import DraftCache, Eagle3Draft
from headrace.taps import ResidualTaps


@dataclass
class Run:
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def target_forward(
    model: nn.Module, layers: int, taps: tuple[int, ...], ids: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and concatenated taps [n, T * H] of one sequence."""
    with torch.inference_mode(), ResidualTaps(model, layers, taps) as seen:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits, torch.cat([seen.states[t][0] for t in taps], -1)


def draft_forward(draft: Eagle3Draft, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """All rows of one sequence from nothing: the last row's state to feed on, and its logits."""
    n = len(tokens)
    cache = DraftCache.allocate(draft, 1, n)
    out = draft.step(torch.tensor([tokens]), states[None], torch.arange(n)[None], cache)[0, -1]
    return draft.feedback(out), draft.logits(out)


@torch.inference_mode()
def propose(draft: Eagle3Draft, ids: list[int], taps: Tensor, steps: int) -> list[int]:
    """``steps`` tokens after ``ids``; ``taps`` [n - 1, T * H] are the target's states of all but the last id."""
    states = draft.fuse(taps)
    tokens = ids[1:]
    proposed: list[int] = []
    for _ in range(steps):
        state, logits = draft_forward(draft, tokens, states)
        proposed.append(int(draft.to_target(logits.argmax())))
        tokens = [*tokens, proposed[-1]]
        states = torch.cat([states, state[None]])
    return proposed


def greedy_chain(
    model: nn.Module,
    layers: int,
    draft: Eagle3Draft,
    prompt: list[int],
    *,
    steps: int,
    max_new: int,
    stop: frozenset[int],
) -> Run:
    """One prompt, greedily, with a chain of ``steps``."""
    taps = draft.config.taps
    run = Run([int(target_forward(model, layers, taps, prompt)[0][-1].argmax())])
    ids = [*prompt, run.tokens[0]]
    while run.tokens[-1] not in stop and len(run.tokens) < max_new:
        states = target_forward(model, layers, taps, ids)[1][:-1]
        proposed = propose(draft, ids, states, steps)
        choices = (
            target_forward(model, layers, taps, [*ids, *proposed])[0].argmax(-1).tolist()[len(ids) - 1 :]
        )
        accepted = 0
        while accepted < steps and proposed[accepted] == choices[accepted]:
            accepted += 1
        run.accepted.append(accepted)
        new = [*proposed[:accepted], choices[accepted]]
        ids += new
        for token in new:
            run.tokens.append(token)
            if token in stop or len(run.tokens) >= max_new:
                break
    return run


def greedy_plain(model: nn.Module, prompt: list[int], *, max_new: int, stop: frozenset[int]) -> list[int]:
    """What transformers' own generate gives."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new,
        do_sample=False,
        eos_token_id=sorted(stop),
        pad_token_id=0,
    )
    return [int(t) for t in out[0, len(prompt) :]]


@torch.inference_mode()
def tree_paths(
    model: nn.Module, layers: int, draft: Eagle3Draft, ids: list[int], depth: int, topk: int, nodes: int
) -> set[tuple[int, ...]]:
    """Token paths of EAGLE-2's tree after ``ids``: every path's states are computed from nothing.

    Level by level the best ``topk`` nodes are expanded into their best ``topk`` children; the best ``nodes`` of all are kept.
    """
    taps = target_forward(model, layers, draft.config.taps, ids)[1][:-1]
    scores: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path in frontier:
            best = path_logits(draft, ids, taps, path).double().log_softmax(-1).topk(topk)
            for gain, token in zip(best.values.tolist(), draft.to_target(best.indices).tolist(), strict=True):
                level[(*path, token)] = scores.get(path, 0.0) + gain
        scores |= level
        frontier = sorted(level, key=lambda p: -level[p])[:topk]
    return set(sorted(scores, key=lambda p: (-scores[p], len(p)))[:nodes])


def path_logits(draft: Eagle3Draft, ids: list[int], taps: Tensor, path: tuple[int, ...]) -> Tensor:
    """The drafter's logits after ``path``, a branch below the last of ``ids``."""
    states, tokens = draft.fuse(taps), ids[1:]
    state, logits = draft_forward(draft, tokens, states)
    for token in path:
        tokens, states = [*tokens, token], torch.cat([states, state[None]])
        state, logits = draft_forward(draft, tokens, states)
    return logits
