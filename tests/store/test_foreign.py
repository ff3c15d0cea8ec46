"""Other tools' files: read and written as those tools do, refused where they do not say what they hold."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import ConfigError, InputError, StoreError
from headrace.store import Store, StoreWriter
from headrace.store.config import ExportConfig, ImportConfig
from headrace.store.foreign.exporter import export_states
from headrace.store.foreign.importer import import_states
from headrace.target import Target
from headrace.testing.store import make_row, make_states, same_bits, write_store
from headrace.types import CaptureSpec, Row

pytestmark = pytest.mark.slow

LAYOUTS = ("four-pt", "specforge", "speculators", "modelopt")
ROWS = [make_row(seed, 5 * seed + 1) for seed in range(12)]


class Rows:
    """A row folder as far as an import looks at one."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def rows(self) -> Iterator[Row]:
        return iter(self._rows)

    def get(self, key: str) -> Row:
        return {row.key: row for row in self._rows}[key]


@pytest.fixture(scope="module")
def target(config_only: Path) -> Target:
    return Target.open(str(config_only))


@pytest.fixture
def spec(target: Target) -> CaptureSpec:
    return target.spec((2, 4, 5, "final"), dtype="bfloat16")


def to_import(layout: str, source: Path, target: Target, out: Path, **more: Any) -> ImportConfig:
    return ImportConfig(source=source, layout=layout, model=target.name, out=out, **more)  # type: ignore[arg-type]


def told(layout: str) -> dict[str, Any]:
    return {
        "layers": "2,4,5",
        "layers_are": "boundaries",
        "final": "unnormed" if layout == "speculators" else "normed",
    }


def holds(path: Path, rows: list[Row], final_normed: bool = True) -> None:
    store = Store.open(path)
    assert set(store) == {row.key for row in rows} and store.spec.final_normed == final_normed
    assert store.spec.taps == (2, 4, 5, "final")
    for row in rows:
        assert same_bits(store[row.key].states, make_states(row, store.spec))
        assert store[row.key].mask.tolist() == row.mask.tolist()  # type: ignore[union-attr]


# --- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(tmp_path: Path, target: Target, layout: str) -> None:
    normed = layout != "speculators"
    spec = target.spec((2, 4, 5, "final"), dtype="bfloat16", final_normed=normed)
    write_store(tmp_path / "a", ROWS, spec)
    result = export_states(ExportConfig(store=str(tmp_path / "a"), layout=layout, out=tmp_path / "f"))  # type: ignore[arg-type]
    assert result["samples"] == result["written"] == 12
    rows = Rows(ROWS) if layout == "four-pt" else None
    more = {"mask": "rows"} if layout == "four-pt" else {}
    # an export of ours says what it holds, so nothing has to be told
    result = import_states(to_import(layout, tmp_path / "f", target, tmp_path / "b", **more), rows)
    assert result["written"] == 12 and not result["dropped"]
    holds(tmp_path / "b", ROWS, normed)
    result = import_states(to_import(layout, tmp_path / "f", target, tmp_path / "b", **more), rows)
    assert result["present"] == 12 and "written" not in result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_interrupted_export_goes_on(tmp_path: Path, target: Target, layout: str) -> None:
    spec = target.spec((2, 4, 5, "final"), dtype="bfloat16", final_normed=layout != "speculators")
    write_store(tmp_path / "a", ROWS, spec)
    config = ExportConfig(store=str(tmp_path / "a"), layout=layout, out=tmp_path / "f")  # type: ignore[arg-type]

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_states(config, stop)
    assert export_states(config)["present"] == 5
    with pytest.raises(InputError, match="export of other captures"):
        export_states(config.model_copy(update={"limit": 3}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("")
    with pytest.raises(InputError, match="something else"):
        export_states(config.model_copy(update={"out": tmp_path / "other"}))


# --- files as the tools write them --------------------------------------------------------------------------------------


def write_specforge(folder: Path, rows: list[Row], spec: CaptureSpec, pack: bool = False) -> None:
    for number, row in enumerate(rows):
        states = make_states(row, spec)
        file = folder / f"rows_{number // 5 * 5}-{number // 5 * 5 + 5}" / f"data_{number}.ckpt"
        file.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "input_ids": torch.from_numpy(row.ids.astype(np.int64)),
            "loss_mask": torch.from_numpy(row.mask.astype(np.int64)),
            "hidden_state": states[3].clone().unsqueeze(0),
            "aux_hidden_state": torch.cat(list(states[:3]), dim=-1).unsqueeze(0),
        }
        if pack:
            buffer = io.BytesIO()
            torch.save(data, buffer)
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(buffer.getvalue()))
        else:
            torch.save(data, file)


