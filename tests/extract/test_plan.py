"""The plan: figures by hand, the mission's own case, and the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli import main
from headrace.errors import ConfigError, InputError
from headrace.extract.config import ExtractConfig, PlanConfig
from headrace.extract.plan import CODEC_RATIOS, plan, usual_codec
from headrace.extract.run import extract
from headrace.store.codecs import default_codec
from headrace.testing.extraction import make_rows, write_rows
from headrace.types import Row

RECIPES = Path(__file__).parents[2] / "recipes"
MISSION: dict[str, Any] = {
    "num_rows": 37_312,
    "num_tokens": 87_800_000,
    "max_tokens": 8192,
    "num_layers": 61,
    "hidden_size": 7168,
    "taps": "3,31,59,final",
}


def roomy() -> int:
    return 1 << 40


def test_the_mission_takes_5_03_terabytes() -> None:
    result = plan(PlanConfig(**MISSION, rate=2612), roomy)
    assert result.shape.bytes_per_token == 57_344
    assert result.bytes_raw == 87_800_000 * 57_344 == 5_034_803_200_000
    assert result.hours == pytest.approx(9.337, abs=0.001)
    sizes = {codec.codec: codec for codec in result.codecs}
    assert sizes["raw"].shards == 4690
    assert sizes["bf16-planes"].bytes == pytest.approx(0.70 * 5.0348e12, rel=1e-3)


@pytest.mark.parametrize(("hidden", "terabytes"), [(2048, 1.44), (4096, 2.88), (5120, 3.60), (7168, 5.03)])
def test_sizes_of_the_cases(hidden: int, terabytes: float) -> None:
    """Cases, section 3: 87.8M tokens, three boundaries and the final state; float32 doubles it."""
    config = PlanConfig(**{**MISSION, "hidden_size": hidden})
    assert round(plan(config, roomy).bytes_raw / 1e12, 2) == terabytes
    double = plan(config.model_copy(update={"dtype": "float32"}), roomy)
    assert double.bytes_raw == 2 * plan(config, roomy).bytes_raw


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_usual_codec_is_the_stores_own(dtype: str) -> None:
    config = PlanConfig(**MISSION, dtype=dtype)
    assert plan(config, roomy).codec == usual_codec(dtype) == default_codec(dtype)
    with pytest.raises(ConfigError, match="bf16-planes cannot hold float32"):
        plan(config.model_copy(update={"dtype": "float32", "codec": "bf16-planes"}), roomy)


def test_the_recipe_says_so_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "--config", str(RECIPES / "kimi-k2.5.toml")])
    text = capsys.readouterr()
    assert "5.03 TB raw" in text.out and "37,312 captures, 87,800,000 tokens" in text.out
    assert code == (0 if "fits" in text.out.splitlines()[-1] else 3)
    assert code == 0 or "does not fit: the store needs 3.5" in text.err


def test_a_row_folder_is_counted(tmp_path: Path, config_only: Path) -> None:
    rows = [Row.make(np.arange(n), np.ones(n, bool)) for n in (10, 64, 65, 100, 300)]
    write_rows(tmp_path / "rows", rows)
    result = plan(PlanConfig(rows=tmp_path / "rows", model=str(config_only), out=tmp_path), roomy)
    assert (result.rows, result.tokens, result.longest) == (5, 539, 300)
    assert [(b.longest, b.rows, b.tokens) for b in result.lengths] == [
        (64, 2, 74),
        (128, 2, 165),
        (256, 0, 0),
        (512, 1, 300),
    ]
    assert result.bytes_raw == 539 * 4 * 16 * 2
    assert result.fits


def test_rows_that_are_not_there_yet_may_be_described(tmp_path: Path) -> None:
    assert plan(PlanConfig(**MISSION, rows=tmp_path / "later"), roomy).rows == 37_312


def test_it_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--num-rows", "10", "--num-tokens", "1000", "--num-layers", "8", "--hidden-size", "64"]
    assert main(["plan", *args, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["plan", *args, "--out", str(tmp_path), "--min-free", "9000TB", "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["fits"] is False and result["error"]["exit_code"] == 3
    assert "the store needs" in result["error"]["message"] and str(tmp_path) in result["error"]["message"]
    assert not plan(PlanConfig(**MISSION), lambda: 1 << 30).fits
    assert "memory" in " ".join(plan(PlanConfig(**MISSION), lambda: 1 << 30).shortages())


def test_an_engine_faster_than_one_process_is_given_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 1B shape on one H200: 176,190 tokens/s of 16,384 bytes are 2.89 GB/s, and one process took 1.2."""
    shape = {**MISSION, "num_layers": 16, "hidden_size": 2048, "taps": "2,8,13,final"}
    found = {n: plan(PlanConfig(**shape, rate=176_190, workers=n), roomy) for n in (0, 1, 2, 3, 8)}
    assert {n: p.workers for n, p in found.items()} == {0: 3, 1: 1, 2: 2, 3: 3, 8: 8}
    assert {n: round(p.rate) for n, p in found.items()} == {
        0: 176_190, 1: 73_242, 2: 146_484, 3: 176_190, 8: 176_190,
    }  # fmt: skip
    process = 1_500_000_000 + 2 * (1 << 30) + 16_384 * (65_536 + 2 * 8192 + 32_768)
    assert [found[n].memory - found[1].memory for n in (2, 3)] == [
        1_500_000_000 + process,
        1_500_000_000 + 2 * process,
    ], "two shards and an engine in each, and a driver"
    served = [plan(PlanConfig(**shape, workers=n, engine="sglang"), roomy).memory for n in (1, 2)]
    assert served[1] - served[0] == process + 1_500_000_000 - 65_536 * 16_384, "one server for both"
    assert plan(PlanConfig(**MISSION, rate=7_800), roomy).workers == 1
    assert plan(PlanConfig(**MISSION), roomy).workers == 1

    args = [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
    main(["plan", *args, "--rate", "176190", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "at 176,190 tokens/s with 3 workers" in said and "headrace extract --workers 3" in said
    main(["plan", *args, "--rate", "7000", "--out", str(tmp_path)])
    assert "workers" not in capsys.readouterr().out


def test_servers_need_staging(tmp_path: Path) -> None:
    here = plan(PlanConfig(**MISSION, out=tmp_path), roomy)
    assert [place.what for place in here.places] == ["the store"]
    served = plan(PlanConfig(**MISSION, out=tmp_path, engine="sglang", staging=tmp_path), roomy)
    assert [place.what for place in served.places] == ["the store", "staging"]
    assert served.places[1].need == 65_536 * 57_344


def test_a_measured_store_gives_rate_and_ratio(tmp_path: Path, config_only: Path) -> None:
    rows = write_rows(tmp_path / "rows", make_rows(200))
    done = extract(
        ExtractConfig(rows=rows, model=str(config_only), out=tmp_path / "store", engine="fake"),
        lambda text: None,
    )
    result = plan(PlanConfig(rows=rows, model=str(config_only), measured=tmp_path / "store"), roomy)
    assert result.rate == done["tokens_per_second"]
    ratios = {codec.codec: codec.ratio for codec in result.codecs}
    assert ratios["bf16-planes"] == done["ratio"] != CODEC_RATIOS["bf16-planes"]
    assert ratios["raw"] == 1.0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_rows": 0}, ConfigError, "--num-rows"),
        ({"hidden_size": 0}, ConfigError, "--model"),
        ({"taps": "3,99"}, ConfigError, "99"),
        ({"codec": "zip"}, ConfigError, "zip"),
        ({"dtype": "int8"}, ConfigError, "int8"),
        ({"measured": Path("nowhere")}, InputError, "nowhere"),
        ({"rows": Path("nowhere"), "num_rows": 0}, InputError, "nowhere"),
    ],
)
def test_what_is_not_described(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(PlanConfig(**{**MISSION, **changes}), roomy)
