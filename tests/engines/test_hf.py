"""The reference engine against transformers' own ``output_hidden_states``, on seven families, and its conformance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.engines import Engine, open_engine
from headrace.engines.hf import HfEngine, HfOptions, computing_dtype, rows_apart, side_by_side
from headrace.errors import ConfigError, EngineError, SpecMismatchError
from headrace.target import Target
from headrace.testing.engine import EngineTests, Reference, mixed_rows, row_error
from headrace.testing.models import make_tiny_model
from headrace.types import Capture, Row


def hidden_states(model: torch.nn.Module, row: Row) -> list[torch.Tensor]:
    """transformers' own hidden states of one row alone: [tokens, hidden] each, the last one normed."""
    with torch.inference_mode():
        out = model(
            torch.from_numpy(row.ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False
        )
    return [state[0] for state in out.hidden_states]


class TestHf(EngineTests):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tiny_llama: Path) -> Iterator[Engine]:
        target = Target.open(str(tiny_llama))
        spec = target.spec([0, 2, 3, 6, "final"], dtype="float32")
        with open_engine("hf", target, spec, {"device": "cpu", "batch_tokens": 256}) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, engine: HfEngine) -> Reference:
        def states(row: Row) -> torch.Tensor:
            hs = hidden_states(engine.model, row)
            # Boundary 6 is before the final norm, which transformers does not return: take it from the last layer.
            return torch.stack([hs[0], hs[2], hs[3], last_layer_output(engine.model, row), hs[6]])

        return states


