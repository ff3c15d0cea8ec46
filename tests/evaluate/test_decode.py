"""The fast loop against the plain one: same tokens, and the same accepted count in every single verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.draft.checkpoint import load_draft
from headrace.engines.hf import load_model
from headrace.errors import ConfigError
from headrace.evaluate.acceptance import Acceptance
from headrace.evaluate.chain import draft_chain
from headrace.evaluate.decode import Answer, Limits, decode_plainly, speculate
from headrace.evaluate.drafter import Drafter
from headrace.evaluate.proposal import Proposal
from headrace.evaluate.sampling import Greedy
from headrace.evaluate.tree import draft_tree
from headrace.evaluate.verifier import Verifier
from headrace.target import Target

from .conftest import some_prompts
from .reference import greedy_chain, greedy_plain, tree_paths

STOP = frozenset({2})
STEPS, NEW = 4, 40


class Setup:
    """A loaded target and drafter with the calls that the tests make."""

    def __init__(self, target_folder: Path, draft_folder: Path) -> None:
        self.target = Target.open(str(target_folder))
        self.model = load_model(self.target, "float32", "cpu")
        self.draft = load_draft(draft_folder, self.target).model
        self.proposals: list[Proposal] = []

    def speculate(
        self,
        rows: list[list[int]],
        *,
        steps: int = STEPS,
        topk: int = 1,
        nodes: int = 0,
        stop: frozenset[int] = STOP,
    ) -> list[Answer]:
        verifier = Verifier(self.model, self.target.num_layers, self.draft.config.taps)
        rule = Greedy()
        drafting = (
            partial(draft_chain, steps=steps, rule=rule)
            if topk == 1
            else partial(draft_tree, depth=steps, topk=topk, nodes=nodes)
        )

        def recorded(drafter: Drafter) -> Proposal:
            self.proposals.append(drafting(drafter))
            return self.proposals[-1]

        self.proposals.clear()
        room = NEW + max(nodes, steps * topk) + 2
        return speculate(verifier, Drafter(self.draft), recorded, rule, rows, Limits(NEW, stop, room))

    def plain(self, rows: list[list[int]], stop: frozenset[int] = STOP) -> list[Answer]:
        return decode_plainly(
            Verifier(self.model, self.target.num_layers, ()), rows, Greedy(), Limits(NEW, stop)
        )


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path], tiny_draft: Callable[..., Path]) -> Setup:
    return Setup(tiny("llama"), tiny_draft("llama", 80))


@pytest.mark.slow
def test_batched_chain_equals_the_plain_loop_verification_by_verification(llama: Setup) -> None:
    rows = some_prompts()
    answers = llama.speculate(rows)
    for row, answer in zip(rows, answers, strict=True):
        truth = greedy_chain(
            llama.model, llama.target.num_layers, llama.draft, row, steps=STEPS, max_new=NEW, stop=STOP
        )
        assert answer.accepted == truth.accepted
        assert answer.tokens == truth.tokens
    pooled = Acceptance.count([a for x in answers for a in x.accepted], STEPS)
    assert min(pooled.reached) > 5, (
        "the drafter must be accepted at every position for this test to mean something"
    )
    assert pooled.reached[0] < pooled.verifications


def rounds(setup: Setup, answers: list[Answer]) -> Iterator[tuple[Proposal, int, int, int, int]]:
    """Every verification of the last call: proposal, place in its batch, prompt, certain tokens, accepted nodes."""
    left = [list(answer.accepted) for answer in answers]
    certain = [1] * len(answers)
    alive = [row for row, accepted in enumerate(left) if accepted]
    for proposal in setup.proposals:
        assert len(proposal.tokens) == len(alive)
        for at, row in enumerate(alive):
            accepted = left[row].pop(0)
            yield proposal, at, row, certain[row], accepted
            certain[row] += accepted + 1
        alive = [row for row in alive if left[row]]
    assert not alive


def paths_of(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """The token paths from the root to every node of one sequence."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.tokens[row].tolist(), proposal.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("topk, nodes, depth", [(2, 6, 4), (3, 12, 3), (4, 9, 5), (3, 40, 3)])
def test_tree_equals_plain_decoding_and_accepts_its_longest_agreeing_path(
    llama: Setup, topk: int, nodes: int, depth: int
) -> None:
    rows = some_prompts()
    answers = llama.speculate(rows, steps=depth, topk=topk, nodes=nodes)
    assert [a.tokens for a in answers] == [a.tokens for a in llama.plain(rows)]
    for proposal, at, row, certain, accepted in rounds(llama, answers):
        rest = answers[row].tokens[certain:]
        agreeing = [len(path) for path in paths_of(proposal, at) if list(path) == rest[: len(path)]]
        longest = max(agreeing, default=0)
        # Where the answer was cut, more may have been accepted than the answer shows.
        assert accepted == longest or accepted > len(rest) == longest


