"""XP-08: what an engine is told is what it captures, and what it captures is what an import makes of it, in every family."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.draft.checkpoint import load_draft, save_draft
from headrace.draft.config import DraftConfig, ImportConfig
from headrace.draft.export import export
from headrace.draft.foreign import import_draft
from headrace.draft.layerids import EngineName, boundaries, layer_ids
from headrace.draft.serving import ExportConfig
from headrace.errors import ConfigError
from headrace.target import Target
from headrace.testing.envs import engine_env
from headrace.testing.models import make_config_only, make_tiny_model

from .toys import toy_draft

LAYERS = 7
# SGLang's file a family, the class in it, and model types that it serves.
SOURCES = {
    "llama": ("llama", "LlamaForCausalLM", ["llama"]),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", ["qwen3"]),
    "deepseek": ("deepseek_v2", "DeepseekV2ForCausalLM", ["deepseek_v3", "kimi_k2", "glm_moe_dsa"]),
    "glm": ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", ["glm4_moe_lite"]),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM", ["gpt_oss"]),
}


def target_of(folder: Path, model_type: str) -> Target:
    """A config-only target of LAYERS layers of one family."""
    make_config_only(folder, layers=LAYERS)
    return retyped(folder, model_type)


def retyped(folder: Path, model_type: str) -> Target:
    """The same folder under another family's name: only the name decides how SGLang reads layer ids."""
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    return Target.open(str(folder))


def sglangs_site(version: str) -> Path:
    """Where the release's packages are: below the thin environment that adds ours to them."""
    thin = next(engine_env(f"sglang-{version}").parents[1].glob("lib/python*/site-packages"))
    named = re.findall(r"addsitedir\('([^']+)'\)", "".join(f.read_text() for f in thin.glob("*.pth")))
    return next(p for p in (thin, *map(Path, named)) if (p / "sglang").is_dir())


def sglangs_reading(site: Path, module: str, name: str) -> Callable[[list[int]], list[int]]:
    """SGLang's own ``set_eagle3_layers_to_capture``, taken out of its installed source: layer ids → inputs it captures."""
    tree = ast.parse((site / "sglang/srt/models" / f"{module}.py").read_text())
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    body = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "set_eagle3_layers_to_capture"]  # fmt: skip
    body[0].args.args[1].annotation = None
    scope: dict[str, Any] = {}
    exec(compile(ast.Module(body, []), module, "exec"), scope)

    def read(ids: list[int]) -> list[int]:
        model = SimpleNamespace(
            pp_group=SimpleNamespace(is_last_rank=True),
            config=SimpleNamespace(num_hidden_layers=LAYERS),
            model=SimpleNamespace(),
        )
        scope["set_eagle3_layers_to_capture"](model, ids)
        return list(model.model.layers_to_capture)

    return read


@pytest.mark.sglang
@pytest.mark.parametrize("family", SOURCES)
@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_we_read_ids_as_sglang_does(family: str, version: str, tmp_path: Path) -> None:
    """Every list of two or three ascending ids, by the engine's own code."""
    site = sglangs_site(version)
    module, name, model_types = SOURCES[family]
    read = sglangs_reading(site, module, name)
    for model_type in model_types:
        target = target_of(tmp_path / model_type, model_type)
        for count in (2, 3):
            for ids in itertools.combinations(range(LAYERS), count):
                assert list(boundaries(ids, target, "sglang")) == read(list(ids)), (model_type, ids)
            for taps in itertools.combinations(range(1, LAYERS), count):
                ours = layer_ids(taps, target, "sglang")
                assert (ours is None) == (
                    model_type in SOURCES["deepseek"][2] + ["glm4_moe_lite"] and taps[0] == 1
                )
                assert ours is None or tuple(read(ours)) == taps, (model_type, taps)


@pytest.mark.parametrize(
    ("model_type", "taps", "ids"),
    [
        ("llama", (2, 3, 4), [1, 2, 3]),
        ("llama", (1, 3, 5), [0, 2, 4]),
        ("deepseek_v3", (2, 3, 4), [1, 2, 3]),
        ("deepseek_v3", (3, 4, 5), [3, 4, 5]),
        ("kimi_k2", (4, 5), [4, 5]),
        ("kimi_k2", (1, 3, 4), None),
        ("gpt_oss", (3, 4, 5), [2, 3, 4]),
        ("gpt_oss", (1, 3, 4), [0, 2, 3]),
    ],
)
def test_ids_of_each_family(
    tmp_path: Path, model_type: str, taps: tuple[int, ...], ids: list[int] | None
) -> None:
    target = target_of(tmp_path / "t", model_type)
    assert layer_ids(taps, target, "sglang") == ids
    assert ids is None or boundaries(ids, target, "sglang") == taps
    assert layer_ids(taps, target, "vllm") == list(taps) == list(boundaries(taps, target, "vllm"))


def test_gpt_oss_lists_with_the_last_boundary_are_boundaries(tmp_path: Path) -> None:
    target = target_of(tmp_path / "t", "gpt_oss")
    assert boundaries([2, 4, LAYERS], target, "sglang") == (2, 4, LAYERS)
    assert boundaries([2, 4, LAYERS - 1], target, "sglang") == (3, 5, LAYERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A real tiny model of the families there is one of; the others are it under another name."""
    folder = tmp_path_factory.mktemp("families")
    made = {
        family: make_tiny_model(folder / family, family, layers=LAYERS, hidden=32, vocab=96)
        for family in ("llama", "deepseek_v3")
    }
    for family in ("kimi_k2", "gpt_oss"):
        made[family] = make_tiny_model(folder / family, "llama", layers=LAYERS, hidden=32, vocab=96)
        retyped(made[family], family)
    return made


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "kimi_k2", "gpt_oss"])
@pytest.mark.parametrize("taps", [(2, 3, 4), (3, 4, 5), (4, 6), (5, 2, 3), (1, 3, 4)])
def test_an_export_comes_back_as_the_same_taps_and_bits(
    folders: dict[str, Path], family: str, engine: EngineName, taps: tuple[int, ...], tmp_path: Path
) -> None:
    target = Target.open(str(folders[family]))
    model = toy_draft(DraftConfig.for_target(target, taps, 40, fc_norm="each"), seed=4)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.embedding)
    save_draft(tmp_path / "draft", model, target.spec(taps), {})
    job = ExportConfig(draft=tmp_path / "draft", engine=engine, out=tmp_path / "out")
    if engine == "sglang" and family in ("deepseek_v3", "kimi_k2") and taps[0] == 1:
        with pytest.raises(ConfigError, match="one layer later"):
            export(job, lambda _: None)
        return
    export(job, lambda _: None)
    import_draft(ImportConfig(draft=job.out, model=str(target.path), out=tmp_path / "back"), lambda _: None)
    back = load_draft(tmp_path / "back", target).model
    assert back.config.taps == tuple(sorted(taps))
    ours, theirs = model.state_dict(), back.state_dict()
    # Engines fuse in layer order, so the columns of fc and the norms come back in that order, and nothing else moves.
    order = sorted(range(len(taps)), key=lambda i: taps[i])
    parts = ours["fc.weight"].chunk(len(taps), dim=1)
    ours["fc.weight"] = torch.cat([parts[i] for i in order], dim=1)
    norms = [ours[f"fc_norm.{i}.weight"] for i in order]
    ours |= {f"fc_norm.{place}.weight": norm for place, norm in enumerate(norms)}
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
