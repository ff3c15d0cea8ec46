"""The nouns: taps and presets, specs that refuse what is unknown, keys that follow the content."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.types import CaptureSpec, Row, parse_taps, row_key


def spec(**changes: object) -> CaptureSpec:
    fields = {
        "target": "m", "config_hash": "c", "num_layers": 36, "hidden_size": 64, "dtype": "bfloat16",
        "taps": (2, 18, 33, "final"), "norm_kind": "rms", "norm_eps": 1e-5,
    }  # fmt: skip
    return CaptureSpec(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (2, 18, 33, "final")),
        (61, (2, 30, 58, "final")),
        (32, (2, 16, 29, "final")),
        (30, (2, 15, 27, "final")),
    ],
)
def test_eagle3_preset_is_the_published_one(layers: int, taps: tuple[object, ...]) -> None:
    """As boundaries; the same tensors as "outputs of layers" [1, N//2-1, N-4] (EX-06)."""
    assert parse_taps("eagle3", layers) == taps


def test_other_presets() -> None:
    assert parse_taps("dflash", 36) == (2, 10, 18, 26, 34, "final")
    assert parse_taps("last", 36) == ("final",)
    assert parse_taps("33, 2,18,FINAL", 36) == (33, 2, 18, "final"), (
        "the order given is the order stored (EX-11)"
    )
    assert parse_taps([0, 36], 36) == (0, 36)


@pytest.mark.parametrize(
    ("value", "layers", "message"),
    [
        ("eagle3", 5, "repeat one"),  # N=5 would give [2, 2, 2]
        ("eagle3", 6, "repeat one"),  # [2, 3, 3]
        ("2,2,5", 36, "repeat one"),
        ("2,37", 36, "0..36"),
        ([True, 3], 36, "True"),
        ([-1], 36, "-1"),
        ("eagle", 36, "presets eagle3, dflash, last"),
        ([], 36, "no taps"),
        ("", 36, "presets"),
    ],
)
def test_bad_taps_name_the_fault(value: object, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_taps(value, layers)  # type: ignore[arg-type]


def test_spec_round_trips_and_refuses_strangers() -> None:
    one = spec()
    assert CaptureSpec.from_dict(one.to_dict()) == one
    with pytest.raises(ValueError, match="unknown fields \\['colour'\\]"):
        CaptureSpec.from_dict({**one.to_dict(), "colour": 1})
    lacking = one.to_dict()
    del lacking["final_normed"]
    with pytest.raises(ValueError, match="lacks \\['final_normed'\\]"):
        CaptureSpec.from_dict(lacking)


def test_every_field_but_the_path_takes_part_in_equality() -> None:
    changes = {
        "revision": "r", "config_hash": "d", "weights_hash": "w", "quantization": "fp8", "num_layers": 40, "hidden_size": 65,
        "dtype": "float16", "taps": (2, 18, 33), "final_normed": False, "norm_kind": "rms1p", "norm_eps": 1e-6,
        "tokenizer_hash": "t", "template_hash": "x",
    }  # fmt: skip
    assert set(changes) | {"target"} == {f.name for f in dataclasses.fields(CaptureSpec)}, (
        "a new field needs a line here"
    )
    for name, value in changes.items():
        assert spec(**{name: value}) != spec(), name
        assert spec().differences(spec(**{name: value}))[0].startswith(name)
    assert spec(target="elsewhere") == spec()


def test_sizes() -> None:
    assert spec().bytes_per_token == 4 * 64 * 2
    kimi = spec(num_layers=61, hidden_size=7168, taps=(3, 31, 59, "final"))
    assert kimi.bytes_per_token == 57_344
    assert round(kimi.bytes_per_token * 87_800_000 / 1e12, 2) == 5.03


def test_key_follows_the_content_and_nothing_else() -> None:
    row = Row.make([5, 6, 7], [0, 1, 1])
    assert row.key == Row.make(np.array([5, 6, 7], dtype=np.int64), [False, True, True]).key
    assert row.key != Row.make([5, 6, 8], [0, 1, 1]).key
    assert row.key != Row.make([5, 6, 7], [1, 1, 1]).key
    assert row.key == "e69931a82750f9d80a5552caeaed4ef0", (
        "stores on disk are keyed by this: it may never change"
    )
    assert row.supervised == 2 and len(row) == 3


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.data())
def test_padding_the_mask_never_collides(ids: list[int], data: st.DataObject) -> None:
    """Packed mask bits end in a partial byte: a longer row with zeros there must have another key."""
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    a = row_key(np.array(ids, dtype=np.int32), np.array(mask))
    b = row_key(np.array([*ids, 0], dtype=np.int32), np.array([*mask, False]))
    assert a != b


def test_rows_refuse_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="equal, non-empty"):
        Row.make([1, 2], [1])
    with pytest.raises(ValueError, match="equal, non-empty"):
        Row.make([], [])