@pytest.mark.slow
@pytest.mark.parametrize("topk, nodes, depth", [(2, 6, 4), (3, 12, 3), (4, 15, 2)])
def test_trees_equal_trees_built_without_cache_or_batch(
    llama: Setup, topk: int, nodes: int, depth: int
) -> None:
    rows = some_prompts()
    answers = llama.speculate(rows, steps=depth, topk=topk, nodes=nodes)
    checked = 0
    for proposal, at, row, certain, _ in rounds(llama, answers):
        if certain > 12:
            continue
        ids = [*rows[row], *answers[row].tokens[:certain]]
        wanted = tree_paths(llama.model, llama.target.num_layers, llama.draft, ids, depth, topk, nodes)
        assert set(paths_of(proposal, at)) == wanted
        checked += 1
    assert checked > 2 * len(rows)


def test_a_tree_accepts_more_than_a_chain_of_the_same_depth(llama: Setup) -> None:
    rows = some_prompts()

    def length(answers: list[Answer]) -> float:
        return Acceptance.count([a for x in answers for a in x.accepted], STEPS).length

    assert length(llama.speculate(rows, topk=4, nodes=24)) > length(llama.speculate(rows)) + 0.05


OTHERS = ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_neox")


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_every_family_gives_what_transformers_generate_gives(
    family: str, tiny: Callable[..., Path], tiny_draft: Callable[..., Path]
) -> None:
    setup = Setup(tiny(family), tiny_draft(family))
    rows = some_prompts(5)
    truth = [greedy_plain(setup.model, row, max_new=NEW, stop=STOP) for row in rows]
    assert [a.tokens for a in setup.plain(rows)] == truth
    answers = setup.speculate(rows)
    assert [a.tokens for a in answers] == truth
    assert [a.tokens for a in setup.speculate(rows, topk=3, nodes=8)] == truth
    assert sum(sum(a.accepted) for a in answers) > 10


@pytest.mark.slow
def test_batch_size_changes_no_count(llama: Setup) -> None:
    rows = some_prompts()
    together = llama.speculate(rows)
    alone = [llama.speculate([row])[0] for row in rows]
    assert [(a.tokens, a.accepted) for a in together] == [(a.tokens, a.accepted) for a in alone]


def test_a_stop_token_inside_an_accepted_chain_ends_the_answer_there(llama: Setup) -> None:
    row = some_prompts()[2]
    free = llama.speculate([row], stop=frozenset())[0]
    # The end of a verification that accepted at least two tokens: a stop token in its middle.
    starts = torch.tensor([1, *[a + 1 for a in free.accepted]]).cumsum(0).tolist()
    round_number = next(
        i
        for i, a in enumerate(free.accepted)
        if a >= 2 and free.tokens[starts[i]] not in free.tokens[: starts[i]]
    )
    stop = free.tokens[starts[round_number]]
    answer = llama.speculate([row], stop=frozenset({stop}))[0]
    assert answer.tokens == free.tokens[: starts[round_number] + 1]
    assert answer.tokens == llama.plain([row], stop=frozenset({stop}))[0].tokens
    # The whole last verification counts, as in vLLM's and SGLang's counters.
    assert answer.accepted == free.accepted[: round_number + 1]


def test_an_answer_that_ends_at_once_verifies_nothing(llama: Setup) -> None:
    rows = some_prompts()[:3]
    first = llama.plain(rows)[1].tokens[0]
    answers = llama.speculate(rows, stop=frozenset({first}))
    assert answers[1].tokens == [first]
    assert answers[1].accepted == []


def test_plain_decoding_records_the_gap_of_every_token(llama: Setup) -> None:
    row = some_prompts()[3]
    answer = llama.plain([row])[0]
    assert len(answer.gaps) == len(answer.tokens)
    with torch.inference_mode():
        best = llama.model(torch.tensor([row])).logits[0, -1].topk(2).values
    assert answer.gaps[0] == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def test_layers_that_cannot_be_rolled_back_are_refused(llama: Setup) -> None:
    config = llama.model.config
    config.layer_types = ["linear_attention", "full_attention"]
    try:
        with pytest.raises(ConfigError, match="linear_attention"):
            Verifier(llama.model, llama.target.num_layers, ())
    finally:
        config.layer_types = None
