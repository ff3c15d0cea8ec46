"""From findings about single captures to faults of the store: what is the same is said once, with how often it was seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from headrace.types import FINAL, CaptureSpec, Tap
from headrace.verify.faults import Fault
from headrace.verify.problem import Finding, tap_names

EXAMPLES = 5


def faults_of(findings: Sequence[Finding], spec: CaptureSpec, scope: str) -> list[Fault]:
    """Name the faults behind ``findings``, most frequent first; ``scope`` ends each sentence: of how many captures this is."""
    by_key: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_key[finding.key].append(finding)
    swapped = _swapped(by_key)
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for key, found in by_key.items():
        for finding in _join_taps(found, spec):
            if key in swapped and finding.code == "other-capture":
                groups["captures-swapped", ""].append(finding)
            else:
                groups[finding.code, _pattern(finding)].append(finding)
    faults = [_fault(code, found, scope) for (code, _), found in groups.items()]
    return sorted(faults, key=lambda fault: -fault.captures)


# Kinds whose detail says the same for every capture, and kinds of which a different tap is a different fault.
_SAME_DETAIL = frozenset({"boundary-shifted", "final-wrong-layer", "tap-order", "norm-weight"})
_BY_TAP = frozenset({"boundary-normed", "residual-missing", "scaled", "hidden-order", "hidden-partial"})


def _pattern(finding: Finding) -> str:
    """Findings of one code and pattern are one fault."""
    if finding.code in _SAME_DETAIL:
        return finding.detail
    return ",".join(map(str, finding.taps)) if finding.code in _BY_TAP else ""


def _fault(code: str, found: list[Finding], scope: str) -> Fault:
    first = found[0]
    keys = list(dict.fromkeys(f.key for f in found))
    taps = sorted({tap for f in found for tap in f.taps}, key=_order)
    if code == "captures-swapped":
        detail = f"captures {first.key} and {first.other} hold each other's states"
    else:
        detail = (
            f"{first.detail} (capture {first.key}, {first.count} tokens from {first.first} to {first.last})"
        )
    more = f"; so do {len(keys) - 1} more" if len(keys) > 1 else ""
    numbers = {"diagnosed": len(keys), "error_claimed": first.claimed, "error_explained": first.error}
    offsets = Counter(f.value for f in found if f.value is not None)
    if offsets:
        numbers["value"] = offsets.most_common(1)[0][0]
    return Fault(
        code, f"{detail}{more}. {scope}", len(keys), tuple(keys[:EXAMPLES]), tuple(map(str, taps)), numbers
    )


def _order(tap: Tap) -> int:
    return 1 << 30 if tap == FINAL else int(tap)


def _swapped(by_key: dict[str, list[Finding]]) -> set[str]:
    """Keys of captures that hold each other's states."""
    holds = {
        key: f.other
        for key, found in by_key.items()
        for f in found
        if f.code == "other-capture" and f.value == 1
    }
    return {key for key, other in holds.items() if holds.get(other) == key}


def _join_taps(found: list[Finding], spec: CaptureSpec) -> Iterable[Finding]:
    """The findings of one capture, with those that only make sense together joined."""
    held = {f.taps[0]: f for f in found if f.holds is not None and len(f.taps) == 1}
    order = {tap: held[tap].holds if tap in held else tap for tap in spec.taps}
    rest = [f for f in found if f not in held.values()]
    if held and set(order.values()) == set(spec.taps):
        first = next(iter(held.values()))
        names = ", ".join(str(tap) for tap in order.values())
        detail = f"the taps hold {names} where the spec says {', '.join(map(str, spec.taps))}"
        return [*rest, _joined(first, "tap-order", detail, list(held.values()))]
    rest = found
    together: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in rest:
        together[_sameness(finding)].append(finding)
    return [group[0] if len(group) == 1 else _join_alike(group) for group in together.values()]


def _sameness(finding: Finding) -> tuple[str, str]:
    """Findings of one capture with one sameness say one thing about several taps."""
    tap = finding.taps[0] if finding.taps else FINAL
    if finding.code == "boundary-shifted" and tap != FINAL and finding.holds not in (None, FINAL):
        return finding.code, str(int(finding.holds or 0) - int(tap))
    return finding.code, finding.what or finding.detail


def _join_alike(group: list[Finding]) -> Finding:
    first = group[0]
    taps = [tap for f in group for tap in f.taps]
    if first.code == "boundary-shifted":
        shift = int(first.holds or 0) - int(first.taps[0])
        side = "later" if shift > 0 else "earlier"
        return _joined(
            first, first.code, f"{tap_names(taps)} each hold the boundary {abs(shift)} {side}", group, shift
        )
    detail = f"{tap_names(taps)} each hold {first.what}" if first.what else first.detail
    return _joined(first, first.code, detail, group)


def _joined(
    first: Finding, code: str, detail: str, group: list[Finding], value: int | None = None
) -> Finding:
    return Finding(
        code,
        detail,
        first.key,
        tuple(tap for f in group for tap in f.taps),
        min(f.first for f in group),
        max(f.last for f in group),
        max(f.count for f in group),
        max(f.error for f in group),
        min(f.claimed for f in group),
        value,
    )