@pytest.mark.parametrize("pack", [False, True])
def test_specforge_files_are_read(tmp_path: Path, target: Target, spec: CaptureSpec, pack: bool) -> None:
    """SpecForge counts outputs of layers: its 1, 3, 4 are boundaries 2, 4, 5."""
    write_specforge(tmp_path / "f", ROWS, spec, pack)
    config = to_import(
        "specforge",
        tmp_path / "f",
        target,
        tmp_path / "s",
        layers="1,3,4",
        layers_are="outputs",
        final="normed",
    )
    assert import_states(config, None)["written"] == 12
    holds(tmp_path / "s", ROWS)


def test_specforge_files_are_written_as_its_trainer_reads_them(tmp_path: Path, spec: CaptureSpec) -> None:
    write_store(tmp_path / "a", ROWS, spec)
    export_states(ExportConfig(store=str(tmp_path / "a"), layout="specforge", out=tmp_path / "f"))
    keys = sorted(row.key for row in ROWS)
    by_key = {row.key: row for row in ROWS}
    for number, key in enumerate(keys):
        data = torch.load(tmp_path / "f" / "rows_0-2000" / f"data_{number}.ckpt", weights_only=True)
        states, tokens = make_states(by_key[key], spec), len(by_key[key])
        assert {name: (value.dtype, list(value.shape)) for name, value in data.items()} == {
            "input_ids": (torch.int64, [tokens]),
            "loss_mask": (torch.int64, [tokens]),
            "hidden_state": (torch.bfloat16, [1, tokens, 16]),
            "aux_hidden_state": (torch.bfloat16, [1, tokens, 48]),
        }
        assert same_bits(data["hidden_state"][0], states[3]) and same_bits(
            data["aux_hidden_state"][0, :, 16:32].contiguous(), states[1]
        )


def write_modelopt(folder: Path, rows: list[Row], spec: CaptureSpec, **more: Any) -> None:
    folder.mkdir()
    for row in rows:
        states = make_states(row, spec)
        data = {
            "input_ids": torch.from_numpy(row.ids.astype(np.int64)),
            "hidden_states": states[3].clone(),
            "aux_hidden_states": torch.cat(list(states[:3]), dim=-1),
            "conversation_id": row.key[:8],
            **more,
        }
        torch.save(data, folder / f"{row.key[:8]}.pt")


def test_modelopt_files_are_read(tmp_path: Path, target: Target, spec: CaptureSpec) -> None:
    write_modelopt(tmp_path / "f", ROWS, spec)
    config = to_import("modelopt", tmp_path / "f", target, tmp_path / "s", **told("modelopt"))
    with pytest.raises(ConfigError, match="has no loss mask; give --rows"):
        import_states(config, None)
    assert import_states(config.model_copy(update={"mask": "rows"}), Rows(ROWS))["written"] == 12
    holds(tmp_path / "s", ROWS)
    everything = config.model_copy(update={"mask": "all", "out": tmp_path / "t"})
    assert import_states(everything, None)["written"] == 12
    assert Store.open(tmp_path / "t").supervised == sum(map(len, ROWS))


def test_modelopt_files_that_say_prenorm_are_believed(
    tmp_path: Path, target: Target, spec: CaptureSpec
) -> None:
    write_modelopt(tmp_path / "f", ROWS, spec, hidden_states_prenorm=True)
    config = to_import(
        "modelopt",
        tmp_path / "f",
        target,
        tmp_path / "s",
        mask="all",
        layers="2,4,5",
        layers_are="boundaries",
    )
    with pytest.raises(ConfigError, match="says that its final state is not normed, --final says otherwise"):
        import_states(config.model_copy(update={"final": "normed"}), None)
    import_states(config, None)
    assert not Store.open(tmp_path / "s").spec.final_normed


