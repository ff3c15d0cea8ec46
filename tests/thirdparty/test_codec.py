"""docs/add-a-codec.md: a codec of another package, held to the contract of codecs, and in a store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.store import Store
from headrace.store.codecs import codec_class
from headrace.testing.store import (
    CodecTests,
    flip_bit,
    make_row,
    make_spec,
    make_states,
    same_bits,
    shard_files,
    write_store,
)

from .byteplanes_codec import BytePlanes
from .conftest import headrace, installed

pytestmark = pytest.mark.slow


class TestBytePlanes(CodecTests):
    codec = BytePlanes


def test_convert_check_and_read(site_folder: Path, tmp_path: Path) -> None:
    spec = make_spec(dtype="float32", hidden_size=256)
    rows = [make_row(seed, 40) for seed in range(4)]
    write_store(tmp_path / "raw", rows, spec, codec="raw")
    small = tmp_path / "small"
    command = ("convert", tmp_path / "raw", "--codec", "byte-planes", "--out", small)
    done = headrace(None, *command)
    assert done.code == 2 and "no codec named 'byte-planes' is installed" in done.err
    assert headrace(site_folder, *command).code == 0
    with installed(site_folder):
        store = Store.open(small)
        assert store.codec == "byte-planes" and store.bytes_stored < Store.open(tmp_path / "raw").bytes_stored
        assert all(same_bits(store[row.key].states, make_states(row, spec)) for row in rows)
    assert headrace(site_folder, "check", small).code == 0
    flip_bit(shard_files(small)[0], shard_files(small)[0].stat().st_size - 9)
    assert headrace(site_folder, "check", small).code == 1


def test_a_store_says_which_codec_it_lacks(site_folder: Path, tmp_path: Path) -> None:
    assert str(site_folder) not in sys.path
    with pytest.raises(
        ConfigError, match=r"no codec named 'byte-planes'.*'bf16-planes', 'fp8', 'raw'.*headrace\.codecs"
    ):
        codec_class("byte-planes")


def test_a_name_that_would_not_lead_back_is_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "renamed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: renamed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.codecs]\nbetter = byteplanes_codec:BytePlanes\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="codec 'better' calls itself 'byte-planes'"):
        codec_class("better")


def test_plan_knows_it(site_folder: Path, tmp_path: Path, config_only: Path) -> None:
    command = ("plan", "--num-rows", 10, "--num-tokens", 1000, "--max-tokens", 200, "--model", config_only)
    command = (*command, "--out", tmp_path / "store", "--codec", "byte-planes")
    assert headrace(None, *command).code == 2
    done = headrace(site_folder, *command)
    assert done.code == 0 and "byte-planes" in done.out, done.err
