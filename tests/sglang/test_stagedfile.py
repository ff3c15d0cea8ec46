"""The staged file: readable by the safetensors library, and any wrong byte is noticed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from headrace.memory import MemoryPool
from headrace.sglang_plugin import stagedfile
from headrace.sglang_plugin.stagedfile import HEADER_BYTES, Layout, StagedFileError, read_staged
from headrace.sglang_plugin.writer import Piece, StagedCapture, Writers


def write_capture(
    path: Path, states: torch.Tensor, ids: torch.Tensor, spans: list[tuple[int, int]], threads: int = 3
) -> StagedCapture:
    """Stage ``states`` [taps, rows, hidden] in pieces of ``spans``, taps in reverse order of the source."""
    taps, rows, hidden = states.shape
    capture = StagedCapture(
        path, Layout(taps, rows, hidden, str(states.dtype).removeprefix("torch.")), {"taps": "x"}
    )
    writers = Writers(threads)
    for span in spans:
        capture.expect(*span)
    capture.close()
    pieces = [Piece(capture, tap, tap, a, a, b) for a, b in spans for tap in range(taps)]
    writers.write(pieces[::-1], states, ids, lambda: None, lambda: None)
    assert capture.wait(10)
    writers.close()
    return capture


@pytest.fixture
def staged(tmp_path: Path) -> tuple[StagedCapture, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(3, 20, 8, generator=generator).to(torch.bfloat16)
    ids = torch.randint(0, 150_000, (20,), generator=generator)
    capture = write_capture(tmp_path / "me-1.safetensors", states, ids, [(8, 16), (0, 8), (16, 20)])
    assert capture.failure is None
    return capture, states, ids


def test_round_trip(staged: tuple[StagedCapture, torch.Tensor, torch.Tensor]) -> None:
    capture, states, ids = staged
    file = read_staged(capture.path, capture.seal, capture.size)
    assert (file.layout.taps, file.layout.rows, file.layout.hidden, file.layout.dtype) == (
        3,
        20,
        8,
        "bfloat16",
    )
    np.testing.assert_array_equal(file.ids, ids.numpy())
    got = torch.from_numpy(file.states).view(torch.bfloat16).view(3, 20, 8)
    assert torch.equal(got, states)


def test_is_a_plain_safetensors_file(staged: tuple[StagedCapture, torch.Tensor, torch.Tensor]) -> None:
    capture, states, ids = staged
    with safe_open(capture.path, framework="pt") as file:
        assert torch.equal(file.get_tensor("states"), states)
        assert torch.equal(file.get_tensor("ids"), ids)
        assert file.metadata() == {"taps": "x"}


def test_every_flipped_byte_is_noticed(staged: tuple[StagedCapture, torch.Tensor, torch.Tensor]) -> None:
    capture, _, _ = staged
    whole = bytearray(capture.path.read_bytes())
    places = [0, 9, 100, HEADER_BYTES - 1, *range(HEADER_BYTES, len(whole), 7)]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 0x10
        capture.path.write_bytes(broken)
        with pytest.raises(StagedFileError):
            read_staged(capture.path, capture.seal, capture.size)


def test_truncation_and_foreign_seals_are_noticed(
    staged: tuple[StagedCapture, torch.Tensor, torch.Tensor],
) -> None:
    capture, _, _ = staged
    with pytest.raises(StagedFileError, match="announced"):
        read_staged(capture.path, capture.seal, capture.size + 1)
    with pytest.raises(StagedFileError, match="seal"):
        read_staged(capture.path, "0" * 16, capture.size)
    capture.path.write_bytes(capture.path.read_bytes()[:-8])
    with pytest.raises(StagedFileError, match="announced"):
        read_staged(capture.path, capture.seal, capture.size)


def test_rows_in_no_segment_are_noticed(tmp_path: Path) -> None:
    """A writer that forgot rows seals a file that its own reader refuses."""
    states, ids = torch.ones(2, 10, 4), torch.zeros(10, dtype=torch.int64)
    capture = write_capture(tmp_path / "me-1.safetensors", states, ids, [(0, 4), (6, 10)])
    with pytest.raises(StagedFileError, match="no segment"):
        read_staged(capture.path, capture.seal, capture.size)


# --- the memory it is read into ---------------------------------------------------------------------------------------


class Lender:
    """Lends memory that somebody has used before, and remembers it; ``meanwhile`` is done after the file was opened."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.lent: list[np.ndarray] = []
        self.meanwhile = meanwhile

    def lend(self, size: int) -> np.ndarray:
        self.meanwhile()
        self.lent.append(np.full(size, 0xA5, np.uint8))
        return self.lent[-1]


def test_it_is_read_into_the_memory_given(staged: tuple[StagedCapture, torch.Tensor, torch.Tensor]) -> None:
    capture, states, ids = staged
    lender = Lender()
    file = read_staged(capture.path, capture.seal, capture.size, lender.lend)
    (content,) = lender.lent
    assert content.tobytes() == capture.path.read_bytes()
    assert (
        file.states.ctypes.data == content.ctypes.data + HEADER_BYTES + 8 * 20 and file.states.flags.writeable
    )
    got = torch.from_numpy(file.states).view(torch.bfloat16).view(3, 20, 8)
    assert torch.equal(got, states)
    np.testing.assert_array_equal(file.ids, ids.numpy())
    assert not np.shares_memory(file.ids, content), "ids are small and outlive the states"


