"""The doctor's checks of a capture server: what would go wrong silently is provoked here, with probes of a few seconds."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import httpx
import numpy as np

from headrace._version import __version__
from headrace.engines.base import Check, open_engine
from headrace.engines.sglang.server import Server, generate_request, read_reply
from headrace.engines.sglang.session import Link, Session
from headrace.errors import ConfigError, EngineError
from headrace.sglang_plugin.protocol import Wish
from headrace.sglang_plugin.releases import FIRST, LAST, release
from headrace.target import Target
from headrace.types import FINAL, Capture, Failure, Row

if TYPE_CHECKING:
    import torch

_EQUAL_ROWS, _EQUAL_TOKENS = 8, 48
_LONGEST_PROBE = 20_000
_GREEDY_PROMPTS = 24
_REFERENCE_BYTES = 8 << 30
"""Weights up to this size are loaded here to compare with, when the reference is "auto"."""
_DOT = "·"


@dataclass(frozen=True)
class Probes:
    """What was sent and what came back."""

    equal: list[Row]
    long: Row | None
    together: dict[str, Capture]
    """Everything sent at once."""
    alone: dict[str, Capture]
    """The equal rows again, one after the other."""
    failures: list[Failure]


def examine(target: Target, link: Link) -> list[Check]:
    """All checks of all servers of ``link``."""
    checks: list[Check] = []
    for server in link.servers:
        name = f"{server.url} {_DOT} " if len(link.servers) > 1 else ""
        if server.facts is None:
            checks.append(Check(f"{name}server", False, server.reason, "start it, or leave it out"))
            continue
        alone = replace(link, servers=[server])
        checks += [replace(check, name=name + check.name) for check in _examine_server(target, alone, server)]
    return checks


def _examine_server(target: Target, link: Link, server: Server) -> list[Check]:
    assert server.facts is not None
    checks = [_versions(server), _staging(link, server)]
    probes = _send(target, link, server)
    checks += [
        _chunks(probes, server),
        _told_apart(probes, link),
        _cache(probes, link, server),
        _taps(probes, link),
        _convention(target, link, server, probes),
        _finite(probes),
        _counters(server),
    ]
    return checks


# --- probes -------------------------------------------------------------------------------------------------------


def _send(target: Target, link: Link, server: Server) -> Probes:
    assert server.facts is not None
    rng = np.random.default_rng(20_240_607)
    high = max(4, target.vocab_size - 1)

    def row(tokens: int) -> Row:
        return Row.make(rng.integers(3, high, tokens), np.ones(tokens, bool))

    equal = [row(_EQUAL_TOKENS) for _ in range(_EQUAL_ROWS)]
    tokens = _long_tokens(server, link)
    long = row(tokens) if tokens else None
    together, failures = _capture(link, [*equal, *([long] if long else [])])
    alone: dict[str, Capture] = {}
    for one in equal:
        captures, failed = _capture(link, [one])
        alone.update(captures)
        failures += failed
    return Probes(equal, long, together, alone, failures)


def _long_tokens(server: Server, link: Link) -> int:
    """A length that takes more than one chunk and fits everywhere; 0 when there is none."""
    assert server.facts is not None
    settings = server.facts.settings
    chunk = int(settings.get("chunked_prefill_size") or 0)
    limits = [_LONGEST_PROBE, server.room, int(settings.get("max_total_tokens") or _LONGEST_PROBE) - 8]
    if settings.get("context_length"):
        limits.append(int(settings["context_length"]) - 8)
    wanted = 2 * chunk + chunk // 2 + 1 if chunk > 0 else 1000
    tokens = min(wanted, *limits)
    return tokens if tokens > chunk else 0


def _capture(link: Link, rows: Iterable[Row]) -> tuple[dict[str, Capture], list[Failure]]:
    session = Session(link, rows)
    try:
        results = list(session.results())
    finally:
        session.close()
    return (
        {result.key: result for result in results if isinstance(result, Capture)},
        [result for result in results if isinstance(result, Failure)],
    )


# --- numbers ------------------------------------------------------------------------------------------------------


def row_errors(got: torch.Tensor, want: torch.Tensor) -> np.ndarray:
    """Relative error of each row, [taps, tokens]: |got - want| / |want| over the hidden axis."""
    from headrace.bits import bits_of, floats_of, norms_of  # loads torch

    first, second = (floats_of(bits_of(t), str(t.dtype).removeprefix("torch.")) for t in (got, want))
    errors: np.ndarray = norms_of(first - second) / np.maximum(norms_of(second), 1e-12)
    return errors


def _agree(errors: np.ndarray, dtype: str) -> bool:
    """In float32 every row agrees; in half precision the usual row does (a router may send single ones elsewhere)."""
    return float(errors.max()) <= 1e-3 if dtype == "float32" else float(np.median(errors)) <= 0.03


def _describe(errors: np.ndarray) -> str:
    return f"median {float(np.median(errors)):.1e}, worst {float(errors.max()):.1e}"


def _lost(probes: Probes, rows: Iterable[Row]) -> str:
    """The first failure among ``rows``, for a check's value; empty when all came back."""
    keys = {row.key for row in rows}
    return next(
        (f"{failure.kind}: {failure.message}" for failure in probes.failures if failure.key in keys), ""
    )


