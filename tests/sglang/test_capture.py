"""The capturer against a scheduler of our own that does everything SGLang's may: chunks, mixes, retracts, aborts, reuses buffers.

States are fingerprints: row ``r`` of boundary ``b`` of a prompt says its token, its position and its boundary, so one equality
proves request, row, order and layer. What the real SGLang does is tested in test_real_*.py.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.sglang_plugin.capture import Capturer, ForwardStates, Segment
from headrace.sglang_plugin.protocol import Facts, Reply, Wish
from headrace.sglang_plugin.stagedfile import read_staged
from headrace.sglang_plugin.staging import Staging
from headrace.types import FINAL, Tap

TAPS: tuple[Tap, ...] = (2, 5, 9, FINAL)
HIDDEN = 8


def fingerprint(ids: list[int], start: int, tap: Tap) -> torch.Tensor:
    """[rows, 8] bfloat16; all numbers below 256, so exact."""
    number = 255 if tap == FINAL else int(tap)
    rows = [[i % 256, i // 256, p % 256, p // 256, number, 0, 0, 0] for p, i in enumerate(ids, start)]
    return torch.tensor(rows, dtype=torch.bfloat16).reshape(len(ids), HIDDEN)


@dataclass(eq=False)
class Req:
    """What the capturer knows of an engine's request: an identity."""

    rid: str
    ids: list[int]
    wish: Any
    output: list[int] = field(default_factory=list)
    done: int = 0
    """Tokens prefilled since it last started."""

    @property
    def total(self) -> int:
        return len(self.ids) + len(self.output)


@dataclass
class Engine:
    """Forwards of a made-up scheduler, with one static buffer that the next forward overwrites."""

    capturer: Capturer
    buffer: torch.Tensor = field(default_factory=lambda: torch.zeros(4, 4096, HIDDEN, dtype=torch.bfloat16))

    def forward(self, parts: list[tuple[Req, int, int]], *, extra_rows: int = 0) -> None:
        """One forward of (request, first position, rows)."""
        ids = [i for req, start, rows in parts for i in (req.ids + req.output)[start : start + rows]]
        for place, tap in enumerate(TAPS):
            at = 0
            for req, start, rows in parts:
                tokens = (req.ids + req.output)[start : start + rows]
                self.buffer[place, at : at + rows] = fingerprint(tokens, start, tap)
                at += rows
        segments = [Segment(req, req.rid, req.wish, len(req.ids), start, rows) for req, start, rows in parts]

        def states(rows: int) -> ForwardStates:
            if extra_rows:
                raise ValueError(f"a forward of {rows} rows gave {rows + extra_rows}")
            return ForwardStates(torch.tensor(ids), [self.buffer[k, : len(ids)] for k in range(len(TAPS))])

        self.capturer.forward(segments, states)
        self.buffer.fill_(-1)  # the next forward's graph would do this

    def prefill(self, req: Req) -> None:
        """The whole prompt in chunks of 4096."""
        for start in range(0, len(req.ids), 4096):
            self.forward([(req, start, min(4096, len(req.ids) - start))])


def facts(staging: Path, limit: int) -> Facts:
    return Facts(
        plugin="0",
        engine="0.5.23",
        run="run",
        rank=0,
        staging=str(staging),
        staging_bytes=limit,
        taps=TAPS,
        source="native",
        dtype="bfloat16",
        num_layers=12,
        hidden_size=HIDDEN,
    )


