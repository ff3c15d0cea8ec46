"""The fingerprint engine keeps the contract, and its states tell every kind of mix-up apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.engines import Engine, open_engine
from headrace.engines.fake import fingerprint
from headrace.target import Target
from headrace.testing.engine import EngineTests, Reference
from headrace.types import Row


class TestFake(EngineTests):
    tolerance = 0.0
    vocab = 70000

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, config_only: Path) -> Iterator[Engine]:
        target = Target.open(str(config_only))
        with open_engine("fake", target, target.spec("2,4,5,8,final"), {"tokens_in_flight": 2000}) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, engine: Engine) -> Reference:
        return lambda row: fingerprint(row.ids, engine.spec).float()


def test_fingerprint_values(config_only: Path) -> None:
    """One value written out by hand: token 66051 = 1*65536 + 2*256 + 3 at row 258 of boundary 5."""
    spec = Target.open(str(config_only)).spec("5,final")
    ids = np.zeros(300, dtype=np.int32)
    ids[258] = 66051
    states = fingerprint(ids, spec)
    assert states.dtype == torch.bfloat16
    assert states[0, 258, :8].tolist() == [3, 2, 2, 1, 5, 1, 1, 0]
    assert states[1, 258, 4].item() == 255


def test_shuffles_its_answers(config_only: Path) -> None:
    target = Target.open(str(config_only))
    rows = [Row.make([i + 1, 7], [0, 1]) for i in range(50)]
    with open_engine("fake", target, target.spec("last")) as engine:
        order = [r.key for r in engine.capture(iter(rows))]
    assert order != [r.key for r in rows] and sorted(order) == sorted(r.key for r in rows)
