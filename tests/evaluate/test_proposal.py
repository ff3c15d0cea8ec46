"""Trees as tensors: ancestors, and the walk along the target's choices, against plain recursion over random trees."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.evaluate.proposal import Proposal, walk
from headrace.evaluate.slots import additive, causal, tree, within_window


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents (places) and tokens of a tree whose siblings differ."""
    count = draw(st.integers(0, 9))
    parents = [draw(st.integers(0, i)) for i in range(count)]
    tokens: list[int] = []
    for i, parent in enumerate(parents):
        taken = {tokens[j] for j in range(i) if parents[j] == parent}
        tokens.append(draw(st.integers(0, 12).filter(lambda t, taken=taken: t not in taken)))
    return parents, tokens


def proposal_of(parents: list[int], tokens: list[int]) -> Proposal:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == 0 else depths[parent - 1] + 1)
    return Proposal(
        torch.tensor([tokens]).long(), torch.tensor([parents]).long(), torch.tensor([depths]).long()
    )


@settings(deadline=None)
@given(trees())
def test_ancestors_are_the_path_to_the_root(case: tuple[list[int], list[int]]) -> None:
    parents, tokens = case
    seen = proposal_of(parents, tokens).ancestors()[0]
    for place in range(len(parents) + 1):
        path, at = {place}, place
        while at:
            at = parents[at - 1]
            path.add(at)
        assert set(seen[place].nonzero()[:, 0].tolist()) == path


@settings(max_examples=200, deadline=None)
@given(trees(), st.data())
def test_walk_follows_the_choices_as_far_as_nodes_agree(
    case: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    parents, tokens = case
    choices = [data.draw(st.integers(0, 12)) for _ in range(len(parents) + 1)]
    at, path, new = 0, [0], []
    while True:
        new.append(choices[at])
        children = [i + 1 for i, p in enumerate(parents) if p == at and tokens[i] == choices[at]]
        if not children:
            break
        at = children[0]
        path.append(at)
    verdict = walk(proposal_of(parents, tokens), torch.tensor([choices]))
    count = int(verdict.counts[0])
    assert verdict.path[0, :count].tolist() == path
    assert verdict.tokens[0, :count].tolist() == new


def test_a_chain_is_a_tree_with_one_child_each() -> None:
    chain = Proposal.chain(torch.tensor([[5, 6, 7]]))
    assert chain.parents.tolist() == [[0, 1, 2]]
    assert chain.depths.tolist() == [[1, 2, 3]]
    assert torch.equal(chain.ancestors()[0], torch.ones(4, 4).tril().bool())


def test_masks_show_committed_slots_and_ancestors_only() -> None:
    assert causal(torch.tensor([[9, 9, 0, 1]]), 2, junk=9).tolist() == [[[1, 0], [1, 0], [1, 0], [1, 1]]]
    ancestors = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [0, 0, 1]]]).bool()
    seen = tree(torch.tensor([2, 1]), ancestors, 5).long().tolist()
    assert seen[0] == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert seen[1] == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0]]
    windowed = within_window(
        torch.ones(1, 1, 4).bool(), torch.tensor([[3]]), torch.tensor([[0, 1, 2, 3]]), window=2
    )
    assert windowed.tolist() == [[[False, False, True, True]]]
    assert torch.isfinite(additive(torch.zeros(1, 1, 3).bool(), torch.bfloat16)).all()
