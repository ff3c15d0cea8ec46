"""One reading of every state without running the target: what is surely broken, and what looks odd enough to be re-extracted first.

A sample finds faults that are common; this finds rare ones. Nothing is rejected here on suspicion: a suspect is only moved to
the front of the sample, where the reference decides. Only NaN and infinity need none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from headrace.bits import bits_of, first_bad_row
from headrace.target import Target
from headrace.types import FINAL, Capture, CaptureSpec
from headrace.verify.faults import Fault
from headrace.verify.journal import Journal
from headrace.verify.measure import Noise, Tolerance, token_errors
from headrace.verify.session import Session

SOME = 16  # tokens of a capture that stand for all where that is enough
PREFIXES = (3, 31)  # tokens at which captures with equal beginnings are compared
MOST_PREFIXES = 50_000
REPEATED = 2  # equal states at different tokens before a capture is odd


@dataclass
class Scan:
    """Feed captures with :meth:`look`; read :attr:`broken` and :attr:`odd` at the end."""

    target: Target
    spec: CaptureSpec
    tolerance: Tolerance
    tokens: int = 0
    captures: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    """Captures with states that are no numbers: key → what they hold."""
    odd: dict[str, str] = field(default_factory=dict)
    """Captures that contradict themselves or another: key → reason."""
    _seen: dict[bytes, tuple[str, torch.Tensor]] = field(default_factory=dict)

    def look(self, capture: Capture, kept: np.ndarray) -> None:
        """Look at one capture; ``kept`` (bool [taps, tokens]) tells the states that the store holds."""
        self.captures += 1
        self.tokens += len(capture.ids)
        there = torch.from_numpy(kept)
        bad = self._values(capture, kept)
        if bad is not None and bad != "only zeros":
            self.broken[capture.key] = bad
            return
        final = there[self.spec.tap_index(FINAL)] if FINAL in self.spec.taps else None
        reason = "a state is all zeros" if bad else self._repeats(capture, there[0])
        if final is not None and bool(final.any()):
            reason = reason or self._norm(capture, final)
        if reason:
            self.odd[capture.key] = reason
        self._prefixes(capture)

    def _values(self, capture: Capture, kept: np.ndarray) -> str | None:
        """What a state holds that is no state: NaN, an infinity, or only zeros (right where an embedding is zero)."""
        found = None
        for k in range(len(self.spec.taps)):
            states = capture.states[k] if kept[k].all() else capture.states[k][torch.from_numpy(kept[k])]
            bad = first_bad_row(bits_of(states), self.spec.dtype, np.ones(len(states), dtype=bool))
            if bad is not None and bad[1] != "only zeros":
                return bad[1]
            found = found or (None if bad is None else bad[1])
        return found

    def _repeats(self, capture: Capture, there: torch.Tensor) -> str:
        """Equal states at tokens with different ids: rows written twice."""
        tap = max(
            range(len(self.spec.taps)),
            key=lambda k: -1 if self.spec.taps[k] == FINAL else int(self.spec.taps[k]),
        )
        raw = capture.states[tap].contiguous().view(torch.uint8).numpy()
        hashes = np.fromiter((xxhash.xxh3_64_intdigest(row) for row in raw), dtype=np.uint64, count=len(raw))
        order = np.argsort(hashes, kind="stable")
        same = hashes[order][1:] == hashes[order][:-1]
        differ = capture.ids[order][1:] != capture.ids[order][:-1]
        count = int((same & differ).sum())
        return f"{count} states repeat that of another token" if count >= REPEATED else ""

    def _norm(self, capture: Capture, there: torch.Tensor) -> str:
        """A normed final state, divided by the norm's weight, has a mean square of 1."""
        spec = self.spec
        if not spec.final_normed or spec.norm_kind == "layernorm":
            return ""
        weight = self._norm_weight
        usable = weight.abs() > 0.05 * weight.abs().median()
        states = capture.states[spec.tap_index(FINAL)][there]
        unit = states[:: max(1, len(states) // SOME)].float()[:, usable] / weight[usable]
        square = float(unit.pow(2).mean(-1).median())
        return "" if 0.5 < square < 2.0 else f"the final state is not normed (mean square {square:.3g})"

    @functools.cached_property
    def _norm_weight(self) -> torch.Tensor:
        """[hidden]: what the final norm multiplies by."""
        return self.target.final_norm(torch.ones(self.spec.hidden_size))

    def _prefixes(self, capture: Capture) -> None:
        """Captures that begin with the same tokens must hold the same states there."""
        for last in PREFIXES:
            if last >= len(capture.ids) or len(self._seen) >= MOST_PREFIXES:
                return
            begin = xxhash.xxh3_128_digest(np.ascontiguousarray(capture.ids[: last + 1]).tobytes())
            states = capture.states[:, last].clone()
            key, other = self._seen.setdefault(begin, (capture.key, states))
            if key == capture.key:
                continue
            whole = torch.isfinite(states).all(dim=-1) & torch.isfinite(other).all(dim=-1)
            if not bool(whole.any()):
                continue
            if (
                float(token_errors(states[whole][:, None], other[whole][:, None]).relative.max())
                > self.tolerance.token
            ):
                reason = f"token {last} differs from that of a capture with the same beginning"
                self.odd.setdefault(capture.key, reason)
                self.odd.setdefault(key, reason)


def scan_store(session: Session, journal: Journal) -> tuple[dict[str, str], list[Fault]]:
    """Scan the shards not scanned yet, in seeded order, until half of the time budget is gone.

    Returns the suspects (key → reason), those of earlier runs included, and the faults that are sure.
    """
    suspects: dict[str, str] = dict(journal.state["suspects"])
    broken: dict[str, str] = dict(journal.state["broken"])
    if session.config.scan:
        tolerance = Tolerance.derive(
            session.spec, session.store.codec, Noise.of([], []), session.config.tolerance
        )
        scan = Scan(session.target, session.spec, tolerance)
        scanned: list[str] = list(journal.state["scanned"])
        shards = {name: keys for name, keys in session.shards().items() if name not in scanned}
        total = sum(map(len, shards.values()))
        with session.watch("reading", bytes_unit=False) as update:
            for name in np.random.default_rng(session.config.seed).permutation(sorted(shards)).tolist():
                if session.clock.half_over:
                    break
                for key in shards[name]:
                    scan.look(session.stored(key), session.kept(key))
                    update(scan.captures, total)
                scanned.append(name)
                suspects.update(scan.odd)
                broken.update(scan.broken)
                journal.save(scanned=scanned, suspects=suspects, broken=broken)
    return suspects, _sure(broken)


def _sure(broken: dict[str, str]) -> list[Fault]:
    """Faults that need no reference."""
    if not broken:
        return []
    first, what = next(iter(broken.items()))
    detail = f"{len(broken)} captures hold states that are no numbers; {first} holds {what}"
    return [Fault("non-finite", detail, len(broken), tuple(broken)[:5])]
