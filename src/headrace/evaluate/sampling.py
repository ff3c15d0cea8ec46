"""How tokens are chosen: greedily, or by sampling so that the output has the target's distribution exactly.

Two lossless ways of sampling are here. When the nodes are the drafter's best tokens (chains as SGLang and vLLM draft them, and
all trees) the target samples its own token at every node, and nodes are accepted while they agree: each new token is a
plain sample of the target. When a chain was itself sampled from the drafter's distribution q, a token x is accepted with
probability min(1, p(x) / q(x)), else replaced by a sample of max(p - q, 0), normalized (Leviathan et al. 2023,
arXiv:2211.17192); that accepts more, with probability 1 - TV(p, q).

Shapes: B sequences, N nodes, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from headrace.evaluate.proposal import Proposal, Verdict, walk


class Rule(ABC):
    """Chooses tokens from the target's logits."""

    @abstractmethod
    def choose(self, logits: Tensor) -> Tensor:
        """logits [..., V] → token ids [...]."""

    @abstractmethod
    def judge(self, proposal: Proposal, logits: Tensor) -> Verdict:
        """Accept what the target's logits [B, N + 1, V] allow."""

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The drafter's next token of a chain: from its logits [B, V'] to ids [B] of its own vocabulary.

        The second value is the distribution [B, V'] it was sampled from, None when it is simply the best.
        """
        return logits.argmax(-1), None


class Greedy(Rule):
    """Temperature 0."""

    def choose(self, logits: Tensor) -> Tensor:
        """The most likely token; of equal ones the first."""
        return logits.argmax(-1)

    def judge(self, proposal: Proposal, logits: Tensor) -> Verdict:
        """Accept nodes while they are the target's most likely tokens."""
        return walk(proposal, self.choose(logits))


class Sampling(Rule):
    """Temperature above 0, with an optional nucleus of the target's distribution."""

    def __init__(
        self, temperature: float, top_p: float, generator: torch.Generator, *, sampled_proposals: bool = False
    ) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self._generator = generator
        self._sampled_proposals = sampled_proposals

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution that the output follows, float32 [..., V]."""
        return nucleus(torch.softmax(logits.float() / self.temperature, -1), self.top_p)

    def choose(self, logits: Tensor) -> Tensor:
        """One sample of each distribution."""
        return self._sample(self.probs(logits))

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """A sample of the drafter's distribution when proposals are sampled, else its best token."""
        if not self._sampled_proposals:
            return super().draw(logits)
        probs = torch.softmax(logits.float() / self.temperature, -1)
        return self._sample(probs), probs

    def judge(self, proposal: Proposal, logits: Tensor) -> Verdict:
        """Accept losslessly; see the module docstring."""
        if proposal.probs is None:
            return walk(proposal, self.choose(logits))
        return self._reject(proposal.tokens, proposal.probs, self.probs(logits))

    def _reject(self, tokens: Tensor, drafted: Tensor, target: Tensor) -> Verdict:
        batch, nodes = tokens.shape
        p = target[:, :nodes].gather(2, tokens[:, :, None])[:, :, 0]
        q = drafted.gather(2, tokens[:, :, None])[:, :, 0]
        luck = torch.rand(p.shape, generator=self._generator, device=p.device)
        accepted = (luck * q < p).long().cumprod(1).sum(1)
        # Where the chain ends early the next token comes from what the drafter gave too little; past its end, from the target.
        rest = torch.cat([(target[:, :nodes] - drafted).clamp_min(0), target[:, nodes:]], 1)
        rows = torch.arange(batch, device=p.device)
        rest = rest[rows, accepted]
        # Rounding alone can leave nothing where p and q are almost equal; a sample of p is then right to the same rounding.
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target[rows, accepted])
        extra = self._sample(rest)
        steps = torch.arange(nodes + 1, device=p.device).expand(batch, -1)
        new = torch.cat([tokens, extra[:, None]], 1).scatter(1, accepted[:, None], extra[:, None])
        path = torch.where(steps <= accepted[:, None], steps, 0)
        return Verdict(path, accepted + 1, new)

    def _sample(self, weights: Tensor) -> Tensor:
        """Samples of unnormalized weights [..., V], by exponential races: argmax of w / Exp(1)."""
        race = torch.empty_like(weights).exponential_(generator=self._generator)
        return (weights / race.clamp_min(torch.finfo(race.dtype).tiny)).argmax(-1)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens whose probabilities reach ``top_p`` together, and normalize."""
    if top_p >= 1:
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(probs).scatter(-1, order, torch.where(before < top_p, ordered, 0))
    return kept / kept.sum(-1, keepdim=True)