@pytest.fixture(params=[1 << 20, 20_000], ids=["one block a forward", "many blocks a forward"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    limit = 1 << 22
    staging = Staging(tmp_path, "run.0", limit, stall_s=0.0, keep_s=60)
    capturer = Capturer(
        facts(tmp_path, limit), staging, writers=3, host_bytes=request.param, device=torch.device("cpu")
    )
    yield Engine(capturer)
    capturer.close()


def wish(*taps: Tap) -> dict[str, Any]:
    return Wish(owner="me", taps=taps or TAPS).to_params()


def check(engine: Engine, req: Req, reply: Reply | None, taps: tuple[Tap, ...] = TAPS) -> None:
    assert reply is not None and reply.refusal is None, reply
    assert reply.staged is not None and reply.staged.rows == len(req.ids)
    path = engine.capturer.staging.root / reply.staged.name
    file = read_staged(path, reply.staged.seal, reply.staged.size)
    path.unlink()
    assert file.ids.tolist() == req.ids
    got = torch.from_numpy(file.states).view(torch.bfloat16).view(len(taps), len(req.ids), HIDDEN)
    for place, tap in enumerate(taps):
        assert torch.equal(got[place], fingerprint(req.ids, 0, tap)), (req.rid, tap)
    assert file.metadata["rid"] == req.rid


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(3, 60_000) for _ in range(tokens)]


def test_random_schedules(engine: Engine) -> None:
    """Hundreds of requests of many lengths: chunks of any size, mixed with decodes, retracted and prefilled again."""
    rng = random.Random(4)
    lengths = [1, 2, 7, 64, 65, 130, 300]
    waiting = [Req(f"r{n}", prompt(rng, rng.choice(lengths)), wish() if n % 4 else None) for n in range(200)]
    decoding: list[Req] = []
    answered = retracted = 0
    while waiting or decoding:
        parts = [(req, req.total - 1, 1) for req in decoding]
        room = rng.randrange(1, 400)
        prefilled: list[Req] = []
        while waiting and room:
            req = waiting[-1]
            rows = min(room, req.total - req.done)
            parts.insert(0, (req, req.done, rows))
            req.done, room = req.done + rows, room - rows
            if req.done == req.total:
                prefilled.append(waiting.pop())
        engine.forward(parts)
        for req in [*decoding]:
            req.output.append(rng.randrange(3, 60_000))
            fate = rng.random()
            if fate < 0.5:
                decoding.remove(req)
            if fate < 0.3:
                reply = engine.capturer.reply(req.rid, aborted=False)
                assert (reply is None) == (req.wish is None)
                if reply is not None:
                    check(engine, req, reply)
                answered += 1
            elif fate < 0.5:  # retracted: prompt and output so far are prefilled again
                req.done = 0
                waiting.insert(rng.randrange(len(waiting) + 1), req)
                retracted += 1
        decoding += prefilled
        for req in prefilled:
            req.output.append(rng.randrange(3, 60_000))
    assert answered == 200 and retracted > 50
    assert not engine.capturer.busy


def test_subset_of_taps_in_the_order_asked(engine: Engine) -> None:
    req = Req("a", prompt(random.Random(1), 40), wish(FINAL, 5))
    engine.forward([(req, 0, 40)])
    check(engine, req, engine.capturer.reply("a", aborted=False), (FINAL, 5))


def test_offsets_follow_computed_rows_not_prompts(engine: Engine) -> None:
    """EX-03: A has 10 of 15 rows cached, B's rows begin at row 5 of the batch and not at 15."""
    rng = random.Random(2)
    a, b = Req("a", prompt(rng, 15), wish()), Req("b", prompt(rng, 8), wish())
    engine.forward([(a, 10, 5), (b, 0, 8)])
    check(engine, b, engine.capturer.reply("b", aborted=False))
    reply = engine.capturer.reply("a", aborted=False)
    assert reply is not None and reply.refusal is not None and reply.staged is None
    assert reply.refusal.kind == "rows_missing" and "0 to 10" in reply.refusal.message


def test_prefilled_again_from_the_start_half_way(engine: Engine) -> None:
    """Thrown out after its first chunk and begun anew: only the rows still lacking are taken, from where they lie now."""
    req = Req("a", prompt(random.Random(12), 100), wish())
    other = Req("b", prompt(random.Random(13), 30), wish())
    engine.forward([(req, 0, 50)])
    engine.forward([(other, 0, 30), (req, 0, 100)])
    check(engine, req, engine.capturer.reply("a", aborted=False))
    check(engine, other, engine.capturer.reply("b", aborted=False))


def test_equal_prompts_and_shared_prefixes_stay_apart(engine: Engine) -> None:
    """EX-02: eight at once, of lengths 3, 50, 7, 1, 120, 8, 8, 33."""
    rng = random.Random(3)
    shared = prompt(rng, 200)
    reqs = [
        Req(f"r{k}", shared[: n // 2] + prompt(rng, n - n // 2), wish())
        for k, n in enumerate([3, 50, 7, 1, 120, 8, 8, 33])
    ]
    engine.forward([(req, 0, len(req.ids)) for req in reqs])
    for req in reversed(reqs):
        check(engine, req, engine.capturer.reply(req.rid, aborted=False))


def test_nobody_asking_costs_nothing(engine: Engine) -> None:
    req = Req("a", prompt(random.Random(5), 10), None)

    def never(rows: int) -> ForwardStates:
        raise AssertionError("states were touched although nobody asked")

    engine.capturer.forward([Segment(req, "a", {"thinking_budget": 3}, 10, 0, 10)], never)
    assert not engine.capturer.busy
    assert engine.capturer.reply("a", aborted=False) is None


def test_a_request_for_facts_alone(engine: Engine) -> None:
    req = Req("a", [1], Wish(owner="me").to_params())
    engine.forward([(req, 0, 1)])
    reply = engine.capturer.reply("a", aborted=False)
    assert reply is not None and reply.facts.taps == TAPS and reply.staged is None and reply.refusal is None


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (wish(2, 3), "bad_wish"),
        (wish(2, 2), "bad_wish"),
        ({"headrace": {"protocol": 99, "owner": "me", "taps": "2"}}, "bad_wish"),
        ({"headrace": {"protocol": 1, "owner": "../me", "taps": "2"}}, "bad_wish"),
        ({"headrace": "yes"}, "bad_wish"),
    ],
)
def test_wishes_that_cannot_be(engine: Engine, params: dict[str, Any], kind: str) -> None:
    req = Req("a", [5, 6, 7], params)
    engine.forward([(req, 0, 3)])
    reply = engine.capturer.reply("a", aborted=False)
    assert (
        reply is not None
        and reply.refusal is not None
        and reply.refusal.kind == kind
        and not reply.refusal.retryable
    )
    assert engine.capturer.staging.reserved == 0


def test_states_of_another_shape_are_refused_not_fitted(engine: Engine) -> None:
    req = Req("a", prompt(random.Random(6), 10), wish())
    engine.forward([(req, 0, 10)], extra_rows=2)
    reply = engine.capturer.reply("a", aborted=False)
    assert reply is not None and reply.refusal is not None and reply.refusal.kind == "states_missing"
    assert engine.capturer.staging.reserved == 0


@pytest.mark.slow
def test_full_staging_refuses_and_recovers(engine: Engine) -> None:
    rng = random.Random(7)
    limit = engine.capturer.staging.limit
    tokens = limit // 2 // (len(TAPS) * HIDDEN * 2 + 8 * (len(TAPS) + 3))  # states, ids, segment table
    reqs = [Req(f"r{k}", prompt(rng, tokens), wish()) for k in range(4)]
    replies = []
    for req in reqs:
        engine.prefill(req)
        replies.append(engine.capturer.reply(req.rid, aborted=False))
    refused = [reply for reply in replies if reply is not None and reply.refusal is not None]
    assert len(refused) == 2 and all(
        r.refusal is not None and r.refusal.kind == "staging_full" for r in refused
    )
    check(engine, reqs[0], replies[0])  # takes it, which releases its bytes
    again = Req("again", reqs[3].ids, wish())
    engine.prefill(again)
    check(engine, again, engine.capturer.reply("again", aborted=False))
    too_long = Req("long", [1] * (5 * tokens), wish())
    engine.forward([(too_long, 0, 4096)])
    reply = engine.capturer.reply("long", aborted=False)
    assert reply is not None and reply.refusal is not None and reply.refusal.kind == "too_large"


def test_aborted_requests_leave_nothing(engine: Engine) -> None:
    rng = random.Random(8)
    half, whole, lost = (Req(n, prompt(rng, 100), wish()) for n in ("half", "whole", "lost"))
    engine.forward([(half, 0, 50), (whole, 0, 100), (lost, 0, 60)])
    for rid in ("half", "whole"):
        reply = engine.capturer.reply(rid, aborted=True)
        assert reply is not None and reply.refusal is not None and reply.refusal.kind == "aborted"
    del lost  # it waited and was dropped by the scheduler without a reply
    gc.collect()
    other = Req("other", prompt(rng, 5), wish())
    engine.forward([(other, 0, 5)])
    check(engine, other, engine.capturer.reply("other", aborted=False))
    left = [path.name for path in engine.capturer.staging.folder.iterdir() if path.name != "alive"]
    assert left == []
    assert not engine.capturer.busy


def test_same_id_again_is_another_request(engine: Engine) -> None:
    rng = random.Random(9)
    first, second = Req("a", prompt(rng, 100), wish()), Req("a", prompt(rng, 30), wish())
    engine.forward([(first, 0, 50)])
    engine.forward([(second, 0, 30)])
    check(engine, second, engine.capturer.reply("a", aborted=False))
