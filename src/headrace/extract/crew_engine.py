"""All workers' engines as one: what a run checks, records and shows of its engine when there are many of them."""

from __future__ import annotations

from collections import Counter

from headrace.engines.base import Check, EngineInfo
from headrace.errors import PreflightError, SpecMismatchError
from headrace.extract.crew import Crew, Member
from headrace.extract.remote_worker import Ready
from headrace.types import CaptureSpec

TICK = 0.1


class CrewEngine:
    """All workers' engines as one: what the first of them says of itself, and every other must say too."""

    def __init__(
        self, crew: Crew, spec: CaptureSpec, *, any_settings: bool = False, skip_preflight: bool = False
    ) -> None:
        self.crew, self.spec = crew, spec
        self.any_settings, self.skip_preflight = any_settings, skip_preflight
        self.first: Ready | None = None
        crew.on_ready = self.accept

    def accept(self, member: Member) -> None:
        """Take ``member`` in. Raises SpecMismatchError when its engine is another one than the first's, PreflightError when it is not fit."""
        assert member.ready is not None
        if self.first is None:
            self.first = member.ready
            return
        failing = [check for check in member.ready.checks if not check.ok]
        if failing and not self.skip_preflight:
            raise PreflightError(
                f"{failing[0].name} on {member.ready.host}: {failing[0].value}. {failing[0].mend}"
            )
        mine, theirs = self.first.info, member.ready.info
        settings = () if self.any_settings else (mine.settings, theirs.settings)
        if (mine.name, mine.version, settings[:1]) != (theirs.name, theirs.version, settings[1:]):
            differ = [
                k
                for k in {*mine.settings, *theirs.settings}
                if mine.settings.get(k) != theirs.settings.get(k)
            ]
            raise SpecMismatchError(
                f"the engine on {member.ready.host} is {theirs.name} {theirs.version}, on {self.first.host} {mine.name} {mine.version}"
                + (f"; settings differ: {', '.join(sorted(differ))}" if differ else "")
                + ". Give all workers the same engine (states of two engines never share a store)"
            )

    def open(self) -> None:
        """Wait for the first worker. Raises the error that leaves no hope of one."""
        while self.first is None:
            self.crew.wait(TICK)

    @property
    def info(self) -> EngineInfo:
        """Of the first worker's engine."""
        assert self.first is not None
        return self.first.info

    @property
    def want(self) -> int:
        """Tokens that a worker holds."""
        assert self.first is not None
        return self.first.want

    def preflight(self) -> list[Check]:
        """Of the first worker's engine."""
        assert self.first is not None
        return self.first.checks

    def gauges(self) -> dict[str, float]:
        """Sums over the workers."""
        total: Counter[str] = Counter()
        for member in self.crew.ready:
            total.update(member.report.gauges)
        return dict(total)

    def close(self) -> None:
        """Let all workers go; idempotent."""
        self.crew.close()