def test_modelopt_export_says_which_state_it_is(tmp_path: Path, target: Target) -> None:
    for normed in (True, False):
        write_store(
            tmp_path / f"a{normed}",
            ROWS[:2],
            target.spec((2, "final"), dtype="bfloat16", final_normed=normed),
        )
        export_states(
            ExportConfig(store=str(tmp_path / f"a{normed}"), layout="modelopt", out=tmp_path / f"f{normed}")
        )
        data = torch.load(tmp_path / f"f{normed}" / f"{ROWS[1].key}.pt", weights_only=True)
        assert data["hidden_states_prenorm"] is not normed and data["conversation_id"] == ROWS[1].key
        assert list(data["aux_hidden_states"].shape) == [6, 16]


def test_speculators_files_are_read_with_the_dataset_beside_them(tmp_path: Path, target: Target) -> None:
    datasets = pytest.importorskip("datasets")
    spec = target.spec((2, 4, 5, "final"), dtype="bfloat16", final_normed=False)
    columns = {
        "input_ids": [r.ids.tolist() for r in ROWS],
        "loss_mask": [r.mask.astype(int).tolist() for r in ROWS],
    }
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "f")
    (tmp_path / "f" / "hidden_states").mkdir()
    for number, row in enumerate(ROWS):
        states = make_states(row, spec).permute(1, 0, 2).contiguous()
        file = tmp_path / "f" / "hidden_states" / f"hs_{number}.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.from_numpy(row.ids.astype(np.int64))}, file)
    for number, source in enumerate((tmp_path / "f", tmp_path / "f" / "hidden_states")):
        config = to_import("speculators", source, target, tmp_path / f"s{number}", **told("speculators"))
        assert import_states(config, None)["written"] == 12
        holds(tmp_path / f"s{number}", ROWS, final_normed=False)
    # ST-14: the dataset changed after the states were made
    shifted = {"input_ids": [[1, 2], *columns["input_ids"]], "loss_mask": [[0, 1], *columns["loss_mask"]]}
    datasets.Dataset.from_dict(shifted).save_to_disk(tmp_path / "g")
    (tmp_path / "f" / "hidden_states").rename(tmp_path / "g" / "hidden_states")
    with pytest.raises(StoreError, match="none of the 12 samples"):
        import_states(
            to_import("speculators", tmp_path / "g", target, tmp_path / "s2", **told("speculators")), None
        )


def test_speculators_export_loads_with_datasets(tmp_path: Path, target: Target) -> None:
    datasets = pytest.importorskip("datasets")
    spec = target.spec((2, 4, 5, 8), dtype="bfloat16")
    write_store(tmp_path / "a", ROWS, spec)
    export_states(ExportConfig(store=str(tmp_path / "a"), layout="speculators", out=tmp_path / "f"))
    table = datasets.load_from_disk(str(tmp_path / "f"))
    assert len(table) == 12 and list(table.with_format(None)["seq_len"]) == [
        len(Store.open(tmp_path / "a")[k].ids) for k in sorted(r.key for r in ROWS)
    ]
    by_key = {row.key: row for row in ROWS}
    for number, key in enumerate(sorted(by_key)):
        assert table[number]["input_ids"].tolist() == by_key[key].ids.tolist()
        assert table[number]["loss_mask"].tolist() == by_key[key].mask.astype(int).tolist()
        data = load_file(tmp_path / "f" / "hidden_states" / f"hs_{number}.safetensors")
        assert data["token_ids"].tolist() == by_key[key].ids.tolist()
        assert same_bits(data["hidden_states"].permute(1, 0, 2).contiguous(), make_states(by_key[key], spec))


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {
            "aux_pattern": "{sample}.layer{i}.pt",
            "final_pattern": "{sample}.last.pt",
            "ids_pattern": "{sample}.ids.pt",
        },
        {"aux_pattern": "aux{i}/{sample}.pt", "final_pattern": "final/{sample}.pt"},
    ],
)
def test_four_files_under_any_names(
    tmp_path: Path, target: Target, spec: CaptureSpec, patterns: dict[str, str]
) -> None:
    config = to_import(
        "four-pt", tmp_path / "f", target, tmp_path / "s", **told("four-pt"), **patterns, mask="rows"
    )
    for row in ROWS:
        states = make_states(row, spec)
        for index in range(4):
            pattern = config.final_pattern if index == 3 else config.aux_pattern
            file = tmp_path / "f" / pattern.replace("{sample}", row.key).replace("{i}", str(index))
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(states[index].clone(), file)
    with pytest.raises(ConfigError, match="needs --rows"):
        import_states(config, None)
    assert import_states(config, Rows(ROWS))["written"] == 12
    holds(tmp_path / "s", ROWS)


