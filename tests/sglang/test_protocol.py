"""What plug-in and client say to each other survives the trip, and anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.sglang_plugin.plugin import Plugin
from headrace.sglang_plugin.protocol import (
    KEY,
    Facts,
    PluginConfig,
    Refusal,
    Reply,
    Staged,
    Wish,
    taps_from_text,
    taps_to_text,
)
from headrace.sglang_plugin.releases import release

CONFIG = PluginConfig(
    taps=(2, 15, "final"), staging="/dev/shm/x", staging_bytes=1 << 30, run="abc", source="native"
)
FACTS = Facts(
    plugin="0.1.0",
    engine="0.5.23",
    run="abc",
    rank=1,
    staging="/dev/shm/x",
    staging_bytes=5,
    taps=("final", 2),
    source="native",
    dtype="bfloat16",
    num_layers=30,
    hidden_size=576,
    settings={"tp_size": 8},
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_round_trips() -> None:
    assert PluginConfig.from_json(CONFIG.to_json()) == CONFIG
    wish = Wish(owner="abc123", taps=("final", 4))
    assert Wish.from_params(through_json(wish.to_params())) == wish
    staged = Staged(name="abc.1/me-1.safetensors", seal="0" * 16, size=9, rows=3)
    for reply in (
        Reply(facts=FACTS, staged=staged),
        Reply(facts=FACTS, refusal=Refusal(kind="late", message="m")),
    ):
        assert Reply.from_meta({KEY: [through_json(reply.to_dict())]}) == reply
    for taps in ((), (2,), ("final", 3, 1)):
        assert taps_from_text(taps_to_text(taps)) == taps


def test_a_wish_carries_only_scalars_one_level_deep() -> None:
    """SGLang's message format carries no deeper values."""
    (value,) = Wish(owner="a", taps=(2, "final")).to_params().values()
    assert all(isinstance(item, (str, int)) for item in value.values())


@pytest.mark.parametrize("meta", [{}, {KEY: []}, {KEY: ["x"]}, {KEY: [{"protocol": 2}]}, {KEY: [{}, {}]}])
def test_no_proof(meta: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"proof|protocol"):
        Reply.from_meta(meta)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"taps": "2", "unknown": 1}', CONFIG.to_json().replace('"run"', '"ran"')]
)
def test_a_wrong_configuration_ends_the_process(text: str) -> None:
    """SGLang swallows exceptions of plug-ins; SystemExit it does not."""
    with pytest.raises(SystemExit, match="headrace serve"):
        Plugin.from_environment(text)


def test_releases_compare() -> None:
    assert release("0.5.15.post1") == (0, 5, 15)
    assert release("0.5.23+cu130") == (0, 5, 23)
    assert release("0.5.9") < release("0.5.17") < release("0.6")