def test_a_pools_memory_comes_back_with_the_states(
    staged: tuple[StagedCapture, torch.Tensor, torch.Tensor],
) -> None:
    capture, states, _ = staged
    pool = MemoryPool(4 << 20)
    file = read_staged(capture.path, capture.seal, capture.size, pool.lend)
    got, ids = torch.from_numpy(file.states).view(torch.bfloat16).view(3, 20, 8), file.ids
    del file
    assert torch.equal(got, states) and pool.used > 0
    del got
    assert pool.used == 0 and len(ids) == 20
    with pytest.raises(StagedFileError, match="seal"):
        read_staged(capture.path, "0" * 16, capture.size, pool.lend)
    assert pool.used == 0, "nor is it kept when the file is refused"


def test_what_a_read_leaves_is_read_by_the_next(
    staged: tuple[StagedCapture, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads 2 GiB at a time at most, network file systems less."""

    class Halting(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            return super().readinto(memoryview(buffer)[:1000]) or 0

    monkeypatch.setattr(stagedfile, "open", lambda path, mode, buffering: Halting(path, mode), raising=False)
    capture, states, _ = staged
    file = read_staged(capture.path, capture.seal, capture.size, Lender().lend)
    assert torch.equal(torch.from_numpy(file.states).view(torch.bfloat16).view(3, 20, 8), states)


@pytest.mark.parametrize("by", [-10_000, -8, -1, 1, 8])
def test_a_file_of_another_size_is_refused_before_memory_is_taken(
    staged: tuple[StagedCapture, torch.Tensor, torch.Tensor], by: int
) -> None:
    capture, _, _ = staged
    size = max(0, capture.size + by)
    os.truncate(capture.path, size)
    lender = Lender()
    with pytest.raises(StagedFileError, match=f"has {size} bytes, the server announced {capture.size}"):
        read_staged(capture.path, capture.seal, capture.size, lender.lend)
    assert not lender.lent


@pytest.mark.parametrize("left", [0, 1, HEADER_BYTES, HEADER_BYTES + 200])
def test_a_file_that_shrinks_while_it_is_read_is_refused(
    staged: tuple[StagedCapture, torch.Tensor, torch.Tensor], left: int
) -> None:
    """What was in the memory before is not taken for the rest."""
    capture, _, _ = staged
    lender = Lender(lambda: os.truncate(capture.path, left))
    with pytest.raises(StagedFileError, match=f"ends after {left} of {capture.size} bytes"):
        read_staged(capture.path, capture.seal, capture.size, lender.lend)


def test_a_file_that_is_gone_says_so(staged: tuple[StagedCapture, torch.Tensor, torch.Tensor]) -> None:
    capture, states, _ = staged
    file = read_staged(capture.path, capture.seal, capture.size, Lender(capture.path.unlink).lend)
    assert torch.equal(torch.from_numpy(file.states).view(torch.bfloat16).view(3, 20, 8), states), (
        "it was open"
    )
    lender = Lender()
    with pytest.raises(FileNotFoundError):
        read_staged(capture.path, capture.seal, capture.size, lender.lend)
    assert not lender.lent


# --- while it is written ----------------------------------------------------------------------------------------------


def test_part_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    capture = StagedCapture(tmp_path / "me-1.safetensors", Layout(1, 4, 4, "float32"), {})
    capture.expect(0, 4)
    assert not capture.path.exists()
    rows = memoryview(np.ones((4, 4), np.float32)).cast("B")
    capture.write(0, 0, 4, rows, np.arange(4))
    assert not capture.path.exists() and list(tmp_path.glob("*.part")), "not sealed before it is closed"
    capture.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rows", [4, 100_000])
def test_what_cannot_be_written_is_a_refusal_not_a_crash(small_disk: Path, rows: int) -> None:
    """A folder that is gone, and a file system without the space: met before anything is written, said, cleaned up."""
    folder = small_disk / "gone" if rows == 4 else small_disk
    capture = StagedCapture(folder / "me-1.safetensors", Layout(1, rows, 4, "float32"), {})
    capture.expect(0, rows)
    capture.close()
    done: list[bool] = []
    writers = Writers(1)
    states, ids = torch.ones(1, rows, 4), torch.zeros(rows, dtype=torch.int64)
    writers.write([Piece(capture, 0, 0, 0, 0, rows)], states, ids, lambda: None, lambda: done.append(True))
    assert capture.wait(5)
    writers.close()
    assert capture.failure is not None
    assert capture.failure.kind == ("write_failed" if rows == 4 else "staging_full")
    assert str(folder) in capture.failure.message
    assert done == [True], "the host memory must come back whatever happens"
    assert not list(small_disk.iterdir())
