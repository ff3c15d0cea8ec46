"""The documentation as a reader meets it: built strictly, opened in a real browser from a folder, on a desk and on a phone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .monitor.browser import Browser, find_chromium

ROOT = Path(__file__).parent.parent
PAGES = ("index", "tutorial", "commands", "api", "engines", "code")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), "a warning is an error"
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk", "phone"])
def test_pages_fit_and_load_nothing_from_elsewhere(
    site: Path, browser: Browser, page: str, width: int, dark: bool
) -> None:
    browser.open((site / f"{page}.html").as_uri(), width, 900, dark=dark, mobile=width < 500)
    browser.wait("document.readyState === 'complete' && document.querySelector('article h1') !== null")
    overflow = browser.value("document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0, f"{page} is {overflow} pixels too wide"
    assert browser.value("[...document.images].every(image => image.naturalWidth > 0)")
    if shots := os.environ.get("HEADRACE_SHOTS"):
        browser.screenshot(Path(shots) / f"{page}-{width}.png")
    outside = [url for url in browser.requests if not url.startswith(("file:", "data:", "about:", "blob:"))]
    assert not outside, outside


def test_the_reference_shows_what_the_code_says(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in ("CaptureSpec", "EngineTests", "StoreWriter", "DraftMethod"):
        assert name in text
    assert ":class:`" not in text and ":meth:`" not in text
    assert "int32 [tokens]" in text, "attribute docstrings are part of the reference"
