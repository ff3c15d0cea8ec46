"""The report: one file that needs nothing else, says what is so and what is not, and never shows markup from data."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.errors import InputError
from headrace.extract.config import ExtractConfig
from headrace.extract.ledger import FailedRow, FailureFile
from headrace.monitor.report import Report, write_report
from headrace.monitor.svg import nice_top
from headrace.testing.extraction import (
    extraction_process,
    kill_after,
    make_rows,
    run_until_finished,
    write_rows,
)
from headrace.types import Failure

from .conftest import POISON, ROWS, TOKENS, MakeConfig

pytestmark = pytest.mark.slow


class Balance(HTMLParser):
    """Every tag that opens closes, in order; what the file would load is kept."""

    VOID = frozenset({"meta", "link", "img", "br", "line", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that closes itself."""

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_finished_run(finished: Path, tmp_path: Path) -> None:
    result = write_report(finished, tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text()
    assert result["bytes"] == len(page.encode()) and result["state"] == "finished"
    parsed = Balance(page)
    assert parsed.loads == [] and "url(" not in page and "<script" not in page
    words = " ".join(parsed.text)
    for part in (
        f"{len(ROWS):,} rows = {len(ROWS):,} stored",
        f"{TOKENS:,}",
        "2, 4, 5, final of 8 layers",
        "fake 0.1.0",
        "boundary 4",
        "headrace verify proves it",
    ):
        assert part in words, part
    assert page.count("<svg") == 4
    assert {what: ok for what, ok in result["checks"].items() if not ok} == {"the store was verified": False}


def test_a_failed_run_names_its_rows(failed: Path, tmp_path: Path) -> None:
    write_report(failed, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Not so: the extraction finished (failed)" in page
    assert all(key[:16] in page for key in POISON)
    assert "1,200 rows = 1,195 stored + 0 skipped + 5 failed + 0 not reached" in page


def test_what_other_stages_left_is_told(finished: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "store").symlink_to(finished)
    (tmp_path / "verify").mkdir()
    verification = {"verify_ok": True, "faults": [], "sample": {"captures": 459}}
    (tmp_path / "verify" / "report.json").write_text(json.dumps(verification))
    run = {
        "seconds_by_stage": {"prepare": 3, "extract": 5},
        "val_accuracy": [0.7, 0.65],
        "acceptance_length": 2.345,
    }
    (tmp_path / "report.json").write_text(json.dumps(run))
    report = Report(tmp_path)
    assert all(check.ok for check in report.checks())
    page = report.html()
    assert "Complete, accounted for and verified." in page
    assert "459 captures extracted again" in page and "2.345 measured" in page
    verification |= {"verify_ok": False, "faults": [{"code": "boundary_shifted"}]}
    (tmp_path / "verify" / "report.json").write_text(json.dumps(verification))
    assert "boundary_shifted" in Report(tmp_path).html()


def test_sessions_and_interruptions_are_told(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "store")
    slow = config.model_copy(
        update={"engine_options": {"tokens_in_flight": 4000, "tokens_per_second": TOKENS / 4}}
    )
    assert kill_after(extraction_process(slow), 1.5, 15) == 130
    run_until_finished(lambda: extraction_process(config))
    page = Report(config.out).html()
    assert "in 2 sessions" in page and "interrupted" in page and "finished" in page
    assert "stopped by SIGTERM" in page


def test_text_from_data_is_no_markup(config_only: Path, tmp_path: Path) -> None:
    config = ExtractConfig(
        rows=write_rows(tmp_path / "rows", make_rows(30)),
        model=str(config_only),
        out=tmp_path / "store",
        engine="fake",
    )
    run_until_finished(lambda: extraction_process(config))
    evil = Failure("f" * 32, "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>')
    FailureFile(config.out / "extract" / "failures.jsonl").add(FailedRow(evil, 1, 3, "<b>file</b>.jsonl:1"))
    page = Report(config.out).html()
    assert "<script>" not in page and "<img" not in page and "<b>file" not in page
    assert "&lt;script&gt;alert(1)" in page
    Balance(page)


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no extraction"):
        write_report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_the_command(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.html"
    assert main(["report", str(finished), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"]["the account adds up"] is True
    assert re.match(r"<!doctype html>\n<html lang", out.read_text())


@pytest.mark.parametrize(("value", "top"), [(0, 1), (7, 8), (13, 15), (2612, 3000), (0.034, 0.04)])
def test_axes_end_at_round_figures(value: float, top: float) -> None:
    assert nice_top(value) == pytest.approx(top)