# --- checks -------------------------------------------------------------------------------------------------------


def _versions(server: Server) -> Check:
    assert server.facts is not None
    facts = server.facts
    tested = FIRST <= release(facts.engine) <= LAST
    return Check(
        "plug-in active",
        facts.plugin == __version__,
        f"plug-in {facts.plugin} in SGLang {facts.engine} ({'tested' if tested else 'not tested'}), here {__version__}",
        "install the same Headrace on both sides",
    )


def _staging(link: Link, server: Server) -> Check:
    assert server.facts is not None
    facts, spec = server.facts, link.spec
    free = shutil.disk_usage(link.staging.join(facts)).free
    need = int(facts.settings.get("context_length") or 0) * (spec.bytes_per_token + 64)
    value = (
        f"{facts.staging_bytes / 1e9:.2f} GB for captures, {free / 1e9:.2f} GB free; the longest prompt takes {need / 1e9:.3f} GB, "
        f"{spec.bytes_per_token:,} bytes a token"
    )
    enough = min(facts.staging_bytes, free + server.staging_used) >= max(need, spec.bytes_per_token)
    return Check("staging", enough, value, "raise --staging-bytes, or put --staging where there is space")


def _chunks(probes: Probes, server: Server) -> Check:
    assert server.facts is not None
    chunk = server.facts.settings.get("chunked_prefill_size")
    mend = "this server loses rows between chunks; use a tested SGLang release"
    if probes.long is None:
        return Check(
            "long prompt", True, f"not tried: no prompt longer than the chunk of {chunk} fits this server"
        )
    lost = _lost(probes, [probes.long])
    if lost or probes.long.key not in probes.together:
        return Check("long prompt", False, lost or "no answer", mend)
    rows = probes.together[probes.long.key].states.shape[1]
    return Check(
        "long prompt",
        rows == len(probes.long),
        f"{rows} rows for {len(probes.long)} tokens, chunks of {chunk}",
        mend,
    )


def _told_apart(probes: Probes, link: Link) -> Check:
    """Each row sent among others of its length is nearest to itself sent alone, and as near as rounding allows."""
    name, mend = "rows told apart", "rows of one request appear in another's; do not use this server"
    lost = _lost(probes, probes.equal)
    keys = [row.key for row in probes.equal]
    if lost or any(key not in probes.together or key not in probes.alone for key in keys):
        return Check(name, False, lost or "not all answers came", mend)
    alone = [probes.alone[key].states for key in keys]
    swapped = 0
    own: list[np.ndarray] = []
    for place, key in enumerate(keys):
        errors = [row_errors(probes.together[key].states, other) for other in alone]
        own.append(errors[place])
        swapped += int(np.argmin([np.median(error) for error in errors])) != place
    errors_of_own = np.stack(own)
    value = f"{len(keys)} prompts of {_EQUAL_TOKENS} tokens at once, {swapped} swapped; together against alone: {_describe(errors_of_own)}"
    return Check(name, swapped == 0 and _agree(errors_of_own, link.spec.dtype), value, mend)


def _cache(probes: Probes, link: Link, server: Server) -> Check:
    assert server.facts is not None
    off = bool(server.facts.settings.get("disable_radix_cache"))
    whole = sum(len(probes.alone[row.key].ids) == len(row) for row in probes.equal if row.key in probes.alone)
    value = f"prefix cache {'off' if off else 'on, each capture with a key of its own'}; {whole} of {len(probes.equal)} repeated prompts whole"
    return Check(
        "cache policy",
        whole == len(probes.equal),
        value,
        "start the server with headrace serve (--disable-radix-cache)",
    )


def _taps(probes: Probes, link: Link) -> Check:
    taps = link.spec.taps
    name, mend = "taps", "the model captures one layer twice; use a tested release and family"
    capture = next(iter(probes.alone.values()), None)
    if capture is None:
        return Check(name, False, "no answer came", mend)
    least = min(
        (
            float(np.median(row_errors(capture.states[a], capture.states[b])))
            for a in range(len(taps))
            for b in range(a)
        ),
        default=1.0,
    )
    value = f"{len(taps)} asked, {capture.states.shape[0]} given in order {list(taps)}; the nearest two differ by {least:.2g}"
    return Check(name, capture.states.shape[0] == len(taps) and least > 1e-3, value, mend)


