"""From cache pages to files, on a CPU and without vLLM: the right rows, bounded memory and disk, errors that are told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from headrace.engines import vllm_pages
from headrace.engines.vllm_pages import Limits, PageWriter, Save

LAYERS, SLOTS, HIDDEN, BLOCKS = 3, 4, 8, 16
ROOMY = Limits(1 << 20, 1 << 20)


def pages() -> torch.Tensor:
    """[blocks, layers, slots, hidden] bf16 in which every value tells block, layer and slot."""
    out = torch.zeros(BLOCKS, LAYERS, SLOTS, HIDDEN, dtype=torch.bfloat16)
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            for slot in range(SLOTS):
                out[block, layer, slot, :3] = torch.tensor([block, layer, slot])
    return out


def save(folder: Path, name: str, tokens: int, blocks: list[int]) -> Save:
    return Save(
        name, str(folder / f"{name}.safetensors"), f"key-{name}", list(range(100, 100 + tokens)), blocks
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited 10 s in vain"
        time.sleep(0.002)


@pytest.fixture
def writer() -> Iterator[PageWriter]:
    made = PageWriter(pages(), {"protocol": 1}, ROOMY)
    yield made
    made.close()


def test_scattered_pages_come_out_in_order(writer: PageWriter, tmp_path: Path) -> None:
    writer.start(save(tmp_path, "a", tokens=10, blocks=[7, 2, 11, 5]))
    wait_for((tmp_path / "a.safetensors").exists)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        states, ids, metadata = file.get_tensor("states"), file.get_tensor("ids"), file.metadata()
    assert states.shape == (LAYERS, 10, HIDDEN) and states.dtype == torch.bfloat16
    for layer in range(LAYERS):
        for token in range(10):
            assert states[layer, token, :3].tolist() == [[7, 2, 11][token // SLOTS], layer, token % SLOTS]
    np.testing.assert_array_equal(ids, np.arange(100, 110))
    assert metadata["key"] == "key-a" and json.loads(metadata["facts"]) == {"protocol": 1}
    assert not list(tmp_path.glob("*.tmp"))


def test_the_copy_is_taken_before_the_pages_are_used_again(tmp_path: Path) -> None:
    """EX-24: the next request overwrites the pages as soon as they are reported free."""
    source = pages()
    writer = PageWriter(source, {}, ROOMY)
    writer.start(save(tmp_path, "a", 4, [3]))
    assert writer.copied({"a"}) == {"a"}
    source.fill_(-1)
    writer.close()
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.get_tensor("states")[0, 0, 0] == 3


def test_only_finished_requests_with_a_copy_are_reported(writer: PageWriter, tmp_path: Path) -> None:
    assert writer.copied({"never asked"}) == set()
    writer.start(save(tmp_path, "a", 4, [1]))
    assert writer.copied(set()) == set(), "not before vLLM says it is finished"
    assert writer.copied({"a", "b"}) == {"a"}
    assert writer.copied({"a"}) == set(), "once"


def test_too_few_pages_are_told(writer: PageWriter, tmp_path: Path) -> None:
    writer.start(save(tmp_path, "a", 10, [1, 2]))
    wait_for((tmp_path / "a.error").exists)
    assert "2 of 3 pages" in (tmp_path / "a.error").read_text()
    assert writer.copied({"a"}) == {"a"}, "its pages are freed all the same"


def test_a_folder_that_cannot_be_written_is_told(writer: PageWriter, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "a.safetensors" / "in the way").touch()
    writer.start(save(tmp_path, "a", 4, [1]))
    wait_for((tmp_path / "a.error").exists)
    assert "Error" in (tmp_path / "a.error").read_text()


def test_unread_files_hold_new_ones_back_and_are_deleted_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * LAYERS * HIDDEN * 2
    writer = PageWriter(pages(), {}, Limits(1 << 20, 2 * size))
    for name in "ab":
        writer.start(save(tmp_path, name, 4, [1]))
        wait_for((tmp_path / f"{name}.safetensors").exists)
    writer.start(save(tmp_path, "c", 4, [1]))
    wait_for((tmp_path / "c.error").exists)
    assert "wait to be read" in (tmp_path / "c.error").read_text()
    (tmp_path / "a.safetensors").unlink()  # the client has read it
    writer.start(save(tmp_path, "d", 4, [1]))
    wait_for((tmp_path / "d.safetensors").exists)
    monkeypatch.setattr(vllm_pages, "KEEP_SECONDS", 0.0)
    writer.start(save(tmp_path, "e", 4, [1]))
    wait_for((tmp_path / "e.safetensors").exists)
    assert not (tmp_path / "b.safetensors").exists()
    writer.close()


def test_a_slow_disk_slows_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4 * LAYERS * HIDDEN * 2
    gate = threading.Event()
    written = vllm_pages.save_file

    def slow(*args: object) -> None:
        gate.wait(10)
        written(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(vllm_pages, "save_file", slow)
    writer = PageWriter(pages(), {}, Limits(2 * size, 1 << 20))
    started: list[str] = []

    def start() -> None:
        for name in "abc":
            writer.start(save(tmp_path, name, 4, [1]))
            started.append(name)

    thread = threading.Thread(target=start)
    thread.start()
    wait_for(lambda: len(started) == 2)
    time.sleep(0.05)
    assert started == ["a", "b"], "the third waits for memory"
    gate.set()
    thread.join(10)
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "c.safetensors"]
