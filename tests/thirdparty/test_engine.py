"""docs/add-an-engine.md: an engine of another package, found by its entry point, held to the contract, and extracting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import plugins
from headrace.data.rows import RowWriter
from headrace.engines import Engine, engine_names, open_engine
from headrace.errors import ConfigError, PreflightError
from headrace.store import Store
from headrace.target import Target
from headrace.testing.engine import EngineTests, Reference, mixed_rows, row_error, transformers_reference

from .conftest import headrace

pytestmark = pytest.mark.slow

TAPS = (0, 2, 3, "final")


class TestPlainEngine(EngineTests):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, site: Path, tiny_llama: Path) -> Iterator[Engine]:
        target = Target.open(str(tiny_llama))
        spec = target.spec(TAPS, dtype="float32")
        with open_engine("plain", target, spec, {"attention": "eager"}) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, tiny_llama: Path) -> Reference:
        return transformers_reference(tiny_llama, TAPS)


def test_it_is_found_only_where_it_is_installed(site: Path, tiny_llama: Path) -> None:
    target = Target.open(str(tiny_llama))
    assert {"plain", "hf", "sglang", "vllm"} <= set(engine_names())
    with pytest.raises(PreflightError, match="boundary 6"):
        open_engine("plain", target, target.spec([2, 6]))
    with pytest.raises(ConfigError, match="atention: is not a known key"):
        open_engine("plain", target, target.spec([2]), {"atention": "sdpa"})


def test_two_packages_that_claim_one_name_are_refused(site: Path, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[headrace.engines]\nplain = json:JSONDecoder\nodd = json:JSONDecoder\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"claimed by several packages.*json:JSONDecoder.*plain_engine"):
        plugins.load("headrace.engines", "plain", Engine)
    with pytest.raises(ConfigError, match=r"not a subclass of headrace\.engines\.base\.Engine"):
        plugins.load("headrace.engines", "odd", Engine)


def test_extract_through_it(site_folder: Path, tiny_llama: Path, tmp_path: Path) -> None:
    rows = mixed_rows(12, 40)
    with RowWriter(tmp_path / "rows", {"made_by": "tests"}) as writer:
        for row in rows:
            writer.add(row)
    command = (
        "extract",
        tmp_path / "rows",
        "--model",
        tiny_llama,
        "--taps",
        "0,2,3,final",
        "--engine",
        "plain",
    )
    done = headrace(None, *command, "--out", tmp_path / "none")
    assert done.code == 2 and "no engine named 'plain' is installed; there are ['fake'" in done.err
    done = headrace(
        site_folder, *command, "--engine-options", "attention=eager", "--out", tmp_path / "store", apart=True
    )
    assert done.code == 0, done.err
    store, truth = Store.open(tmp_path / "store"), transformers_reference(tiny_llama, TAPS)
    assert sorted(store.keys()) == sorted(row.key for row in rows)
    assert max(row_error(store[row.key].states, truth(row)) for row in rows) < 1e-5
    assert store.provenance["engine"]["name"] == "plain"
    assert store.provenance["engine"]["settings"]["attention"] == "eager"