def _finite(probes: Probes) -> Check:
    bad = [failure for failure in probes.failures if failure.kind == "non_finite"]
    value = (
        bad[0].message
        if bad
        else f"{sum(c.states.numel() for c in probes.together.values()):,} values, none NaN or infinite"
    )
    return Check("finite", not bad, value, "the model overflows in this dtype; use bfloat16 or float32")


def _counters(server: Server) -> Check:
    value = f"{server.retractions} requests preempted, {server.faults} faults while probing"
    return Check(
        "preemption",
        server.retractions == 0,
        value,
        "give the server more KV memory or fewer running requests",
    )


# --- which boundary is which --------------------------------------------------------------------------------------


def _convention(target: Target, link: Link, server: Server, probes: Probes) -> Check:
    name = "boundaries"
    kind = link.options.reference
    if kind == "auto":
        kind = "hf" if _small_enough(target) else "greedy"
    if kind == "none":
        return Check(name, True, "not proven, as asked for")
    try:
        return (
            _against_hf(target, link, probes)
            if kind == "hf"
            else _against_greedy(target, link, server, probes)
        )
    except (ConfigError, EngineError) as exc:
        mend = "give the target's folder with its weights, or start without proof (--skip-preflight)"
        return Check(name, False, f"not proven: {exc}", mend)


def _small_enough(target: Target) -> bool:
    import psutil

    size = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
    free = int(psutil.virtual_memory().available)
    return 0 < size <= min(_REFERENCE_BYTES, free // 3)


def _against_hf(target: Target, link: Link, probes: Probes) -> Check:
    """Compare with transformers, at every boundary, so that a wrong one can be named."""
    spec = link.spec
    mend = "a tap is not the boundary it is called; use a tested release and family, and report this"
    rows = [row for row in probes.equal if row.key in probes.alone][:2]
    if not rows:
        return Check("boundaries", False, "no answer came", mend)
    everything = replace(spec, taps=(*range(spec.num_layers + 1), FINAL), final_normed=True)
    with open_engine("hf", target, everything) as engine:
        want = {result.key: result for result in engine.capture(iter(rows)) if isinstance(result, Capture)}
    if len(want) != len(rows):
        raise EngineError("the reference engine gave no states")
    values, fine = [], True
    for place, tap in enumerate(spec.taps):
        worst, nearest = 0.0, set()
        for row in rows:
            got, truth = probes.alone[row.key].states[place], want[row.key].states
            errors = row_errors(got[None], truth)
            own = errors[everything.tap_index(tap)]
            fine &= _agree(own, spec.dtype)
            worst = max(worst, float(own.max()))
            nearest.add(everything.taps[int(np.median(errors, axis=1).argmin())])
        values.append(
            f"{tap}: {worst:.1e}" + ("" if nearest == {tap} else f" (it is {', '.join(map(str, nearest))})")
        )
        fine &= nearest == {tap}
    return Check("boundaries", fine, "against transformers, worst row a tap: " + ", ".join(values), mend)


def _against_greedy(target: Target, link: Link, server: Server, probes: Probes) -> Check:
    """The final state through ``lm_head`` must name the token that the server itself chooses next."""
    if FINAL not in link.spec.taps:
        raise ConfigError(
            "without the final state there is nothing to compare with the server's own next token"
        )
    place = link.spec.tap_index(FINAL)
    rng = np.random.default_rng(7)
    rows = [
        Row.make(rng.integers(3, max(4, target.vocab_size - 1), _EQUAL_TOKENS), np.ones(_EQUAL_TOKENS, bool))
        for _ in range(_GREEDY_PROMPTS)
    ]
    agree = 0
    with httpx.Client(timeout=link.options.timeout_s, trust_env=False) as client:
        for row in rows:
            capture, chosen = _generate_one(client, link, server, row)
            logits = target.head.logits(capture.states[place, -1])
            agree += int(logits.argmax()) == chosen
    share = agree / len(rows)
    value = f"lm_head of the final state names the server's own next token in {agree} of {len(rows)} prompts; the other taps rest on the plug-in's check of the layers"
    return Check(
        "boundaries",
        share >= 0.9,
        value,
        "the server runs other weights than the target, or another tap than the final state",
    )


def _generate_one(client: httpx.Client, link: Link, server: Server, row: Row) -> tuple[Capture, int]:
    wish = Wish(owner=link.staging.owner, taps=link.spec.taps)
    body = generate_request(row.ids.tolist(), uuid.uuid4().hex, wish, max_new_tokens=1)
    try:
        response = client.post(f"{server.url}/generate", json=body)
    except httpx.TransportError as exc:
        raise EngineError(f"{server.url} did not answer ({type(exc).__name__})") from exc
    reply, _ = read_reply(server.url, response)
    if reply.staged is None:
        raise EngineError(
            f"{server.url} gave no capture: {reply.refusal.message if reply.refusal else 'no reason'}"
        )
    capture = link.staging.take(reply.facts, reply.staged, row, link.spec)
    return capture, int(response.json()["output_ids"][-1])
