"""What the plug-in makes of SGLang's objects, with stand-ins that have exactly the attributes it may use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.sglang_plugin import compat
from headrace.types import FINAL


class Parallel(SimpleNamespace):
    """Sizes and ranks of a server that is not parallel, until changed."""

    def __init__(self, **changes: int) -> None:
        super().__init__(**{"pp_size": 1, "attn_tp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0, **changes})


def scheduler(**changes: Any) -> SimpleNamespace:
    found = {
        "server_args": SimpleNamespace(dp_size=1, enable_two_batch_overlap=changes.pop("tbo", False)),
        "disaggregation_mode": SimpleNamespace(value="null"),
        "spec_algorithm": SimpleNamespace(is_none=lambda: not changes.get("draft")),
        "is_generation": True,
    }
    return SimpleNamespace(**{**found, **changes})


@pytest.mark.parametrize(
    ("changes", "parallel", "reason"),
    [
        ({}, {}, None),
        ({}, {"pp_size": 2}, "pipeline"),
        ({"disaggregation_mode": SimpleNamespace(value="prefill")}, {}, "disaggregation"),
        ({"tbo": True}, {}, "two-batch"),
        ({"draft": True}, {}, "speculative"),
        ({"is_generation": False}, {}, "embedding"),
    ],
)
def test_obstacles_are_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], parallel: dict[str, int], reason: str | None
) -> None:
    monkeypatch.setattr(compat, "_parallel", lambda: Parallel(**parallel))
    found = compat.obstacles(scheduler(**changes))
    assert found == [] if reason is None else len(found) == 1 and reason in found[0]


def test_ranks_are_numbered_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, and attention groups inside each: no two that answer requests share a folder."""
    seen = set()
    for replica in range(3):
        for group in range(4):
            parallel = Parallel(dp_rank=replica, attn_dp_size=4, attn_dp_rank=group)
            monkeypatch.setattr(compat, "_parallel", lambda parallel=parallel: parallel)
            seen.add(compat.rank(scheduler()))
    assert seen == set(range(12))


def test_names_that_are_gone_are_found_before_sglang_drops_the_hooks() -> None:
    assert compat.check_names(["json.dumps", "json.JSONEncoder.encode"]) == []
    gone = ["json.nothing", "nothing.at.all", "json.JSONEncoder.nothing"]
    assert compat.check_names(["json.dumps", *gone]) == gone


def batch(lengths: list[int], starts: list[int], decoding: int = 0) -> SimpleNamespace:
    requests = [
        SimpleNamespace(
            rid=f"r{k}", origin_input_ids=[0] * 50, sampling_params=SimpleNamespace(custom_params={"k": k})
        )
        for k in range(len(lengths))
    ]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        reqs=requests,
        extend_lens=lengths,
        prefix_lens=starts,
        decoding_reqs=requests[len(requests) - decoding :] if decoding else None,
        input_ids=torch.arange(sum(lengths)),
    )


def test_segments_are_read_in_the_order_of_rows() -> None:
    found = list(compat.segments(batch([3, 5, 1], [10, 0, 49], decoding=1)) or ())
    assert [(s.rid, s.start, s.rows, s.prompt) for s in found] == [
        ("r0", 10, 3, 50),
        ("r1", 0, 5, 50),
        ("r2", 49, 1, 50),
    ]
    assert [s.wish for s in found] == [{"k": 0}, {"k": 1}, None], (
        "a decoding request's row is nobody's prompt"
    )
    decode = batch([1], [49])
    decode.forward_mode = SimpleNamespace(is_extend=lambda: False)
    assert compat.segments(decode) is None and compat.segments(None) is None


def layered(rows: int, boundaries: list[int]) -> torch.Tensor:
    """[rows, boundaries * 4]: boundary b is filled with b."""
    return torch.cat([torch.full((rows, 4), float(b)) for b in sorted(boundaries)], dim=-1)


def result(**output: Any) -> SimpleNamespace:
    return SimpleNamespace(logits_output=SimpleNamespace(**output))