def last_layer_output(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """[tokens, hidden] output of the last decoder layer, by a hook of our own."""
    seen: list[torch.Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    hidden_states(model, row)
    handle.remove()
    return seen[0].reshape(len(row), -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_neox"]
)
def test_families(family: str, tmp_path: Path) -> None:
    """Boundaries equal transformers' list, the final state is norm(boundary N), and the head gives the model's logits."""
    target = Target.open(str(make_tiny_model(tmp_path / family, family, vocab=512)))
    n = target.num_layers
    with open_engine(
        "hf", target, target.spec([*range(n + 1), "final"], dtype="float32"), {"device": "cpu"}
    ) as engine:
        for result in engine.capture(iter(mixed_rows(6, 60))):
            assert isinstance(result, Capture)
            row = Row.make(result.ids, np.ones(len(result.ids)))
            hs = hidden_states(engine.model, row)  # type: ignore[attr-defined]
            for boundary in range(n):
                assert row_error(result.states[boundary], hs[boundary]) < 1e-5, boundary
            assert row_error(result.states[n + 1], hs[n]) < 1e-5
            assert row_error(target.final_norm(result.states[n]), result.states[n + 1]) < 1e-5
            assert row_error(result.states[n], result.states[n + 1]) > 0.01, "the norm must do something"
            with torch.inference_mode():
                logits = engine.model(torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0]  # type: ignore[attr-defined]
            assert row_error(target.head.logits(result.states[n + 1]), logits) < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gemma3"])
def test_packing_equals_padding(family: str, tmp_path: Path) -> None:
    """Rows laid end to end give the states they have alone: latent attention, experts and sliding windows included."""
    target = Target.open(str(make_tiny_model(tmp_path / family, family, vocab=512)))
    spec = target.spec([0, 3, "final"], dtype="float32")
    rows = mixed_rows(12, 100)
    results = {}
    for mode in ("off", "on"):
        options = {"device": "cpu", "packing": mode, "batch_tokens": 200}
        with open_engine("hf", target, spec, options) as engine:
            results[mode] = {c.key: c for c in engine.capture(iter(rows)) if isinstance(c, Capture)}
    for row in rows:
        np.testing.assert_array_equal(results["on"][row.key].ids, row.ids)
        assert row_error(results["on"][row.key].states, results["off"][row.key].states) < 1e-5


def test_a_leak_between_packed_documents_is_noticed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If attention crossed the border of two documents, packing must refuse itself."""
    from headrace.engines import packing

    real = packing.pack

    def leaking(documents: list[torch.Tensor], device: torch.device) -> dict[str, object]:
        inputs = real(documents, device)
        return {**inputs, "cu_seq_lens_q": inputs["cu_seq_lens_q"][[0, -1]]}

    monkeypatch.setattr(packing, "pack", leaking)
    target = Target.open(str(tiny_llama))
    with pytest.raises(EngineError, match="cannot be packed: packed states differ"):
        open_engine(
            "hf", target, target.spec("2,3,final", dtype="float32"), {"device": "cpu", "packing": "on"}
        )


def test_unnormed_final(tiny_llama: Path) -> None:
    target = Target.open(str(tiny_llama))
    with open_engine(
        "hf", target, target.spec([6, "final"], dtype="float32", final_normed=False), {"device": "cpu"}
    ) as engine:
        (result,) = engine.capture(iter(mixed_rows(1)))
        assert isinstance(result, Capture)
        assert torch.equal(result.states[0], result.states[1])


def test_bfloat16_is_the_models_own(tiny_llama: Path) -> None:
    """States come in the spec's dtype and are within bf16 noise of float32 ones."""
    target = Target.open(str(tiny_llama))
    rows = mixed_rows(8, 50)
    results = {}
    for dtype in ("float32", "bfloat16"):
        with open_engine("hf", target, target.spec("2,3,final", dtype=dtype), {"device": "cpu"}) as engine:
            results[dtype] = {c.key: c for c in engine.capture(iter(rows)) if isinstance(c, Capture)}
    errors = [row_error(results["bfloat16"][r.key].states, results["float32"][r.key].states) for r in rows]
    assert 1e-4 < max(errors) < 0.1


@pytest.mark.parametrize(
    ("capability", "asked", "memory", "computed"),
    [
        ("AVX2", "", 1e12, "float32"),
        ("AVX2", "bfloat16", 1e12, "bfloat16"),
        ("AVX2", "", 1e6, "bfloat16"),
        ("AVX512", "", 1e12, "bfloat16"),
        ("DEFAULT", "", 1e12, "bfloat16"),
    ],
)
def test_a_processor_without_16_bit_floats_computes_in_float32(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    asked: str,
    memory: float,
    computed: str,
) -> None:
    """Several times faster; states are rounded to the spec's dtype once, and the store's provenance says it."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=memory))
    target = Target.open(str(tiny_llama))
    rows = mixed_rows(3, 50)
    states = {}
    for dtype, options in (("float32", {}), ("bfloat16", {"dtype": asked})):
        spec = target.spec("2,3,final", dtype=dtype)
        with open_engine("hf", target, spec, {"device": "cpu", **options}) as engine:
            assert engine.info.settings["dtype"] == (computed if dtype == "bfloat16" else "float32")
            states[dtype] = {c.key: c.states for c in engine.capture(iter(rows)) if isinstance(c, Capture)}
    monkeypatch.setattr(Target, "quantization", "awq")
    assert computing_dtype(target, "bfloat16", "cpu") == "bfloat16"
    rounded = all(torch.equal(states["bfloat16"][row.key], states["float32"][row.key].bfloat16()) for row in rows)  # fmt: skip
    assert rounded == (computed == "float32")


def test_refuses_a_spec_of_another_target(tiny_llama: Path, tmp_path: Path) -> None:
    other = Target.open(str(make_tiny_model(tmp_path / "other", vocab=512, seed=1)))
    with pytest.raises(SpecMismatchError, match="another target"):
        open_engine("hf", other, Target.open(str(tiny_llama)).spec("last"), {"device": "cpu"})


def test_names_what_is_wrong(tiny_llama: Path, tmp_path: Path) -> None:
    target = Target.open(str(tiny_llama))
    with pytest.raises(ConfigError, match="no engine named 'nope'"):
        open_engine("nope", target, target.spec("last"))
    with pytest.raises(ConfigError, match="batch_size: is not a known key"):
        open_engine("hf", target, target.spec("last"), {"batch_size": 3})
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    empty = Target.open(str(tmp_path))
    with pytest.raises(EngineError, match="cannot load"):
        open_engine("hf", empty, empty.spec("last"), {"device": "cpu"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 7}, "not a multiple of the number of attention heads|size mismatch"),
        ({}, "invalid header|header"),
    ],
)
def test_a_folder_that_contradicts_itself(
    tiny_llama: Path, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    """transformers lets errors of other libraries through for these; ours name the folder."""
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tiny_llama / "config.json").read_text()) | change)
    )
    weights = (tiny_llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights if change else weights[:300])
    target = Target.open(str(tmp_path))
    with pytest.raises(EngineError, match=message) as caught:
        open_engine("hf", target, target.spec("last"), {"device": "cpu"})
    assert str(tmp_path) in str(caught.value)


def test_rows_lie_side_by_side_and_come_apart() -> None:
    """Of a padded forward (a gap after each row) and of a packed one, as they travel to the host on CUDA."""
    taps = [torch.arange(60.0).reshape(20, 3) + 1000 * tap for tap in range(4)]
    for spans in ([slice(0, 5), slice(10, 17)], [slice(0, 5), slice(5, 17), slice(17, 18)]):
        moved = side_by_side(taps, spans, torch.float64)
        rows = rows_apart(moved, [span.stop - span.start for span in spans], len(taps))
        assert len(rows) == len(spans)
        for row, span in zip(rows, spans, strict=True):
            assert row.is_contiguous() and row.dtype == torch.float64
            assert torch.equal(row, torch.stack([tap[span] for tap in taps]).double())


def test_nothing_of_a_forward_is_kept(tiny_llama: Path) -> None:
    """The taps of the last batch would hold device memory until the next."""
    target = Target.open(str(tiny_llama))
    with HfEngine.open(target, target.spec([0, 2], dtype="float32"), HfOptions(device="cpu")) as engine:
        (capture,) = engine.capture([Row.make([1, 2, 3], [True] * 3)])
        assert not engine._taps.states
    assert isinstance(capture, Capture)
    before = capture.states.clone()
    capture.states.mul_(2)  # and what was captured belongs to whoever got it
    assert torch.equal(capture.states, 2 * before)
