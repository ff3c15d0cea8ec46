"""The web page's server: what it tells, whom it tells, what it refuses; the metrics that Prometheus reads."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from headrace.cli import main
from headrace.errors import ConfigError, InputError
from headrace.monitor.config import MonitorConfig
from headrace.monitor.guard import is_loopback
from headrace.monitor.web import STATIC, make_app, serve

from .conftest import TOKENS

LOCAL = "http://localhost"


def test_endpoints(finished: Path) -> None:
    client = TestClient(make_app(finished), base_url=LOCAL)
    assert "<title>Headrace</title>" in client.get("/").text
    assert client.get("/api/status").json()["state"] == "finished"
    assert client.get("/api/history").json()["tokens_done"][-1] == TOKENS
    assert client.get("/static/app.js").status_code == 200
    assert client.get("/static/../web.py").status_code == 404
    assert client.get("/api/nothing").status_code == 404


def test_metrics(failed: Path) -> None:
    text = TestClient(make_app(failed), base_url=LOCAL).get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["headrace_up"].samples[0].value == 0
    assert families["headrace_tokens_total"].samples[0].value == TOKENS
    assert families["headrace_rows_set_aside"].samples[0].value == 5
    kinds = {sample.labels["kind"]: sample.value for sample in families["headrace_errors"].samples}
    assert kinds["non_finite"] == 15
    taps = {sample.labels["tap"] for sample in families["headrace_state_norm"].samples}
    assert taps == {"2", "4", "5", "final"}


def test_nothing_comes_from_elsewhere(finished: Path) -> None:
    """No outside address in any file of the page, and a policy that would refuse one."""
    for file in STATIC.iterdir():
        found = set(
            re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r"^\s*//.*$", "", file.read_text(), flags=re.M))
        )
        assert found <= {"http://www.w3.org"}, file  # the name of the SVG namespace, never fetched
    policy = TestClient(make_app(finished), base_url=LOCAL).get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe" not in policy


def test_without_a_token_only_loopback_names_are_answered(finished: Path) -> None:
    """A foreign page whose name resolves to 127.0.0.1 must not be able to read the run."""
    app = make_app(finished)
    for good in ("http://localhost:8787", "http://127.0.0.1:8787", "http://[::1]:8787"):
        assert TestClient(app, base_url=good).get("/api/status").status_code == 200
    for bad in ("http://evil.example", "http://127.0.0.1.evil.example:8787"):
        assert TestClient(app, base_url=bad).get("/api/status").status_code == 421


def test_with_a_token_everything_needs_it(finished: Path) -> None:
    app = make_app(finished, token="s3cret")
    base = "http://machine.example:8787"
    for path in ("/", "/api/status", "/api/history", "/metrics", "/static/app.js"):
        answer = TestClient(app, base_url=base).get(path)
        assert answer.status_code == 401 and "s3cret" not in answer.text
        assert TestClient(app, base_url=base).get(path, params={"token": "wrong"}).status_code == 401
        bearer = {"authorization": "Bearer s3cret"}
        assert TestClient(app, base_url=base).get(path, headers=bearer).status_code == 200
    visitor = TestClient(app, base_url=base)
    first = visitor.get("/", params={"token": "s3cret"}, follow_redirects=False)
    assert first.status_code == 303 and first.headers["location"] == "/"  # the secret leaves the address bar
    assert "HttpOnly" in first.headers["set-cookie"] and "SameSite=strict" in first.headers["set-cookie"]
    assert visitor.get("/api/status").status_code == 200  # the cookie speaks now


@pytest.mark.parametrize(
    ("loopback", "hosts"),
    [
        (True, ("127.0.0.1", "127.3.2.1", "::1", "localhost")),
        (False, ("0.0.0.0", "10.0.0.1", "machine", "", "::")),
    ],
)
def test_what_is_loopback(loopback: bool, hosts: tuple[str, ...]) -> None:
    assert all(is_loopback(host) is loopback for host in hosts)


def test_no_run_and_a_taken_port(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError):
        make_app(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
            serve(MonitorConfig(run=finished, port=port), lambda text: None)
    assert main(["monitor", str(tmp_path)]) == 2


def start_monitor(run: Path, *args: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "headrace", "monitor", str(run), "--port", "0", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, re.search(r"http://\S+", line)[0]  # type: ignore[index]


def test_open_to_others_only_with_a_token(finished: Path) -> None:
    process, url = start_monitor(finished, "--host", "0.0.0.0")
    try:
        found = re.search(r":(\d+)/\?token=([\w-]{20,})$", url)
        assert found is not None, url
        metrics = f"http://127.0.0.1:{found[1]}/metrics"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(metrics)
        request = urllib.request.Request(metrics, headers={"Authorization": f"Bearer {found[2]}"})
        with urllib.request.urlopen(request) as answer:
            assert b"headrace_tokens_done" in answer.read()
    finally:
        process.terminate()
        process.wait(20)


def test_ctrl_c_ends_it_well(finished: Path) -> None:
    process, url = start_monitor(finished)
    with urllib.request.urlopen(url) as answer:
        assert answer.status == 200
    process.send_signal(2)
    assert process.wait(20) == 0