def test_four_files_by_number(tmp_path: Path, target: Target, spec: CaptureSpec) -> None:
    for number, row in enumerate(ROWS):
        folder = tmp_path / "f" / f"sample_{number}"
        folder.mkdir(parents=True)
        for index in range(4):
            torch.save(
                make_states(row, spec)[index].clone(),
                folder / ("final.pt" if index == 3 else f"aux_{index}.pt"),
            )
    config = to_import("four-pt", tmp_path / "f", target, tmp_path / "s", **told("four-pt"), names="numbers")
    assert import_states(config, Rows(ROWS))["written"] == 12
    holds(tmp_path / "s", ROWS)
    shifted = config.model_copy(update={"out": tmp_path / "t"})
    with pytest.raises(StoreError, match="none of the 12 samples"):
        import_states(shifted, Rows([make_row(99, 200), *ROWS]))
    (tmp_path / "f" / "sample_3" / "aux_1.pt").unlink()
    result = import_states(config.model_copy(update={"out": tmp_path / "u"}), Rows(ROWS))
    assert result["written"] == 11 and sum(result["dropped"].values()) == 1


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("left_out", ["layers", "layers_are", "final"])
def test_what_files_do_not_say_has_to_be_told(
    tmp_path: Path, target: Target, layout: str, left_out: str
) -> None:
    spec = target.spec((2, 4, 5, "final"), dtype="bfloat16", final_normed=layout != "speculators")
    write_store(tmp_path / "a", ROWS[:2], spec)
    export_states(ExportConfig(store=str(tmp_path / "a"), layout=layout, out=tmp_path / "f"))  # type: ignore[arg-type]
    (tmp_path / "f" / "manifest.json").unlink()  # now it is a stranger's folder
    if layout == "modelopt":
        for file in (tmp_path / "f").glob("*.pt"):
            data = torch.load(file, weights_only=True)
            del data["hidden_states_prenorm"]
            torch.save(data, file)
    options = {key: value for key, value in told(layout).items() if key != left_out}
    config = to_import(layout, tmp_path / "f", target, tmp_path / "s", **options, mask="rows")
    with pytest.raises(ConfigError, match="--final" if left_out == "final" else "--layers"):
        import_states(config, Rows(ROWS))
    assert not (tmp_path / "s").exists()


