"""What an update needs in memory, from shapes alone, so that a pack which cannot fit is refused before anything is read.

The unrolled steps are what grows: every one of S steps keeps the activations of every start for the backward pass, so the
need is a fixed part plus a part a token, and the longest row that can be trained on follows from it. There is no context
parallelism: a row's tokens are all on one device. The terms were fitted to what autograd keeps
(``tests/draft/test_memory.py`` holds them to it).
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from headrace.draft.attention import QUERY_BLOCK
from headrace.draft.data import AHEAD
from headrace.draft.options import TrainOptions
from headrace.draft.shape import DraftConfig
from headrace.draft.trainer import Machine
from headrace.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class Need:
    """Bytes of one worker's update."""

    fixed: float
    """Weights, gradients, optimizer, and the logits of one chunk of labels."""
    per_token: float
    """Of one token of a pack: its states, and its share of the activations of all steps."""

    def of(self, tokens: int) -> float:
        """Bytes for a pack of ``tokens``."""
        return self.fixed + tokens * self.per_token

    def most(self, available: float) -> int:
        """Tokens of the largest pack that fits into ``available`` bytes."""
        return max(0, int((available - self.fixed) / self.per_token))


def activations(config: DraftConfig, steps: int, machine: Machine, *, longest: int) -> tuple[float, float]:
    """Bytes that the unrolled layer keeps for its backward pass: a row of the pack, and a start."""
    item = 2 if machine.bfloat16 else 4
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    taps = len(config.taps) * hidden
    later = steps - 1
    normed = 0 if config.fc_norm == "none" else taps * 4
    # Every row once: taps into fc, the fused state and both normed halves, keys and values.
    row = normed + taps * item + hidden * (2 * 4 + 4 * item) + 2 * key_value * item
    # Every start, every step: four norms in float32, both halves joined, residuals; queries and what they found; the MLP.
    step = hidden * (4 * 4 + 4 * item) + query * (4 + 2 * item) + mlp * 4 * item
    # A later step looks at the own rows of all steps, which are laid side by side anew each time.
    own = later * 2 * key_value * item
    if machine.attention == "flex":
        scores = 4.0 * config.num_heads
        own += 0 if machine.compiled else later * 4 * query
    elif longest <= 4 * QUERY_BLOCK:
        scores = 4.0 * config.num_heads * (longest + later)
    else:  # scores of a long document are made again; where a row may not look is kept
        scores = longest / 3
    return row, steps * (step + scores) + later * own


def need(
    config: DraftConfig,
    options: TrainOptions,
    machine: Machine,
    *,
    starts_share: float,
    longest: int,
    shards: int = 1,
    train_lm_head: bool = False,
) -> Need:
    """What an update needs when ``starts_share`` of the tokens start chains, the longest document has ``longest`` tokens,
    and weights, gradients and optimizer are split over ``shards`` workers."""
    item = 2 if machine.bfloat16 else 4
    hidden, draft, vocab, steps = (
        config.hidden_size, config.draft_vocab_size, config.vocab_size, options.ttt_steps
    )  # fmt: skip
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = len(config.taps) * hidden**2 + 2 * hidden * (query + 2 * key_value) + query * hidden
    trained = layer + 3 * hidden * config.intermediate_size + (hidden * draft if train_lm_head else 0)
    moments = 1.5 if options.optim.kind == "muon" else 2.0
    average = 1 if options.optim.average else 0
    states = trained * 4 * (2 + moments + average) / shards + (trained * 8 if shards > 1 else 0)
    frozen = item * hidden * (draft + 2 * vocab)
    chunk = options.loss.chunk * (vocab * 8 + draft * (8 + steps * (8 + item)))
    row, start = activations(config, steps, machine, longest=longest)
    # The packs that are read ahead, and the outcome's states with their gradient.
    waiting = (AHEAD + 1) * (len(config.taps) + 1) * hidden * item
    outcome = steps * hidden * 4 * item
    return Need(states + frozen + chunk, row + waiting + starts_share * (start + outcome))


def available(device: torch.device) -> int:
    """Bytes that can still be taken: of the device, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def require_room(found: Need, options: TrainOptions, machine: Machine, *, longest: int) -> None:
    """Raise ConfigError, with the limit, when a pack of ``tokens_per_pack`` tokens does not fit on the device."""
    have, tokens = available(machine.device), options.tokens_per_pack
    if found.of(tokens) <= have:
        return
    most = found.most(have)
    mend = (
        f"set tokens_per_pack to at most {most:,}"
        if most >= longest
        else f"the longest row has {longest:,} and one row is never split over devices: prepare rows of at most {most:,} tokens"
    )
    raise ConfigError(
        f"a pack of {tokens:,} tokens unrolled over {options.ttt_steps} steps needs about {found.of(tokens) / GIB:,.1f} GiB on {machine.device} "
        f"({found.fixed / GIB:,.1f} for the drafter and its optimizer, {found.per_token / 1024:,.0f} KiB a token), {have / GIB:,.1f} are free: "
        f"at most {most:,} tokens fit; {mend}, or lower ttt_steps"
    )
