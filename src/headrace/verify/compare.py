"""Two stores of the same rows, state by state: two engines, two settings, or before and after an upgrade."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.errors import InputError, SpecMismatchError
from headrace.files import write_json
from headrace.store import Store
from headrace.target import Target
from headrace.types import FINAL, Tap
from headrace.verify.config import CompareConfig
from headrace.verify.measure import token_errors
from headrace.verify.session import Say, Watch, lines

# Fields of two specs that may differ: taps are intersected, the final state is brought to one norm, and how the target was
# reached changes no number.
_MAY_DIFFER = ("taps", "final_normed", "dtype", "revision")
BINS = np.logspace(-9, 1, 121)  # of relative error, for the plot


@dataclass(frozen=True, slots=True)
class Difference:
    """One capture in both stores, a value a common tap."""

    key: str
    tokens: int
    median: np.ndarray
    maximum: np.ndarray
    cosine: np.ndarray

    @property
    def worst(self) -> float:
        """Largest median error of any tap."""
        return float(self.median.max())


def compare(config: CompareConfig, say: Say | None = None, watch: Watch | None = None) -> dict[str, Any]:
    """Compare two stores; returns the report and writes it, with a plot, when ``out`` is given.

    Raises InputError when they share no capture, SpecMismatchError when they are of different targets.
    """
    return Comparison(config, watch or functools.partial(lines, say or (lambda _text: None))).run()


class Comparison:
    """One run of :func:`compare`."""

    def __init__(self, config: CompareConfig, watch: Watch) -> None:
        self.config = config
        self.watch = watch
        self.a, self.b = Store.open(config.store_a), Store.open(config.store_b)
        self.taps = self._common_taps()
        self.norm = self._norm()
        self.histogram = np.zeros((len(self.taps), len(BINS) - 1), dtype=np.int64)

    def run(self) -> dict[str, Any]:
        """All captures, or a sample; the report."""
        start = time.monotonic()
        keys = self._keys()
        found: list[Difference] = []
        with self.watch("comparing", bytes_unit=False) as update:
            for key in keys:
                found.append(self._compare(key))
                update(len(found), len(keys))
        report = self._report(found, time.monotonic() - start)
        if self.config.out is not None:
            self._write(report, self.config.out)
        return report

    def _common_taps(self) -> tuple[Tap, ...]:
        wrong = [
            line for line in self.a.spec.differences(self.b.spec) if line.split(":")[0] not in _MAY_DIFFER
        ]
        if wrong:
            raise SpecMismatchError(
                f"{self.a.name} and {self.b.name} are of different targets: {'; '.join(wrong)}. Compare stores of one target"
            )
        taps = tuple(tap for tap in self.a.spec.taps if tap in self.b.spec.taps)
        if not taps:
            raise InputError(
                f"{self.a.name} has taps {list(self.a.spec.taps)}, {self.b.name} {list(self.b.spec.taps)}: none in common"
            )
        return taps

    def _norm(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The target's final norm, when just one of the stores holds a normed final state."""
        if FINAL not in self.taps or self.a.spec.final_normed == self.b.spec.final_normed:
            return None
        if not self.config.model:
            raise InputError(
                "one store's final state is normed and the other's is not; give --model to norm it"
            )
        target = Target.open(self.config.model)
        target.require(self.a.spec, f"store {self.a.name}")
        return target.final_norm

    def _keys(self) -> list[str]:
        keys = [key for key in self.a if key in self.b]
        if not keys:
            raise InputError(
                f"{self.a.name} and {self.b.name} have no capture in common; extract the same rows into both"
            )
        limit = self.config.max_captures
        if limit and limit < len(keys):
            chosen = np.random.default_rng(self.config.seed).choice(len(keys), limit, replace=False)
            keys = [keys[int(i)] for i in sorted(chosen)]
        return keys

    def _states(self, store: Store, key: str) -> torch.Tensor:
        states = store.get(key, self.taps, missing="nan").states.float()
        if self.norm is not None and not store.spec.final_normed:
            place = self.taps.index(FINAL)
            states[place] = self.norm(states[place].to(getattr(torch, store.spec.dtype))).float()
        return states

    def _compare(self, key: str) -> Difference:
        states, reference = self._states(self.a, key), self._states(self.b, key)
        errors = token_errors(states, reference)
        kept = (torch.isfinite(states) & torch.isfinite(reference)).all(dim=-1).numpy()
        medians, maxima, cosines = [], [], []
        for k in range(len(self.taps)):
            relative, cosine = errors.relative[k][kept[k]], errors.cosine[k][kept[k]]
            self.histogram[k] += np.histogram(np.clip(relative, BINS[0], BINS[-1]), BINS)[0]
            medians.append(float(np.median(relative)) if len(relative) else 0.0)
            maxima.append(float(relative.max()) if len(relative) else 0.0)
            cosines.append(float(cosine.min()) if len(cosine) else 1.0)
        return Difference(key, states.shape[1], np.array(medians), np.array(maxima), np.array(cosines))

    def _report(self, found: list[Difference], seconds: float) -> dict[str, Any]:
        medians = np.stack([d.median for d in found])
        table: list[dict[str, Any]] = [
            {
                "tap": str(tap),
                "median": float(np.median(medians[:, k])),
                "p99": self._quantile(k, 0.99),
                "max": max(float(d.maximum[k]) for d in found),
                "cosine_min": min(float(d.cosine[k]) for d in found),
            }
            for k, tap in enumerate(self.taps)
        ]
        worst = sorted(found, key=lambda d: -d.worst)[: self.config.worst]
        tolerance = self.config.tolerance
        return {
            "store_a": self.a.name,
            "store_b": self.b.name,
            "engines": [store.provenance.get("engine") for store in (self.a, self.b)],
            "differences": [*self.a.spec.differences(self.b.spec)],
            "captures": len(found),
            "only_a": len(self.a) - sum(key in self.b for key in self.a),
            "only_b": len(self.b) - sum(key in self.a for key in self.b),
            "tokens": sum(d.tokens for d in found),
            "taps": table,
            "worst": [
                {
                    "key": d.key,
                    "tokens": d.tokens,
                    "median": d.worst,
                    "max": float(d.maximum.max()),
                    "tap": str(self.taps[int(d.median.argmax())]),
                }
                for d in worst
            ],
            "within_tolerance": not tolerance or all(row["median"] <= tolerance for row in table),
            "seconds": round(seconds, 3),
            "out": None if self.config.out is None else str(self.config.out),
        }

    def _quantile(self, tap: int, share: float) -> float:
        """From the histogram: right to a bin's width, 21 %."""
        running = np.cumsum(self.histogram[tap])
        if not running[-1]:
            return 0.0
        place = int(np.searchsorted(running, share * running[-1]))
        return 0.0 if place == 0 else float(BINS[place + 1])

    def _write(self, report: dict[str, Any], out: Path) -> None:
        from headrace.verify.plot import plot_errors

        out.mkdir(parents=True, exist_ok=True)
        report["plot"] = plot_errors(
            out / "errors.png", [str(tap) for tap in self.taps], BINS, self.histogram
        )
        write_json(out / "report.json", report)
        write_json(
            out / "manifest.json", {"kind": "headrace.compare", "config": self.config.model_dump(mode="json")}
        )
