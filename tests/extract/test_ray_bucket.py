"""Many workers, one store in a bucket: workers and the driver killed, nothing lost, no credential written anywhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("moto")
pytest.importorskip("ray")

from headrace.store import Store
from headrace.testing.extraction import compare_store, make_rows, write_rows
from headrace.testing.s3 import KEY, SECRET, S3Server

from .test_ray import Driver, Hosts, config_for

pytestmark = pytest.mark.slow

ROWS = make_rows(600)


def test_workers_write_into_one_bucket(
    tmp_path: Path, config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    write_rows(tmp_path / "rows", ROWS)
    tokens = sum(map(len, ROWS))
    with S3Server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        hosts = Hosts()  # after the variables: each host has the credentials in its own environment
        try:
            options = {"tokens_in_flight": 500, "tokens_per_second": tokens / 12}
            config = config_for(
                tmp_path, config_only, ray=hosts.address, store=server.url("many"), engine_options=options,
                shard_bytes=tokens * 128 // 12,
            )  # fmt: skip
            driver = Driver(config)
            driver.start()
            driver.wait_for(lambda: driver.files.events.exists() and len(driver.workers()) >= 2)
            driver.wait_for_rows(1)
            os.kill(driver.workers()[0], signal.SIGKILL)
            driver.wait_for(lambda: len(driver.events("worker_lost")) >= 1)
            assert driver.process is not None
            driver.process.kill()
            driver.process.wait()
            before = len(Store.open(config.store))
            assert 0 < before < len(ROWS)
            driver.start()
            assert driver.process.wait(120) == 0, driver.log.read_text()
            comparison = compare_store(config.store, ROWS)
            assert comparison.equal, comparison
            end = driver.events("end")[-1]["result"]
            assert end["stored"] + end["skipped"] == len(ROWS) and end["skipped"] >= before
            workers = {event["worker"] for event in driver.events("worker_joined")}
            assert len(workers) >= 3, "two at first, and those of the second session"
        finally:
            hosts.cluster.shutdown()
    assert not (config.out / "shards").exists(), "captures are in the bucket alone"
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(secret.encode() in data for secret in (KEY, SECRET) for data in written)
