"""The real SGLang with other families, in parallel, and in an older release: every row of every tap against transformers.

One server start a line; each also sends what its line is about: equal lengths, shared beginnings, prompts over many chunks.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from headrace.engines import open_engine
from headrace.engines.sglang.server import generate_request
from headrace.sglang_plugin.protocol import Reply, Wish
from headrace.target import Target
from headrace.testing.engine import mixed_rows, row_error, transformers_reference
from headrace.testing.kimi import make_tiny_kimi
from headrace.testing.servers import ServerMaker, ServerProcess
from headrace.types import FINAL, Capture, Tap

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
TOLERANCE = 1e-5
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@dataclass(frozen=True)
class Case:
    """A server to start."""

    name: str
    family: str
    taps: tuple[Tap, ...]
    flags: tuple[str, ...] = ()
    release: str = "0.5.23"
    ranks: int = 1
    writers: int = 1


CASES = [
    # Two replicas: their files must not collide, and both must be used.
    Case("qwen3, DP 2", "qwen3", (1, 3, 5, FINAL), ("--dp-size=2",), ranks=2, writers=2),
    # Two tensor-parallel ranks: one of them writes.
    Case(
        "qwen3_moe, TP 2", "qwen3_moe", (FINAL, 4, 2), ("--tp-size=2", "--disable-custom-all-reduce"), ranks=2
    ),
    # MLA, and boundary 2 as the first one, where DeepSeek's EAGLE3 naming would shift all others.
    Case("deepseek_v3", "deepseek_v3", (2, 3, 5, FINAL), ("--enable-mixed-chunk",)),
    # The same language model inside a multimodal class. Text only: the published image processor is code of its own.
    Case(
        "kimi_k25",
        "kimi_k25",
        (2, 3, 5, FINAL),
        ('--json-model-override-args={"language_model_only": true}',),
    ),
    # The hooks of older releases, with chunks mixed with decodes.
    Case("qwen3, 0.5.20", "qwen3", (1, 3, 5, FINAL), ("--enable-mixed-chunk",), release="0.5.20"),
    # The final state alone needs no capture of layers, and takes the hooks in every release.
    Case("llama, final alone", "llama", (FINAL,), ("--disable-overlap-schedule",)),
]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> tuple[Path, Path]:
    return make_tiny_kimi(tmp_path_factory.mktemp("kimi"), tokenizer=smollm2)


class Starter:
    """Starts a case's server, and the next one's ahead: one imports while the other is tested."""

    def __init__(self, make: Callable[[Case], ServerProcess], cases: list[Case]) -> None:
        self._make = make
        self._cases = cases
        self._started: dict[str, ServerProcess] = {}

    def get(self, case: Case) -> ServerProcess:
        """The healthy server of ``case``."""
        server = self._start(case).wait_healthy()
        following = self._cases[self._cases.index(case) + 1 :]
        if following:
            self._start(following[0])
        return server

    def _start(self, case: Case) -> ServerProcess:
        if case.name not in self._started:
            self._started[case.name] = self._make(case).start()
        return self._started[case.name]


@pytest.fixture(scope="module")
def starter(
    request: pytest.FixtureRequest,
    make_server: ServerMaker,
    tiny: Callable[[str], Path],
    kimi: tuple[Path, Path],
) -> Starter:
    def make(case: Case) -> ServerProcess:
        model = kimi[0] if case.family == "kimi_k25" else tiny(case.family)
        taps = ",".join(map(str, case.taps))
        env = TWO_RANKS if case.ranks > 1 else {}
        return make_server(model, taps=taps, release=case.release, flags=case.flags, env=env)

    selected = {
        item.callspec.params["case"].name for item in request.session.items if item.path == request.path
    }
    return Starter(make, [case for case in CASES if case.name in selected])


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(
    request: pytest.FixtureRequest, starter: Starter, tiny: Callable[[str], Path], kimi: tuple[Path, Path]
) -> Iterator[tuple[Case, ServerProcess, Path, Path]]:
    """The case, its running server, the model it serves and the one transformers runs."""
    case: Case = request.param
    model, truth = kimi if case.family == "kimi_k25" else (tiny(case.family),) * 2
    server = starter.get(case)
    yield case, server, model, truth
    server.stop()


def test_every_row_of_every_tap(case: tuple[Case, ServerProcess, Path, Path]) -> None:
    """Forty rows at once, taps in the order asked."""
    what, server, model, truth = case
    target = Target.open(str(model))
    spec = target.spec(list(what.taps), dtype="float32")
    reference = transformers_reference(truth, what.taps)
    rows = mixed_rows(40, longest=200, vocab=40_000, seed=11)
    with open_engine("sglang", target, spec, {"url": [server.url], "tokens_in_flight": 1500}) as engine:
        assert engine.info.version == what.release
        results = list(engine.capture(iter(rows)))
    assert sorted(result.key for result in results) == sorted(row.key for row in rows)
    by_key = {row.key: row for row in rows}
    for result in results:
        assert isinstance(result, Capture), result
        want = reference(by_key[result.key])
        for place, tap in enumerate(what.taps):
            assert row_error(result.states[place], want[place]) <= TOLERANCE, (tap, len(by_key[result.key]))


def test_one_writer_a_replica(case: tuple[Case, ServerProcess, Path, Path]) -> None:
    """EX-27: one folder for each data-parallel replica, none for the other tensor-parallel ranks; every replica is used."""
    what, server, _, _ = case

    async def facts() -> list[Reply]:
        async with httpx.AsyncClient(timeout=120) as client:
            bodies = [generate_request([5, 6, 7], uuid.uuid4().hex, Wish(owner="test")) for _ in range(6)]
            answers = await asyncio.gather(
                *(client.post(f"{server.url}/generate", json=body) for body in bodies)
            )
            return [Reply.from_meta(answer.json()["meta_info"]) for answer in answers]

    replies = asyncio.run(facts())
    folders = [path.name for path in Path(replies[0].facts.staging).iterdir() if path.name != "clients"]
    assert len(folders) == what.writers
    assert {f"{reply.facts.run}.{reply.facts.rank}" for reply in replies} == set(folders)
    assert all(reply.facts.staging_bytes == (256 << 20) // what.writers for reply in replies)
