"""Drafters for tests: fitted in seconds to what a target says to a few prompts, so that acceptance is neither none nor total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from headrace.draft.config import DraftConfig
from headrace.draft.layout import make_layout
from headrace.draft.model import Eagle3Draft
from headrace.draft.ttt import Pack, Unroll
from headrace.evaluate.decode import Limits, decode_plainly
from headrace.evaluate.sampling import Greedy
from headrace.evaluate.verifier import Verifier
from headrace.taps import ResidualTaps
from headrace.target import Target
from headrace.types import FINAL, Tap


@dataclass(frozen=True)
class Fitting:
    """How long and how fast a drafter is fitted."""

    new_tokens: int = 48
    """Length of the answers it learns."""
    rounds: int = 60
    """Passes over all of them."""
    steps: int = 3
    """Test-time-training steps: drafted positions it learns."""
    rate: float = 1e-3
    seed: int = 0


def fit_draft(
    target: Target,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    taps: tuple[int, ...],
    *,
    draft_vocab: int = 0,
    how: Fitting | None = None,
    **changes: Any,
) -> Eagle3Draft:
    """Train a drafter on the greedy answers of ``model`` (the loaded target) to ``prompts``, all in one pack.

    Its norm weights start scattered around 1: a norm left out or doubled in serving must show. ``draft_vocab`` 0 means the
    full vocabulary; ``changes`` are fields of :class:`DraftConfig`.
    """
    how = how or Fitting()
    limits = Limits(how.new_tokens, frozenset())
    answers = decode_plainly(Verifier(model, target.num_layers, ()), prompts, Greedy(), limits)
    rows = [([*prompt, *answer.tokens], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]
    pack = _pack(model, target, rows, taps)
    torch.manual_seed(how.seed)
    draft = new_draft(target, taps, _frequent(rows, draft_vocab, target.vocab_size), **changes)
    _train(draft, pack, how)
    return draft.eval().requires_grad_(False)


def new_draft(target: Target, taps: tuple[int, ...], ids: torch.Tensor, **changes: Any) -> Eagle3Draft:
    """An untrained drafter whose head and embedding are the target's; ``ids`` are the target tokens it can propose."""
    config = DraftConfig.for_target(target, taps, len(ids), **changes)
    draft = Eagle3Draft(config)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.embedding)
        draft.lm_head.weight.copy_(target.head.weight[ids])
        draft.d2t.copy_(ids - torch.arange(len(ids)))
        draft.t2d.zero_()[ids] = True
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.6, 1.4)
    return draft


def _train(draft: Eagle3Draft, pack: Pack, how: Fitting) -> None:
    """Cross-entropy to the answers themselves: they are greedy, so their next token is the target's best."""
    starts, room = pack.layout.starts, pack.layout.room
    known = draft.t2d.long().cumsum(0) - 1  # target id → draft id
    labels, used = [], []
    for step in range(how.steps):
        tokens = pack.ids[(starts + 2 + step).clamp(max=len(pack.ids) - 1)]
        labels.append(known[tokens])
        used.append((room > step) & draft.t2d[tokens])
    wanted, counted = torch.stack(labels), torch.stack(used)
    unroll = Unroll(draft)
    draft.lm_head.weight.requires_grad_(False)
    optimizer = torch.optim.Adam(
        [p for p in draft.parameters() if p.requires_grad], lr=how.rate, betas=(0.9, 0.95)
    )
    for _ in range(how.rounds):
        logits = draft.lm_head(unroll(pack, how.steps)[counted])
        optimizer.zero_grad()
        F.cross_entropy(logits, wanted[counted]).backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()


def _pack(model: nn.Module, target: Target, rows: list[tuple[list[int], int]], taps: tuple[int, ...]) -> Pack:
    """All rows end to end, with the target's states; the answers are what is learned."""
    wanted: tuple[Tap, ...] = (*taps, FINAL)
    states = []
    for ids, _ in rows:
        with torch.inference_mode(), ResidualTaps(model, target.num_layers, wanted) as seen:
            model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1)
        # A copy, for tensors made in inference mode cannot take part in training.
        states.append(torch.stack([seen.states[tap][0] for tap in wanted]).float().clone())
    joined = torch.cat(states, 1)
    mask = np.concatenate([np.arange(len(ids)) >= start for ids, start in rows])
    layout = make_layout([len(ids) for ids, _ in rows], mask)
    tokens = torch.tensor([token for ids, _ in rows for token in ids])
    return Pack(tokens, joined[:-1].transpose(0, 1).flatten(1), joined[-1], layout)


def _frequent(rows: list[tuple[list[int], int]], size: int, vocab: int) -> torch.Tensor:
    """The ``size`` tokens the answers hold most, ascending; unused ids fill up what is missing."""
    if not size or size == vocab:
        return torch.arange(vocab)
    counts = Counter(token for ids, start in rows for token in ids[start:])
    order = [token for token, _ in counts.most_common(size)]
    unused = (token for token in range(vocab) if token not in counts)
    order += [next(unused) for _ in range(size - len(order))]
    return torch.tensor(sorted(order))
