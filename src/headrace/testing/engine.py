"""The conformance suite of the engine contract: subclass :class:`EngineTests`, say how to open your engine, and run pytest.

    class TestMyEngine(EngineTests):
        @pytest.fixture(scope="class")
        @classmethod
        def engine(cls): ...           # yield an open Engine
        @pytest.fixture(scope="class")
        @classmethod
        def reference(cls): ...        # row -> [taps, tokens, hidden] float32, the truth

Every test sends many rows at once: lengths that differ, lengths that are equal, shared prefixes, one-token rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.engines.base import Engine
from headrace.types import FINAL, Capture, Failure, Row, Tap

Reference = Callable[[Row], torch.Tensor]


def mixed_rows(count: int = 24, longest: int = 120, vocab: int = 400, seed: int = 0) -> list[Row]:
    """Distinct rows in random order: 1 to ``longest`` tokens, many of equal length, half of them sharing a prefix."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(3, vocab, size=longest)
    lengths = [1, 2, 3, 8, 8, 8, 33, longest, longest]
    lengths += [int(n) for n in rng.integers(1, longest + 1, size=max(0, count - len(lengths)))]
    rows: dict[str, Row] = {}
    for index, length in enumerate(lengths[:count]):
        ids = rng.integers(3, vocab, size=length)
        if index % 2:
            shared = length // 2
            ids[:shared] = prefix[:shared]
        row = Row.make(ids, rng.random(length) < 0.5)
        rows[row.key] = row
    return list(rows.values())


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative error over (tap, token): |got - want| / |want|, each over the hidden axis, in float32."""
    got, want = got.float(), want.float()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-12)).max())


def transformers_reference(folder: Path, taps: tuple[Tap, ...]) -> Reference:
    """Row → [taps, tokens, hidden] float32 from transformers' own ``output_hidden_states``, independent of our engines.

    transformers gives boundaries below N and the final state; boundary N is not among them.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known: dict[str, torch.Tensor] = {}

    def states(row: Row) -> torch.Tensor:
        if row.key not in known:
            ids = torch.from_numpy(row.ids.astype(np.int64))[None]
            with torch.inference_mode():
                hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
            known[row.key] = torch.stack([hidden[-1 if tap == FINAL else int(tap)][0] for tap in taps])
        return known[row.key]

    return states


class EngineTests:
    """What every engine must do. Override ``tolerance`` with the relative error your dtype allows."""

    tolerance = 1e-5
    rows_in_flight = 24
    longest = 120
    vocab = 400

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        """An open engine of the class under test."""
        raise NotImplementedError("override the fixture `engine`")

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Reference:
        """The true states of a row."""
        raise NotImplementedError("override the fixture `reference`")

    def rows(self, seed: int = 0) -> list[Row]:
        """The rows a test sends."""
        return mixed_rows(self.rows_in_flight, self.longest, self.vocab, seed)

    def captures(self, engine: Engine, rows: list[Row]) -> dict[str, Capture]:
        """Capture ``rows`` and insist on exactly one capture each."""
        results = list(engine.capture(iter(rows)))
        failures = [r for r in results if isinstance(r, Failure)]
        assert not failures, failures[:3]
        counts = Counter(r.key for r in results)
        assert counts == Counter(row.key for row in rows), "not exactly one result a row"
        return {r.key: r for r in results if isinstance(r, Capture)}

    def test_declares_itself(self, engine: Engine) -> None:
        assert engine.info.name and engine.info.version
        assert engine.info.tokens_in_flight >= 1
        assert engine.spec.taps

    def test_preflight_passes(self, engine: Engine) -> None:
        assert [c for c in engine.preflight() if not c.ok] == []

    def test_shapes_ids_and_dtype(self, engine: Engine) -> None:
        rows = self.rows(seed=1)
        captures = self.captures(engine, rows)
        for row in rows:
            capture = captures[row.key]
            assert capture.ids.dtype == np.int32
            np.testing.assert_array_equal(capture.ids, row.ids)
            assert tuple(capture.states.shape) == (len(engine.spec.taps), len(row), engine.spec.hidden_size)
            assert capture.states.dtype == getattr(torch, engine.spec.dtype)
            assert capture.states.device.type == "cpu"
            assert torch.isfinite(capture.states.float()).all()

    def test_every_value_against_the_reference(self, engine: Engine, reference: Reference) -> None:
        rows = self.rows(seed=2)
        captures = self.captures(engine, rows)
        worst = {row.key: row_error(captures[row.key].states, reference(row)) for row in rows}
        assert max(worst.values()) <= self.tolerance, sorted(worst.values())[-3:]

    def test_taps_are_distinct(self, engine: Engine) -> None:
        row = max(self.rows(seed=3), key=len)
        states = self.captures(engine, [row])[row.key].states.float()
        for i in range(len(states)):
            for j in range(i):
                assert row_error(states[i], states[j]) > 10 * self.tolerance, (
                    f"taps {i} and {j} are the same tensor"
                )

    def test_same_rows_twice(self, engine: Engine, reference: Reference) -> None:
        """The second pass meets whatever the engine cached of the first."""
        rows = self.rows(seed=4)[:8]
        first = self.captures(engine, rows)
        second = self.captures(engine, list(reversed(rows)))
        for row in rows:
            assert row_error(second[row.key].states, first[row.key].states) <= 2 * self.tolerance
            assert row_error(second[row.key].states, reference(row)) <= self.tolerance

    def test_captures_own_their_memory(self, engine: Engine) -> None:
        rows = self.rows(seed=5)
        seen: list[tuple[Capture, torch.Tensor]] = []
        for result in engine.capture(iter(rows)):
            assert isinstance(result, Capture)
            seen.append((result, result.states.clone()))
        assert all(torch.equal(capture.states, copy) for capture, copy in seen)

    def test_pulls_lazily_and_closes_early(self, engine: Engine) -> None:
        """An endless supply of rows is not drained, and closing the iterator stops the pulling."""
        pulled = 0

        def endless() -> Iterator[Row]:
            nonlocal pulled
            seed = 0
            while True:
                for row in mixed_rows(16, self.longest, self.vocab, 1000 + seed):
                    pulled += len(row)
                    yield row
                seed += 1

        results = engine.capture(endless())
        assert isinstance(next(results), Capture)
        results.close()  # type: ignore[attr-defined]
        time.sleep(0.2)
        after = pulled
        time.sleep(0.3)
        assert pulled == after, "rows are still pulled after close"
        assert pulled <= 3 * engine.info.tokens_in_flight + 20 * self.longest

    def test_usable_again_after_close(self, engine: Engine, reference: Reference) -> None:
        row = self.rows(seed=6)[3]
        assert row_error(self.captures(engine, [row])[row.key].states, reference(row)) <= self.tolerance

    def test_no_rows(self, engine: Engine) -> None:
        assert list(engine.capture(iter([]))) == []