def test_taps_come_out_in_the_order_asked() -> None:
    """EX-11: [33, final, 2, 18] although SGLang packs 2, 18, 33."""
    taps = (33, FINAL, 2, 18)
    packed, final = layered(8, [2, 18, 33]), torch.full((8, 4), -1.0)
    native = compat.native_states(
        batch([3, 5], [0, 0]), result(hidden_states=packed, last_hidden_states=final), [2, 18, 33], taps, 8
    )
    hooked = compat.hooked_states(
        batch([3, 5], [0, 0]), result(hidden_states=torch.cat([packed, final], -1)), [2, 18, 33], taps, 8
    )
    for states in (native, hooked):
        assert [float(part[0, 0]) for part in states.parts] == [33.0, -1.0, 2.0, 18.0]
        assert states.ids.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("output", "rows"),
    [
        ({"hidden_states": None, "last_hidden_states": None}, 8),
        ({"hidden_states": layered(8, [2, 4]), "last_hidden_states": None}, 8),
        ({"hidden_states": layered(7, [2, 4]), "last_hidden_states": torch.zeros(7, 4)}, 8),
        ({"hidden_states": layered(8, [2, 4])[:, :7], "last_hidden_states": torch.zeros(8, 4)}, 8),
        (
            {
                "hidden_states": layered(8, [2, 4]),
                "last_hidden_states": torch.zeros(8, 4, dtype=torch.bfloat16),
            },
            8,
        ),
        ({"hidden_states": layered(9, [2, 4]), "last_hidden_states": torch.zeros(9, 4)}, 9),
    ],
    ids=["no states", "no final", "rows lost", "width", "dtypes", "more rows than ids"],
)
def test_states_that_do_not_fit_are_never_fitted(output: dict[str, Any], rows: int) -> None:
    with pytest.raises(ValueError, match=r"states|wide"):
        compat.native_states(batch([3, 5], [0, 0]), result(**output), [2, 4], (2, 4, FINAL), rows)


def test_hook_packs_boundaries_and_the_final_state() -> None:
    full = SimpleNamespace(capture_hidden_mode=SimpleNamespace(is_full=lambda: True))
    last = SimpleNamespace(capture_hidden_mode=SimpleNamespace(is_full=lambda: False))
    hidden, auxiliary = torch.full((5, 4), 9.0), [torch.full((5, 4), 2.0), torch.full((5, 4), 3.0)]
    before_norm = torch.full((5, 4), 7.0)

    def stored(boundaries: list[int], aux: Any, metadata: Any = full) -> Any:
        return compat.stored_states(
            lambda *a, **k: "original", boundaries, None, hidden, before_norm, aux, 0, 0, 0, 0, metadata
        )

    assert stored([2, 3], auxiliary)[0].tolist() == [2.0] * 4 + [3.0] * 4 + [9.0] * 4
    assert torch.equal(stored([2, 3], torch.cat(auxiliary, -1)), stored([2, 3], auxiliary)), (
        "packed or listed"
    )
    assert torch.equal(stored([], None), hidden), (
        "after the norm, also where a model offers the state before it"
    )
    assert stored([2, 3], auxiliary, last) == "original"
    with pytest.raises(ValueError, match="captured 0 boundaries, 2 were asked"):
        stored([2, 3], None)


def test_replies_are_put_beside_their_requests() -> None:
    payload = SimpleNamespace(
        rids=["a", "b", "c"],
        finished_reasons=[{"type": "length"}, None, {"type": "abort"}],
        customized_info={},
    )
    assert list(compat.finished(payload)) == [(0, "a", False), (2, "c", True)]
    compat.attach(payload, "headrace", {2: {"x": 1}})
    assert payload.customized_info == {"headrace": [[], [], [{"x": 1}]]}


class Decoder(torch.nn.Module):
    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers_to_capture = layers


class Wrapper(torch.nn.Module):
    """A language model inside a multimodal class, as Kimi-K2.5's."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.vision_tower = torch.nn.Linear(2, 2)
        self.language_model = torch.nn.Module()
        self.language_model.model = Decoder(layers)


@pytest.mark.parametrize(("layers", "found"), [([5, 2], [2, 5]), ([], None)])
def test_layers_of_the_loaded_model_are_read_inside_wrappers(
    layers: list[int], found: list[int] | None
) -> None:
    runner = SimpleNamespace(model=Wrapper(layers))
    scheduler_ = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    assert compat.captured_boundaries(scheduler_) == found


def test_the_setter_that_means_layer_outputs_is_used() -> None:
    calls: list[tuple[str, list[int]]] = []
    both = SimpleNamespace(
        set_dflash_layers_to_capture=lambda ids: calls.append(("dflash", ids)),
        set_eagle3_layers_to_capture=lambda ids: calls.append(("eagle3", ids)),
    )
    compat.capture_boundaries(SimpleNamespace(model=both), [1, 5])
    del both.set_dflash_layers_to_capture
    compat.capture_boundaries(SimpleNamespace(model=both), [1, 5])
    assert calls == [("dflash", [0, 4]), ("eagle3", [0, 4])]
    with pytest.raises(ValueError, match="cannot capture boundaries"):
        compat.capture_boundaries(SimpleNamespace(model=SimpleNamespace()), [1])
