"""Every attention path gives the same numbers and gradients, sees what it should, and never what it should not."""

from __future__ import annotations

import pytest
import torch

from headrace.draft import attention
from headrace.draft.attention import block_mask
from headrace.draft.layout import Layout
from headrace.draft.shape import DraftConfig
from headrace.draft.ttt import Pack, Unroll

from .toys import toy_config, toy_draft, toy_pack

MASKS = [[False] * 3 + [True] * 150, [True] * 60 + [False] * 20 + [True] * 40, [False] * 4, [True] * 30]


def long_pack(dtype: torch.dtype = torch.float32) -> Pack:
    return toy_pack(toy_config(), MASKS, dtype=dtype, rows=384, starts_multiple=128)


def dense_states(pack: Pack, steps: int) -> torch.Tensor:
    """The chains by one dense softmax over all step-0 rows and all chains' own rows, with the mask of the definition."""
    model = toy_draft(toy_config())

    class Dense:
        def __init__(self, layout: Layout) -> None:
            row = layout.starts[:, None]
            column = torch.arange(layout.tokens)[None]
            self.prefix = (layout.document[row] == layout.document[column]) & (column <= row)

        def __call__(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            own: attention.Own | None,
        ) -> torch.Tensor:
            allowed, count = [self.prefix], len(q)
            for j in range(0 if own is None else int(own.filled.sum())):
                assert own is not None
                k, v = torch.cat([k, own.keys[:, j]]), torch.cat([v, own.values[:, j]])
                allowed.append(torch.eye(count, dtype=torch.bool))
            groups = q.shape[1] // k.shape[1]
            scores = torch.einsum("mad,nad->amn", q, k.repeat_interleave(groups, 1)) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~torch.cat(allowed, 1), float("-inf")).softmax(-1)
            return torch.einsum("amn,nad->mad", weights, v.repeat_interleave(groups, 1))

    unroll = Unroll(model)
    original = attention.EagerAttend
    try:
        attention.EagerAttend = Dense  # type: ignore[misc, assignment]
        states: torch.Tensor = unroll(pack, steps)
    finally:
        attention.EagerAttend = original  # type: ignore[misc]
    return states


