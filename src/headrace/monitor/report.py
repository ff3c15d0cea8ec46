"""One HTML file about a run: what went in, what came out, how long it took, what was checked, and plots. It needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from headrace._version import __version__
from headrace.errors import InputError
from headrace.extract.disk import gigabytes
from headrace.extract.events import read_events
from headrace.extract.files import RunFiles
from headrace.extract.ledger import FailureFile
from headrace.extract.plan import length_buckets
from headrace.extract.view import duration
from headrace.files import atomic_write, read_json
from headrace.monitor.history import History
from headrace.monitor.status import Status, read_status
from headrace.monitor.svg import bar_plot, line_plot, norm_plot
from headrace.store import Store
from headrace.store.folder import DATASET, open_folder

SHOWN_FAILURES = 500
STYLE = Path(__file__).parent / "static" / "report.css"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report's table of checks."""

    what: str
    ok: bool
    value: str


class Report:
    """Reads everything about the run once; :meth:`html` lays it out."""

    def __init__(self, path: Path) -> None:
        self.files = RunFiles.find(path)
        self.manifest = read_json(self.files.manifest)
        self.status: Status = read_status(self.files.store)
        place = self.manifest["config"].get("store") or str(self.files.store)
        if open_folder(place).read_file(DATASET) is None:
            raise InputError(f"{place} has no captures yet; the report is about what was captured")
        self.store = Store.open(place)
        history = History(self.files.events)
        history.update()
        self.course = history.to_json()
        self.failures = list(FailureFile(self.files.failures).rows.values())
        self.verification = self._beside("verify/report.json", f"{self.files.store.name}.verify/report.json")
        self.whole_run = self._beside("report.json")

    def _beside(self, *names: str) -> dict[str, Any] | None:
        """A JSON object that another stage left beside the store."""
        for name in names:
            file = self.files.store.parent / name
            if file.is_file():
                value = read_json(file)
                return value if isinstance(value, dict) else None
        return None

    # --- what was checked ---------------------------------------------------------------------------------------------

    def checks(self) -> list[Check]:
        """What speaks for the store and what against it."""
        result = self.status.result or {}
        out = [Check("the extraction finished", self.status.state == "finished", self.status.state)]
        if result:
            parts = [result[name] for name in ("stored", "skipped", "failed", "not_reached")]
            words = f"{result['rows']:,} rows = " + " + ".join(
                f"{count:,} {name}"
                for name, count in zip(("stored", "skipped", "failed", "not reached"), parts, strict=True)
            )
            out.append(Check("the account adds up", sum(parts) == result["rows"], words))
        out.append(
            Check("every row has its capture", not self.failures, f"{len(self.failures):,} rows without")
        )
        known = {shard.name for shard in self.store.index.shards}
        there = set(self.store.folder.shard_names())
        out.append(
            Check(
                "the index knows every shard",
                known == there,
                f"{len(known):,} in the index, {len(there):,} in the folder",
            )
        )
        out.append(
            Check(
                "the norms look right",
                not self.status.warnings,
                "; ".join(self.status.warnings) or "in every tap",
            )
        )
        if self.verification is None:
            out.append(Check("the store was verified", False, "not yet: headrace verify proves it"))
        else:
            faults = ", ".join(str(fault.get("code")) for fault in self.verification.get("faults", []))
            sample = self.verification.get("sample", {}).get("captures", 0)
            words = faults or f"{sample:,} captures extracted again and compared"
            out.append(Check("the store was verified", bool(self.verification.get("verify_ok")), words))
        return out

    # --- layout -------------------------------------------------------------------------------------------------------

    def html(self) -> str:
        """The whole file."""
        title = f"Headrace: {self.status.model}"
        body = [
            f"<h1>States of {escape(self.status.model)}</h1>",
            f'<p class="sub">{escape(str(self.files.store))}, extracted through {escape(self.status.engine)}</p>',
            self._verdict(),
            self._figures(),
            "<h2>What was checked</h2>" + self._check_table(),
            "<h2>What went in</h2>" + self._input(),
            "<h2>What came out</h2>" + self._output(),
            "<h2>How long it took</h2>" + self._sessions(),
            self._later_stages(),
            self._failure_table(),
        ]
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head><body>"
            + "\n".join(body)
            + f"<footer>Made by headrace report {escape(__version__)}.</footer></body></html>\n"
        )

    def _verdict(self) -> str:
        wrong = [check for check in self.checks() if not check.ok]
        if not wrong:
            return '<p class="verdict good">Complete, accounted for and verified.</p>'
        reasons = "; ".join(f"not so: {check.what} ({check.value})" for check in wrong)
        return f'<p class="verdict bad">{escape(reasons[0].upper() + reasons[1:])}</p>'

    def _figures(self) -> str:
        store = self.store
        sessions = len(self.manifest["sessions"])
        seconds = sum(session.get("seconds") or 0.0 for session in self.manifest["sessions"])
        figures = [
            (f"{len(store):,}", "captures"),
            (f"{store.tokens:,}", "tokens"),
            (
                gigabytes(store.bytes_stored),
                f"on disk, {store.bytes_stored / max(1, store.bytes_raw):.2f} of {gigabytes(store.bytes_raw)} raw",
            ),
            (duration(seconds), "in one session" if sessions == 1 else f"in {sessions} sessions"),
        ]
        return (
            '<div class="figures">'
            + "".join(f"<div><b>{escape(b)}</b><span>{escape(s)}</span></div>" for b, s in figures)
            + "</div>"
        )

    def _check_table(self) -> str:
        rows = [
            [
                escape(check.what),
                f'<span class="{"ok" if check.ok else "no"}">{"yes" if check.ok else "no"}</span>',
                escape(check.value),
            ]
            for check in self.checks()
        ]
        return _table(["", "", ""], rows, raw=True)

    def _input(self) -> str:
        spec, rows, engine = self.manifest["spec"], self.manifest["rows"], self.manifest["engine"]
        settings = ", ".join(f"{key} {value}" for key, value in engine["settings"].items())
        facts = {
            "model": spec["target"],
            "revision": spec["revision"] or "not pinned",
            "weights, config": f"{spec['weights_hash'] or 'none'}, {spec['config_hash']}",
            "quantization": spec["quantization"] or "none",
            "tokenizer, template": f"{spec['tokenizer_hash'] or 'none'}, {spec['template_hash'] or 'none'}",
            "rows": f"{rows['rows']:,} rows, {rows['tokens']:,} tokens, {rows['path']}, content {rows['content_hash']}",
            "engine": f"{engine['name']} {engine['version']}" + (f" ({settings})" if settings else ""),
            "taps": f"{', '.join(map(str, spec['taps']))} of {spec['num_layers']} layers",
            "states": f"{spec['hidden_size']} × {spec['dtype']}, final state {'after' if spec['final_normed'] else 'before'} the final norm",
        }
        return _facts(facts)

    def _output(self) -> str:
        lengths = self.store.lengths()
        buckets = length_buckets(lengths) if len(lengths) else []
        shards = self.store.index.shards
        facts = {
            "store": f"{len(shards):,} shards, {gigabytes(self.store.bytes_stored)}, codec {self.store.codec}",
            "tokens a capture": f"mean {float(np.mean(lengths)):,.0f}, longest {int(lengths.max()):,}"
            if len(lengths)
            else "none",
            "supervised tokens": f"{self.store.supervised:,} ({self.store.supervised / max(1, self.store.tokens):.1%})",
        }
        labels = [f"≤ {bucket.longest:,}" for bucket in buckets]
        return (
            _facts(facts)
            + "<h3>Captures by length in tokens</h3>"
            + bar_plot(labels, [bucket.rows for bucket in buckets], lambda v: f"{v:,.0f}")
            + "<h3>Norms of the states, tap by tap</h3>"
            + norm_plot(self.status.norms)
        )

    def _sessions(self) -> str:
        rows = []
        for session in self.manifest["sessions"]:
            result = session.get("result") or {}
            rows.append(
                [
                    session["started"],
                    session["outcome"] if session["ended"] else "no end recorded",
                    duration(session.get("seconds")),
                    f"{result.get('stored', 0):,}",
                    f"{result.get('tokens_per_second', 0):,.0f}",
                    session["host"],
                ]
            )
        plot = line_plot(self.course["t"], self.course["tokens_per_second"], lambda v: f"{v:,.0f}", duration)
        done = line_plot(self.course["t"], self.course["bytes_stored"], gigabytes, duration)
        heads = ["started (UTC)", "outcome", "took", "captures", "tokens/s", "host"]
        return (
            _table(heads, rows, numbers=(2, 3, 4))
            + f"<h3>Tokens a second</h3>{plot}<h3>Bytes sealed</h3>{done}"
            + self._pauses()
        )

    def _pauses(self) -> str:
        kinds = ("pause", "unpause", "engine_lost", "engine_back", "stopping")
        rows = [
            [str(e["event"]).replace("_", " "), str(e.get("message", ""))]
            for e in read_events(self.files.events)
            if e["event"] in kinds
        ]
        return f"<h3>Interruptions</h3>{_table(['', ''], rows[-100:])}" if rows else ""

    def _later_stages(self) -> str:
        run = self.whole_run
        if run is None or "seconds_by_stage" not in run:
            return ""
        facts = {
            "seconds by stage": ", ".join(
                f"{name} {seconds:,.0f}" for name, seconds in run["seconds_by_stage"].items()
            )
        }
        if "val_accuracy" in run:
            facts["held-out accuracy"] = (
                " ".join(f"{value:.3f}" for value in run["val_accuracy"]) + " by position"
            )
        if "acceptance_length" in run:
            facts["acceptance length"] = (
                f"{run['acceptance_length']:.3f} measured, against 1.0 without a drafter"
            )
        return "<h2>What was made of it</h2>" + _facts(facts)

    def _failure_table(self) -> str:
        if not self.failures:
            return ""
        shown = self.failures[:SHOWN_FAILURES]
        rows = [
            [row.failure.kind, row.failure.key[:16], str(row.tries), row.origin, row.failure.message]
            for row in shown
        ]
        more = f'<p class="sub">{len(self.failures) - len(shown):,} more in {escape(str(self.files.failures))}</p>'
        return (
            f"<h2>Rows without a capture ({len(self.failures):,})</h2>"
            + _table(["reason", "key", "tries", "from", "message"], rows)
            + (more if len(self.failures) > len(shown) else "")
        )


def write_report(run: Path, out: Path) -> dict[str, Any]:
    """Write the report of the run at ``run`` to ``out``. Raises InputError when there is no run, or nothing captured."""
    report = Report(run)
    data = report.html().encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as file:
        file.write(data)
    checks = report.checks()
    return {
        "out": str(out),
        "bytes": len(data),
        "checks": {check.what: check.ok for check in checks},
        "state": report.status.state,
    }


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: tuple[int, ...] = (), raw: bool = False
) -> str:
    def cell(name: str, index: int, text: str) -> str:
        look = ' class="number"' if index in numbers else ""
        return f"<{name}{look}>{text if raw else escape(text)}</{name}>"

    head = "".join(cell("th", index, text) for index, text in enumerate(heads)) if any(heads) else ""
    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _facts(facts: dict[str, str]) -> str:
    return '<div class="facts">' + _table(["", ""], list(facts.items())) + "</div>"