class Bomb:
    """What a pickle may do when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("layout", ["specforge", "modelopt"])
def test_pickles_run_nothing(tmp_path: Path, target: Target, spec: CaptureSpec, layout: str) -> None:
    bomb = tmp_path / "went-off"
    if layout == "specforge":
        write_specforge(tmp_path / "f", ROWS[:3], spec)
        torch.save({"input_ids": Bomb(bomb)}, tmp_path / "f" / "rows_0-5" / "data_9.ckpt")
    else:
        write_modelopt(tmp_path / "f", ROWS[:3], spec, loss_mask=torch.zeros(0))
        for file in (tmp_path / "f").glob("*.pt"):
            data = torch.load(file, weights_only=True)
            torch.save({**data, "loss_mask": torch.ones(len(data["input_ids"]))}, file)
        torch.save({"input_ids": Bomb(bomb)}, tmp_path / "f" / "zz.pt")
    result = import_states(to_import(layout, tmp_path / "f", target, tmp_path / "s", **told(layout)), None)
    assert result["written"] == 3 and sum(result["dropped"].values()) == 1
    assert not bomb.exists()


def test_torn_files_are_dropped_and_counted(tmp_path: Path, target: Target, spec: CaptureSpec) -> None:
    """ST-01: other tools leave files that were being written when they died."""
    write_specforge(tmp_path / "f", ROWS, spec)
    files = sorted((tmp_path / "f").rglob("*.ckpt"))
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:-100])
    files[2].write_bytes(b"not a pickle at all")
    data = torch.load(files[3], weights_only=True)
    torch.save({**data, "hidden_state": data["hidden_state"][:, :-1]}, files[3])
    torch.save({**torch.load(files[4], weights_only=True), "loss_mask": torch.ones(3)}, files[4])
    poisoned = torch.load(files[5], weights_only=True)
    poisoned["hidden_state"][0, 0, 0] = float("nan")
    torch.save(poisoned, files[5])
    result = import_states(
        to_import("specforge", tmp_path / "f", target, tmp_path / "s", **told("specforge")), None
    )
    assert (
        result["dropped"] == {"unreadable or unmatched": 5, "refused by the store": 1}
        and result["written"] == 6
    )


def test_what_does_not_fit_the_target_ends_the_import(
    tmp_path: Path, target: Target, spec: CaptureSpec
) -> None:
    write_specforge(tmp_path / "f", ROWS[:2], spec)
    config = to_import("specforge", tmp_path / "f", target, tmp_path / "s", **told("specforge"))
    with pytest.raises(InputError, match="holds 3 aux states, --layers names 2"):
        import_states(config.model_copy(update={"layers": "2,4"}), None)
    with pytest.raises(ConfigError, match="boundary in 0"):
        import_states(config.model_copy(update={"layers": "2,4,99"}), None)
    with pytest.raises(ConfigError, match="not a list of numbers"):
        import_states(config.model_copy(update={"layers": "two"}), None)
    with pytest.raises(InputError, match="holds no modelopt samples"):
        import_states(config.model_copy(update={"layout": "modelopt"}), None)
    with pytest.raises(InputError, match="not a folder"):
        import_states(config.model_copy(update={"source": tmp_path / "none"}), None)
    wide = [torch.load(f, weights_only=True) for f in sorted((tmp_path / "f").rglob("*.ckpt"))]
    for number, data in enumerate(wide):
        data["hidden_state"] = torch.cat([data["hidden_state"]] * 2, dim=-1)
        data["aux_hidden_state"] = torch.cat([data["aux_hidden_state"]] * 2, dim=-1)
        torch.save(data, tmp_path / "f" / "rows_0-5" / f"data_{number}.ckpt")
    with pytest.raises(InputError, match=r"width 32, .* has 16"):
        import_states(config, None)


def test_a_norm_cannot_be_undone(tmp_path: Path, target: Target) -> None:
    write_store(tmp_path / "a", ROWS[:2], target.spec((2, 4, 5, "final"), dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"a norm cannot be undone\. Extract boundary 8 as well"):
        export_states(ExportConfig(store=str(tmp_path / "a"), layout="speculators", out=tmp_path / "f"))
    write_store(tmp_path / "b", ROWS[:2], target.spec((2, 4), dtype="bfloat16"))
    with pytest.raises(ConfigError, match="has no final state"):
        export_states(ExportConfig(store=str(tmp_path / "b"), layout="specforge", out=tmp_path / "f"))
    write_store(
        tmp_path / "c", ROWS[:2], target.spec((2, 4, "final"), dtype="bfloat16"), final_positions="supervised"
    )
    with pytest.raises(StoreError, match="only where the next token is supervised"):
        export_states(ExportConfig(store=str(tmp_path / "c"), layout="specforge", out=tmp_path / "g"))
    with pytest.raises(ConfigError, match=r"no boundaries \['3'\]"):
        export_states(
            ExportConfig(store=str(tmp_path / "a"), layout="specforge", out=tmp_path / "h", layers="2,3")
        )
    assert not (tmp_path / "f").exists() and not (tmp_path / "h").exists()


def test_the_norm_is_applied_with_the_model(tmp_path: Path, tiny_llama: Path) -> None:
    """A store of boundary N exports to a tool that wants the normed state, with the target's own (not all-one) norm weights."""
    target = Target.open(str(tiny_llama))
    spec = target.spec((2, 3, target.num_layers), dtype="bfloat16")
    row = make_row(1, 9)
    states = torch.randn(3, 9, spec.hidden_size).bfloat16()
    with StoreWriter(tmp_path / "a", spec) as writer:
        writer.add(row, states)
    config = ExportConfig(store=str(tmp_path / "a"), layout="specforge", out=tmp_path / "f")
    with pytest.raises(ConfigError, match="give --model"):
        export_states(config)
    export_states(config.model_copy(update={"model": str(tiny_llama)}))
    data = torch.load(next((tmp_path / "f").rglob("*.ckpt")), weights_only=True)
    weight = target.tensor("model.norm.weight")
    assert weight is not None and float(weight.std()) > 0.01
    x = states[2].float()
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + target.norm_eps) * weight.float()
    torch.testing.assert_close(data["hidden_state"][0].float(), expected, rtol=0.02, atol=0.02)
    assert same_bits(data["aux_hidden_state"][0, :, spec.hidden_size :].contiguous(), states[1])