def gradients(
    pack: Pack, kind: str, steps: int = 3, config: DraftConfig | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = toy_draft(config or toy_config())
    states = Unroll(model, attention=kind)(pack, steps)
    counted = (pack.layout.room > 0)[None, :, None]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
    (states * counted * weights).sum().backward()
    return (states * counted).detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_eager_agrees_with_a_dense_mask() -> None:
    """TR-02: within 1e-4 (here 1e-5)."""
    pack = long_pack()
    counted = (pack.layout.room > 0)[None, :, None]
    states, _ = gradients(pack, "eager")
    torch.testing.assert_close(states, dense_states(pack, 3) * counted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_agrees_with_a_dense_mask() -> None:
    """TR-03: within 1e-4, cosine above 0.9999. On the CPU torch runs flex forward only and uncompiled; the rest is below."""
    pack = long_pack()
    counted = (pack.layout.room > 0)[None, :, None]
    expected = dense_states(pack, 3) * counted
    with torch.no_grad():
        model = toy_draft(toy_config()).requires_grad_(False)
        states = Unroll(model, attention="flex")(pack, 3) * counted
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
    assert torch.cosine_similarity(states.flatten(), expected.flatten(), dim=0) > 0.9999


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_gradients_agree_with_eager(compiled: bool) -> None:
    """States and every gradient of the flex path on CUDA against the eager path on the CPU, within 1e-4 of their size."""
    pack, config = long_pack(), toy_config(head_dim=16)  # compiled flex_attention has no smaller heads
    states, reference = gradients(pack, "eager", config=config)
    model = toy_draft(config).cuda()
    on_gpu = (
        Unroll(model, attention="flex", compiled=compiled)(pack.to("cuda"), 3)
        * (pack.layout.room > 0)[None, :, None].cuda()
    )
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
    (on_gpu * weights.cuda()).sum().backward()
    torch.testing.assert_close(on_gpu.detach().cpu(), states, rtol=1e-4, atol=1e-4)
    grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    for mine, other in zip(grads, reference, strict=True):
        assert (mine - other).norm() <= 1e-4 * max(1.0, float(other.norm()))


def test_merge_and_its_gradient_equal_one_softmax() -> None:
    """Joining own rows by log-sum-exp is the softmax over both, and differentiates like it (float64)."""
    torch.manual_seed(0)
    shapes = [(6, 4, 8), (9, 2, 8), (9, 2, 8), (6, 3, 2, 8), (6, 3, 2, 8)]
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def scores_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("mad,nad->man", q, k.repeat_interleave(2, 1)) * 8**-0.5

    def merged(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ok: torch.Tensor, ov: torch.Tensor
    ) -> torch.Tensor:
        scores = scores_of(q, k)
        out = torch.einsum("man,nad->mad", scores.softmax(-1), v.repeat_interleave(2, 1))
        return attention.merge(
            out, scores.logsumexp(-1), q, attention.Own(ok, ov, torch.ones(3, dtype=torch.bool))
        )

    def together(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ok: torch.Tensor, ov: torch.Tensor
    ) -> torch.Tensor:
        own = torch.einsum("mad,mjad->maj", q, ok.repeat_interleave(2, 2)) * 8**-0.5
        weights = torch.cat([scores_of(q, k), own], -1).softmax(-1)
        prefix = torch.einsum("man,nad->mad", weights[..., :9], v.repeat_interleave(2, 1))
        return prefix + torch.einsum("maj,mjad->mad", weights[..., 9:], ov.repeat_interleave(2, 2))

    torch.testing.assert_close(merged(*leaves), together(*leaves))
    mine = torch.autograd.grad(merged(*leaves).square().sum(), leaves)
    other = torch.autograd.grad(together(*leaves).square().sum(), leaves)
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)


def test_eager_blocks_and_recomputation_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small query blocks, and the recomputing path of long documents, give the same states and gradients."""
    pack = long_pack()
    states, grads = gradients(pack, "eager")
    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)  # documents over 64 rows now recompute
    again, regrads = gradients(pack, "eager")
    torch.testing.assert_close(again, states, rtol=1e-5, atol=1e-6)
    for mine, other in zip(regrads, grads, strict=True):
        # Of the whole tensor: single entries near zero differ by more, as a processor's order of summation has it.
        assert float((mine - other).norm()) < 1e-5 * float(other.norm())


def test_no_gradient_from_the_future_or_another_document() -> None:
    """TR-03, TR-18: a chain's output does not move with a later row's taps or another document's, not even a little."""
    config = toy_config()
    pack = long_pack()
    taps = pack.taps.clone().requires_grad_(True)
    states = Unroll(toy_draft(config))(Pack(pack.ids, taps, pack.final, pack.layout), 3)
    chain = 200  # in the second document
    start = int(pack.layout.starts[chain])
    states[:, chain].sum().backward()
    assert taps.grad is not None
    touched = taps.grad.abs().sum(-1) > 0
    begin = len(MASKS[0])
    assert touched[begin : start + 1].all()
    assert not touched[start + 1 :].any() and not touched[:begin].any()


def test_changing_one_document_leaves_the_other_bitwise() -> None:
    """TR-18: pack A + B; other tokens and states in A leave B's outputs exactly equal."""
    config = toy_config()
    model = toy_draft(config)
    pack = toy_pack(config, [[True] * 6, [True] * 5])
    ids, taps = pack.ids.clone(), pack.taps.clone()
    ids[:6], taps[:6] = (ids[:6] + 1) % config.vocab_size, taps[:6] * 2
    changed = Pack(ids, taps, pack.final, pack.layout)
    with torch.no_grad():
        before, after = Unroll(model)(pack, 3), Unroll(model)(changed, 3)
    in_b = pack.layout.starts >= 6
    assert torch.equal(before[:, in_b], after[:, in_b])
    assert not torch.equal(before[:, ~in_b], after[:, ~in_b])


def test_block_mask_holds_every_visible_pair() -> None:
    """The block-level construction against the pair-by-pair definition: nothing visible is skipped, 'full' blocks are full."""
    pack = long_pack()
    mask = block_mask(pack.layout)
    layout, size = pack.layout, attention.FLEX_BLOCK
    row, column = layout.starts[:, None], torch.arange(layout.tokens)[None]
    visible = (layout.document[row] == layout.document[column]) & (column <= row)
    blocks = visible.view(len(layout.starts) // size, size, -1, size)
    some, every = blocks.any(3).any(1), blocks.all(3).all(1)
    for q in range(some.shape[0]):
        full = set(mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist())
        partial = set(mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist())
        assert not full & partial
        assert set(some[q].nonzero()[:, 0].tolist()) <= full | partial
        assert full <= set(every[q].nonzero()[:, 0].tolist())
    assert mask.full_kv_num_blocks.sum() == 0 or every.any()


@pytest.mark.slow
def test_compiled_pieces_agree_with_eager() -> None:
    """torch.compile of everything around attention changes no number beyond rounding."""
    pack = long_pack()
    states, reference = gradients(pack, "eager", steps=2)
    model = toy_draft(toy_config())
    compiled = Unroll(model, compiled=True)(pack, 2) * (pack.layout.room > 0)[None, :, None]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
    (compiled * weights).sum().backward()
    torch.testing.assert_close(compiled.detach(), states, rtol=1e-4, atol=1e-5)
    for mine, other in zip(
        [p.grad for p in model.parameters() if p.grad is not None], reference, strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
