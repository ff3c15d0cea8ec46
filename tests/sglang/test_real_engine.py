"""The ``sglang`` engine against the real SGLang 0.5.23: the conformance suite, with overlap off and the prefix cache on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.engines import Engine, open_engine
from headrace.target import Target
from headrace.testing.engine import EngineTests, Reference, transformers_reference
from headrace.testing.servers import ServerMaker, ServerProcess
from headrace.types import FINAL

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TAPS = (2, 3, 5, FINAL)


@pytest.fixture(scope="module")
def server(make_server: ServerMaker, tiny: Callable[[str], Path]) -> Iterator[ServerProcess]:
    with make_server(
        tiny("llama"), taps="2,3,5,final", prefix_cache=True, flags=("--disable-overlap-schedule",)
    ) as running:
        yield running


class TestSglang(EngineTests):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, server: ServerProcess, tiny: Callable[[str], Path]) -> Iterator[Engine]:
        target = Target.open(str(tiny("llama")))
        spec = target.spec(list(TAPS), dtype="float32")
        with open_engine("sglang", target, spec, {"url": [server.url], "tokens_in_flight": 2000}) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, tiny: Callable[[str], Path]) -> Reference:
        return transformers_reference(tiny("llama"), TAPS)
