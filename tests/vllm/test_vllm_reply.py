"""What a reply and its file may be: everything wrong becomes a failure with a reason, everything right a capture. No vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from headrace.engines.vllm_reply import Facts, Pending, assemble, reply_path, too_long, wanted_layers
from headrace.errors import CaptureError
from headrace.target import Target
from headrace.types import Capture, CaptureSpec, Failure, Row

FACTS = {
    "protocol": 1,
    "vllm": "0",
    "layers": [2, 3, 4],
    "dtype": "float32",
    "num_layers": 4,
    "hidden_size": 4,
}


class StubTarget(Target):
    """A target whose final norm has the weights [2, 1, 1, 1]."""

    def __init__(self) -> None:
        super().__init__(Path(), "stub", {})
        weight = torch.tensor([2.0, 1, 1, 1])
        self.__dict__["final_norm"] = lambda x: x * weight / x.pow(2).mean(-1, keepdim=True).sqrt()


def spec(taps: tuple[Any, ...] = (3, "final", 2), **changes: Any) -> CaptureSpec:
    fields = {"num_layers": 4, "hidden_size": 4, "dtype": "float32", "norm_kind": "rms", "norm_eps": 1e-5}
    return CaptureSpec(target="t", config_hash="c", taps=taps, **{**fields, **changes})


@pytest.fixture
def row() -> Row:
    return Row.make([5, 6, 7], [0, 1, 1])


def states() -> torch.Tensor:
    """[layers, tokens, hidden] that tell layer and token: layer 4 holds [3, 4, 0, 0]."""
    out = torch.zeros(3, 3, 4)
    for index, layer in enumerate((2, 3)):
        out[index] = layer
        out[index, :, 1] = torch.arange(3)
    out[2] = torch.tensor([3.0, 4, 0, 0])
    return out


def write(path: Path, row: Row, **changes: Any) -> Path:
    value = changes.get("states", states())
    checksum = changes.get(
        "checksum", xxhash.xxh3_64_hexdigest(value.contiguous().view(torch.uint8).numpy().data)
    )
    metadata = {
        "key": changes.get("key", row.key),
        "checksum": checksum,
        "facts": json.dumps({**FACTS, **changes.get("facts", {})}),
    }
    ids = torch.tensor(changes.get("ids", row.ids.tolist()), dtype=torch.int32)
    save_file({"states": value.contiguous(), "ids": ids}, path, metadata)
    return path


def test_layers_are_boundaries_and_the_final_state_is_the_last() -> None:
    assert wanted_layers(spec((3, "final", 2))) == [2, 3, 4]
    assert wanted_layers(spec((4, "final"))) == [4]
    assert wanted_layers(spec((0, 1))) == [0, 1]


def test_a_right_file_is_a_capture(tmp_path: Path, row: Row) -> None:
    path = write(tmp_path / "a.safetensors", row)
    pending = Pending(row, path, 10)
    assert pending.ready()
    capture = pending.read(StubTarget(), spec())
    assert isinstance(capture, Capture)
    np.testing.assert_array_equal(capture.ids, row.ids)
    assert capture.ids.dtype == np.int32
    torch.testing.assert_close(capture.states[0], states()[1])
    torch.testing.assert_close(capture.states[2], states()[0])
    # EX-07: RMS of [3, 4, 0, 0] is 2.5; the weights are not all ones.
    torch.testing.assert_close(capture.states[1], torch.tensor([2.4, 1.6, 0, 0]).expand(3, 4))
    assert not path.exists(), "a file that was read is deleted"


def test_an_un_normed_final_state_stays_as_it_is(row: Row) -> None:
    got = assemble(states(), (2, 3, 4), StubTarget(), spec(("final",), final_normed=False))
    torch.testing.assert_close(got[0], states()[2])


def test_a_capture_owns_its_memory(row: Row) -> None:
    source = states()
    got = assemble(source, (2, 3, 4), StubTarget(), spec((2, 3)))
    source.zero_()
    assert float(got[1].abs().sum()) > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": "0" * 32}, "holds the states of 0000"),
        ({"ids": [5, 6, 8]}, "not the 3 sent"),
        ({"ids": [5, 6]}, "not the 3 sent"),
        ({"states": states()[:, :2]}, "expected float32"),
        ({"states": states()[:2]}, "expected float32"),
        ({"states": states().half()}, "torch.float16"),
        ({"checksum": "0" * 16}, "checksum"),
        ({"facts": {"protocol": 2}}, "protocol 2"),
        ({"facts": {"layers": [1, 2, 4]}}, r"\[3\] are missing"),
    ],
)
def test_a_wrong_file_is_a_failure(changes: dict[str, Any], words: str, tmp_path: Path, row: Row) -> None:
    path = write(tmp_path / "a.safetensors", row, **changes)
    failure = Pending(row, path, 10).read(StubTarget(), spec())
    assert isinstance(failure, Failure) and failure.key == row.key
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(failure.message)
    assert not path.exists()


def test_a_cut_file_is_a_failure(tmp_path: Path, row: Row) -> None:
    path = write(tmp_path / "a.safetensors", row)
    path.write_bytes(path.read_bytes()[:-7])
    failure = Pending(row, path, 10).read(StubTarget(), spec())
    assert isinstance(failure, Failure) and "cannot be read" in failure.message


def test_a_file_that_never_comes_is_a_timeout(tmp_path: Path, row: Row) -> None:
    pending = Pending(row, tmp_path / "a.safetensors", 0.0)
    assert pending.ready()
    failure = pending.read(StubTarget(), spec())
    assert isinstance(failure, Failure) and (failure.kind, failure.retryable) == ("timeout", True)


def test_a_file_on_its_way_is_waited_for(tmp_path: Path, row: Row) -> None:
    pending = Pending(row, tmp_path / "a.safetensors", 60)
    assert not pending.ready()
    write(tmp_path / "b", row).rename(tmp_path / "a.safetensors")
    assert pending.ready()


def test_the_servers_own_words_are_passed_on(tmp_path: Path, row: Row) -> None:
    (tmp_path / "a.error").write_text("OSError: no space left")
    pending = Pending(row, tmp_path / "a.safetensors", 60)
    assert pending.ready()
    failure = pending.read(StubTarget(), spec())
    assert isinstance(failure, Failure) and "no space left" in failure.message


def test_replies(row: Row, tmp_path: Path) -> None:
    ours = {"key": row.key, "path": "/srv/staging/vllm-1-ab/name.safetensors", "tokens": 3}
    assert reply_path(row, {"headrace": ours}, None) == Path(ours["path"])
    assert reply_path(row, {"headrace": ours}, tmp_path) == tmp_path / "vllm-1-ab" / "name.safetensors"
    for reply in (None, {}, {"hidden_states_path": "/x"}):
        failure = reply_path(row, reply, None)
        assert (
            isinstance(failure, Failure) and not failure.retryable and "HeadraceConnector" in failure.message
        )
    failure = reply_path(row, {"headrace": {**ours, "key": "other"}}, None)
    assert isinstance(failure, Failure) and failure.kind == "wrong_key"
    failure = reply_path(row, {"headrace": {"key": row.key, "error": "aborted"}}, None)
    assert isinstance(failure, Failure) and "aborted" in failure.message


def test_rows_that_would_wait_for_ever_are_refused() -> None:
    row = Row.make(np.arange(100), np.ones(100, dtype=bool))
    facts = Facts(max_model_len=101, max_num_batched_tokens=64, chunked_prefill=True)
    assert too_long(row, facts) is None
    for wrong in (
        Facts(max_model_len=100),
        Facts(max_model_len=200, max_num_batched_tokens=64, chunked_prefill=False),
    ):
        failure = too_long(row, wrong)
        assert failure is not None and not failure.retryable


def test_missing_layers_name_the_mend() -> None:
    with pytest.raises(CaptureError, match=r"start it with \[2, 3, 4\]"):
        assemble(states()[:2], (2, 3), StubTarget(), spec())
