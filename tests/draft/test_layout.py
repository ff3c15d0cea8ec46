"""Which rows are drafted from, and what each step reads and predicts, against a loop that drafts as serving does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.draft.layout import Layout, make_layout


def pairs(layout: Layout, ids: np.ndarray, steps: int) -> set[tuple[int, int, int, int]]:
    """(start row, step, token read, token predicted) of everything that counts."""
    out = set()
    for step in range(steps):
        read = layout.chain_rows(step)
        for m in range(len(layout.starts)):
            if int(layout.room[m]) > step:
                label_row = int(layout.label_rows[m + step])
                out.add((int(layout.starts[m]), step, int(ids[int(read[m])]), int(ids[label_row + 1])))
    return out


def served(
    lengths: list[int], mask: np.ndarray, ids: np.ndarray, steps: int
) -> set[tuple[int, int, int, int]]:
    """The same by drafting: after each token the target wrote, a chain runs as long as the target's text does."""
    out, begin = set(), 0
    for length in lengths:
        for p in range(length):
            for step in range(steps):
                last = p + 2 + step
                if last >= length or not mask[begin + p + 1 : begin + last + 1].all():
                    break
                out.add((begin + p, step, int(ids[begin + p + 1 + step]), int(ids[begin + last])))
        begin += length
    return out


def test_tr01_base_conversation() -> None:
    """BASE of the toy tokenizer: 15 ids, supervised 10-13. Serving visits rows 9, 10, 11; row 9 reads "y", predicts "e"."""
    ids = np.array(list("\x01u\nhi\x02\n\x01a\nyes\x02\n"))
    assert len(ids) == 15
    codes = np.array([ord(c) for c in ids])
    mask = np.zeros(15, dtype=bool)
    mask[10:14] = True
    layout = make_layout([15], mask)
    assert layout.starts.tolist() == [9, 10, 11]
    assert layout.room.tolist() == [3, 2, 1]
    first = {(p, chr(a), chr(b)) for p, s, a, b in pairs(layout, codes, 1)}
    assert first == {(9, "y", "e"), (10, "e", "s"), (11, "s", "\x02")}


def test_tr01_two_assistant_turns() -> None:
    """hi/yes/hi/no: pairs of both turns and none across them."""
    text = "\x01u\nhi\x02\n\x01a\nyes\x02\n\x01u\nhi\x02\n\x01a\nno\x02\n"
    codes = np.array([ord(c) for c in text])
    mask = np.zeros(len(text), dtype=bool)
    for answer in ("yes\x02", "no\x02"):
        at = text.index(answer)
        mask[at : at + len(answer)] = True
    layout = make_layout([len(text)], mask)
    found = pairs(layout, codes, 3)
    assert found == served([len(text)], mask, codes, 3)
    assert [(s, chr(a), chr(b)) for _, s, a, b in sorted(found)] == [
        (0, "y", "e"), (1, "e", "s"), (2, "s", "\x02"), (0, "e", "s"), (1, "s", "\x02"), (0, "s", "\x02"),
        (0, "n", "o"), (1, "o", "\x02"), (0, "o", "\x02"),
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_pack_equals_drafting(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    total = sum(lengths)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=total, max_size=total)))
    rows = data.draw(st.sampled_from([0, total + 3]))
    multiple = data.draw(st.sampled_from([0, 4]))
    ids = np.arange(100, 100 + total)
    layout = make_layout(lengths, mask, rows=rows, starts_multiple=multiple)
    padded = np.concatenate([ids, np.full(max(0, rows - total), -1)])
    assert pairs(layout, padded, 4) == served(lengths, mask, ids, 4)
    assert (np.diff(layout.starts.numpy()) >= 0).all()
    if multiple:
        assert len(layout.starts) % multiple == 0


def test_tr18_documents_do_not_touch() -> None:
    """A(6)+B(5): positions restart, no chain or label crosses the border, and each document's first-step input is its own."""
    mask = np.ones(11, dtype=bool)
    layout = make_layout([6, 5], mask)
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert layout.starts.tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert layout.room.tolist() == [4, 3, 2, 1, 3, 2, 1]
    assert layout.next_rows.tolist() == [1, 2, 3, 4, 5, 5, 7, 8, 9, 10, 10]


def test_everywhere_ignores_the_mask() -> None:
    layout = make_layout([5], np.zeros(5, dtype=bool), everywhere=True)
    assert layout.starts.tolist() == [0, 1, 2]


def test_lengths_and_mask_must_agree() -> None:
    with pytest.raises(ValueError, match="mask has"):
        make_layout([4], np.ones(5, dtype=bool))
