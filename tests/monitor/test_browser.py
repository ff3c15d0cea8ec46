"""The page in a real browser: it shows the run, moves by itself, fits a phone, and asks nobody else for anything.

Screenshots are kept in ``HEADRACE_ARTIFACTS`` (default: ``artifacts/`` in the working folder) to be looked at.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import uvicorn

from headrace.monitor.web import _listen, make_app

from .browser import Browser, find_chromium
from .conftest import POISON

pytestmark = [pytest.mark.browser, pytest.mark.slow]
ARTIFACTS = Path(os.environ.get("HEADRACE_ARTIFACTS", "artifacts"))
DESK, PHONE = (1280, 900), (390, 844)
READY = (
    "document.querySelectorAll('.tile').length >= 6 && document.querySelectorAll('.norms .box').length === 4"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_chromium() is None:
        assert not os.environ.get("CI"), "CI must have a browser: apt-get install chromium"
        pytest.skip("no Chromium here; apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def serve() -> Iterator[object]:
    """Starts the page's server for a run and gives its address."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(run: Path) -> str:
        socket = _listen("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(make_app(run), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{socket.getsockname()[1]}/"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


def assert_clean(browser: Browser, url: str) -> None:
    """No script error, and no request to any other place than the monitor."""
    assert browser.errors == []
    assert browser.requests and all(r.startswith((url, "data:")) for r in browser.requests), browser.requests


def test_a_failed_run_on_a_desk(browser: Browser, serve, failed: Path) -> None:  # type: ignore[no-untyped-def]
    url = serve(failed)
    browser.requests.clear()
    browser.open(url, *DESK)
    browser.wait(READY)
    assert browser.value("document.getElementById('state').textContent") == "failed"
    assert browser.value("document.getElementById('percent').textContent") == "100.0 %"
    assert "1,195 of 1,200 captures" in browser.value("document.getElementById('counts').textContent")
    assert "5 of 1200 rows failed" in browser.value("document.getElementById('error').textContent")
    rows = browser.value("[...document.querySelectorAll('#failures td.key')].map(cell => cell.textContent)")
    assert sorted(rows) == sorted(key[:12] for key in POISON)
    browser.wait("document.querySelector('#chart-rate path.line') !== null")
    browser.screenshot(ARTIFACTS / "monitor-desk.png")
    browser.open(url, *DESK, dark=True)
    browser.wait(f"{READY} && document.querySelector('#chart-rate path.line') !== null")
    browser.screenshot(ARTIFACTS / "monitor-dark.png")
    assert_clean(browser, url)


def test_a_running_run_on_a_phone_moves_by_itself(  # type: ignore[no-untyped-def]
    browser: Browser, serve, running: tuple[Path, ForkProcess]
) -> None:
    url = serve(running[0])
    browser.requests.clear()
    browser.open(url, *PHONE, mobile=True)
    browser.wait(READY, 60)
    assert browser.value("document.getElementById('state').textContent") == "running"
    before = browser.value("document.getElementById('counts').textContent")
    browser.wait(f"document.getElementById('counts').textContent !== {before!r}", 60)
    assert browser.value("document.documentElement.scrollWidth") <= PHONE[0], (
        "a phone must not scroll sideways"
    )
    smallest = browser.value(
        "Math.min(...[...document.querySelectorAll('main *')].filter(n => n.textContent.trim() && !n.children.length)"
        ".map(n => parseFloat(getComputedStyle(n).fontSize)))"
    )
    assert smallest >= 11
    browser.screenshot(ARTIFACTS / "monitor-phone.png")
    running[1].kill()
    browser.wait("document.getElementById('state').textContent === 'crashed'", 60)
    assert "it goes on" in browser.value("document.getElementById('error').textContent")
    assert_clean(browser, url)


def test_a_hovered_chart_tells_its_figures(browser: Browser, serve, finished: Path) -> None:  # type: ignore[no-untyped-def]
    url = serve(finished)
    browser.open(url, *DESK)
    browser.wait("document.querySelector('#chart-rate path.line') !== null")
    box = browser.value(
        "(() => { const b = document.querySelector('#chart-rate').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )
    browser.call(
        "Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * 0.9, y=box[1] + box[3] / 2
    )
    assert " at " in browser.wait("document.querySelector('#chart-rate .tip:not([hidden])')?.textContent")


def test_the_page_says_when_the_monitor_is_gone(browser: Browser, serve, finished: Path) -> None:  # type: ignore[no-untyped-def]
    url = serve(finished)
    browser.open(url, *DESK)
    browser.wait(READY)
    assert browser.value("document.getElementById('offline').hidden")
    browser.call(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )
    browser.wait("!document.getElementById('offline').hidden")
    browser.call(
        "Network.emulateNetworkConditions",
        offline=False,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )
    browser.wait("document.getElementById('offline').hidden")
    browser.errors.clear()
