"""An engine that misbehaves on purpose: fingerprint states, spoiled where a script says so. For tests of what stands above engines."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from headrace.engines.fake import FingerprintEngine, FingerprintOptions
from headrace.errors import EngineUnavailableError
from headrace.types import Capture, CaptureSpec, Failure, Row

Script = Callable[[str], str]
"""key → name of the fault for this answer, ``""`` for none; asked once an answer, so it may change its mind."""


class FaultyEngine(FingerprintEngine):
    """A :class:`FingerprintEngine` whose answers pass through a script of faults (names in :data:`SPOILERS` and below).

    ``late``: given after all others. ``missing``: never given. ``twice``: given twice. ``stray``: followed by an answer
    to a row nobody sent. ``die``: the engine is gone, with everything it held. ``hang``: nothing more is answered.
    """

    def __init__(self, spec: CaptureSpec, script: Script, options: FingerprintOptions | None = None) -> None:
        super().__init__(spec, options or FingerprintOptions.model_validate({}))
        self.script = script
        self.injected: dict[str, int] = {}
        """fault → times injected."""

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        """See :class:`FaultyEngine`."""
        late: list[Capture] = []
        for answer in super().capture(rows):
            assert isinstance(answer, Capture)
            fault = self.script(answer.key)
            if not fault:
                yield answer
                continue
            self.injected[fault] = self.injected.get(fault, 0) + 1
            if fault == "late":
                late.append(answer)
            elif fault == "hang":
                time.sleep(3600)
            elif fault == "die":
                raise EngineUnavailableError("the engine is gone (on purpose)")
            elif fault != "missing":
                yield from self._spoiled(answer, fault)
        yield from late

    def _spoiled(self, answer: Capture, fault: str) -> Iterator[Capture | Failure]:
        if fault == "twice":
            yield answer
            yield replace(answer, states=answer.states.clone())
        elif fault == "stray":
            yield answer
            yield replace(answer, key="0" * 32)
        elif fault == "fail":
            yield Failure(answer.key, "engine_error", "the engine answered 500 (on purpose)")
        elif fault == "refuse":
            yield Failure(
                answer.key, "too_long", "the engine cannot take this row (on purpose)", retryable=False
            )
        else:
            yield SPOILERS[fault](answer)


def _with_value(value: float) -> Callable[[Capture], Capture]:
    def spoil(capture: Capture) -> Capture:
        states = capture.states.clone()
        states[-1, len(capture.ids) // 2, 1] = value
        return replace(capture, states=states)

    return spoil


def _zero_row(capture: Capture) -> Capture:
    states = capture.states.clone()
    states[0, -1] = 0
    return replace(capture, states=states)


def _wrong_id(capture: Capture) -> Capture:
    ids = capture.ids.copy()
    ids[len(ids) // 2] += 1
    return replace(capture, ids=ids)


def _other_row(capture: Capture) -> Capture:
    """The answer to some other request under this row's name."""
    return replace(
        capture, ids=np.flip(capture.ids + 1).astype(np.int32), states=torch.flip(capture.states, dims=(1,))
    )


SPOILERS: dict[str, Callable[[Capture], Capture]] = {
    "nan": _with_value(float("nan")),
    "infinity": _with_value(float("inf")),
    "zero_row": _zero_row,
    "one_row_too_few": lambda c: replace(c, states=c.states[:, :-1].clone()),
    "one_row_too_many": lambda c: replace(c, states=torch.cat([c.states, c.states[:, -1:]], dim=1)),
    "one_tap_too_few": lambda c: replace(c, states=c.states[:-1].clone()),
    "wrong_id": _wrong_id,
    "wrong_request": _other_row,
    "bos_added": lambda c: replace(c, ids=np.concatenate([[1], c.ids]).astype(np.int32)),
    "wrong_dtype": lambda c: replace(c, states=c.states.double()),
}
"""Faults that change one answer."""


def random_script(faults: dict[str, float], seed: int) -> Script:
    """A script that injects each fault with its probability, reproducibly."""
    rng = random.Random(seed)
    names, weights = list(faults), list(faults.values())
    nothing = max(0.0, 1.0 - sum(weights))

    def script(key: str) -> str:
        return rng.choices([*names, ""], [*weights, nothing])[0]

    return script


def first_try_script(faults: dict[str, str]) -> Script:
    """A script that spoils the first answer to each key in ``faults`` and no later one."""
    left = dict(faults)

    def script(key: str) -> str:
        return left.pop(key, "")

    return script
