"""A draft method without a network: the final state s tokens ahead as a linear map of the one now, by ridge regression."""

import torch
from pydantic import Field

from headrace.config import Section
from headrace.draft.checkpoint import read_drafter, write_drafter
from headrace.draft.method import DraftMethod


class LinearOptions(Section):
    """What the user may set: --method-options heads=3."""

    heads: int = Field(default=3, ge=1)
    """Tokens that can be proposed in a row."""
    ridge: float = Field(default=1e-2, gt=0)
    """Penalty, as a share of the states' mean square."""


class LinearDrafter(DraftMethod):
    Options = LinearOptions
    taps = ("final",)

    def __init__(self, maps, head):
        self.maps, self.head = maps, head

    @classmethod
    def train(cls, data, target, options, out, say):
        size, heads = target.hidden_size, options.heads
        gram, cross = torch.zeros(heads, size, size), torch.zeros(heads, size, size)
        for key in data.train:
            states = data.store.get(key, cls.taps).states[0].float()
            for s in range(1, min(heads, len(states) - 1) + 1):
                gram[s - 1] += states[:-s].T @ states[:-s]
                cross[s - 1] += states[:-s].T @ states[s:]
        penalty = options.ridge * gram.diagonal(dim1=1, dim2=2).mean(1)
        maps = torch.linalg.solve(gram + penalty[:, None, None] * torch.eye(size), cross)
        write_drafter(
            out, "linear", {"taps": ["final"]}, {"maps": maps}, data.store.spec, {"data": data.facts}
        )
        return {"heads": heads, "train_tokens": data.facts["train_tokens"]}

    @classmethod
    def open(cls, folder, target, device, dtype):
        _, tensors = read_drafter(folder, target)
        return cls(tensors["maps"].to(device, dtype), target.head)

    def begin(self, prompts, roots, states, room):
        self.state = states[0, :, -1]  # of the last prompt token: the target made the root from it

    def extend(self, tokens, states, counts):
        self.state = states[0, torch.arange(len(counts), device=counts.device), counts - 1]

    def propose(self, steps):
        ahead = torch.stack([self.state @ each for each in self.maps[:steps]], 1)  # [B, steps, H]
        return self.head.logits(ahead.cpu()).argmax(-1).to(ahead.device)

    def keep(self, rows):
        self.state = self.state[rows]
