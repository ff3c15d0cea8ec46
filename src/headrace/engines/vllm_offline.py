"""The ``vllm`` engine in this process: vLLM's engine stepped by a thread, its states through a folder in memory."""

from __future__ import annotations

import enum
import os
import queue
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engines.vllm import Deliver, VllmOptions, import_error, request_parameters, vllm_arguments
from headrace.engines.vllm_reply import Facts, Pending, reply_path
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.target import Target
from headrace.types import CaptureSpec, Failure, Row

_POLL = 0.002


@dataclass(frozen=True)
class _Order:
    """A row on its way into vLLM."""

    row: Row
    deliver: Deliver


class _Message(enum.Enum):
    """What else the inbox carries."""

    CANCEL = enum.auto()
    """Abort everything taken so far."""
    STOP = enum.auto()


class OfflineBackend:
    """One thread owns vLLM: it takes orders from an inbox, steps, and hands finished ones to readers."""

    def __init__(self, target: Target, spec: CaptureSpec, options: VllmOptions) -> None:
        self._target, self._spec, self._options = target, spec, options
        self._inbox: queue.SimpleQueue[_Order | _Message] = queue.SimpleQueue()
        self._waiting: dict[str, _Order] = {}
        self._cancelled = threading.Event()
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="headrace-read")
        self._staging = Path(
            tempfile.mkdtemp(prefix="headrace-vllm-", dir=options.staging or _memory_folder())
        )
        self._thread: threading.Thread | None = None
        self._llm: Any = None
        try:
            self._llm = start_vllm(target, spec, options, self._staging)
            from headrace.engines.vllm_connector import facts_of  # it imports vLLM

            self._thread = threading.Thread(target=self._run, name="headrace-vllm", daemon=True)
            self._thread.start()
            self.facts = Facts.of(facts_of(self._llm.llm_engine.vllm_config))
        except BaseException:
            self.close()
            raise

    # --- what other threads call --------------------------------------------------------------------------------

    def submit(self, row: Row, deliver: Deliver) -> None:
        """Hand one row over."""
        self._inbox.put(_Order(row, deliver))

    def cancel(self) -> None:
        """Abort what is in flight, and wait until that is done: nothing of it is delivered afterwards."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._cancelled.clear()
        self._inbox.put(_Message.CANCEL)
        while self._thread.is_alive() and not self._cancelled.wait(0.1):
            pass

    def close(self) -> None:
        """Stop vLLM and remove the staging folder; idempotent."""
        if self._thread is not None:
            self._inbox.put(_Message.STOP)
            self._thread.join()
            self._thread = None
        self._readers.shutdown(wait=True)
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        shutil.rmtree(self._staging, ignore_errors=True)

    # --- the thread that owns vLLM ------------------------------------------------------------------------------

    def _run(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self._llm.llm_engine
        try:
            while self._take(engine):
                for output in engine.step():
                    if output.finished:
                        self._finish(output)
        except (EngineDeadError, RuntimeError) as exc:
            message = f"vLLM died ({type(exc).__name__}: {exc}); its log says why. Run the command again"
            self._fail_all(EngineUnavailableError(message))

    def _take(self, engine: Any) -> bool:
        """Handle the inbox, waiting for something to do when vLLM has nothing. False to stop."""
        while True:
            try:
                order = self._inbox.get(block=not engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if order is _Message.STOP:
                return False
            if isinstance(order, _Order):
                self._add(engine, order)
            else:
                engine.abort_request(list(self._waiting))
                self._waiting.clear()
                self._cancelled.set()

    def _add(self, engine: Any, order: _Order) -> None:
        from vllm import SamplingParams

        name, parameters = request_parameters(order.row)
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, extra_args={"kv_transfer_params": parameters}
        )
        self._waiting[name] = order
        try:
            engine.add_request(name, {"prompt_token_ids": order.row.ids.tolist()}, sampling)
        except ValueError as exc:  # vLLM's word for a prompt that it will not take
            del self._waiting[name]
            message = f"vLLM refuses row {order.row.key}: {exc}"
            order.deliver(order.row, Failure(order.row.key, "refused", message, retryable=False))

    def _finish(self, output: Any) -> None:
        order = self._waiting.pop(output.request_id, None)
        if order is None:  # cancelled
            return
        path = reply_path(order.row, output.kv_transfer_params, None)
        if isinstance(path, Failure):
            order.deliver(order.row, path)
        else:
            self._readers.submit(self._read, order, Pending(order.row, path, self._options.timeout_seconds))

    def _read(self, order: _Order, pending: Pending) -> None:
        pause = _POLL
        while not pending.ready():
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)
        order.deliver(order.row, pending.read(self._target, self._spec))

    def _fail_all(self, error: EngineUnavailableError) -> None:
        """Every row in flight, and every later one, raises ``error`` in its caller."""
        for order in self._waiting.values():
            order.deliver(order.row, error)
        self._waiting.clear()
        while (message := self._inbox.get()) is not _Message.STOP:
            if isinstance(message, _Order):
                message.deliver(message.row, error)
            else:
                self._cancelled.set()


def start_vllm(target: Target, spec: CaptureSpec, options: VllmOptions, staging: Path) -> Any:
    """An open ``vllm.LLM`` that captures into ``staging``.

    Raises EngineUnavailableError when vLLM cannot be imported or started, PreflightError for a family without capture.
    """
    # Standard output belongs to the command's result; vLLM would log there.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import LLM
    except ImportError as exc:
        raise import_error(exc) from exc
    _require_interface(target)
    chosen = {
        name: value
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "enable_prefix_caching",
            "enforce_eager",
        )
        if (value := getattr(options, name)) or isinstance(value, bool)
    }
    arguments = {"skip_tokenizer_init": True, **vllm_arguments(spec, staging), **chosen, **options.extra}
    try:
        return LLM(model=str(target.path), **arguments)
    except (RuntimeError, ValueError, OSError) as exc:
        raise EngineUnavailableError(
            f"vLLM cannot start with {target.name}: {exc}; its log above says why"
        ) from exc


def _require_interface(target: Target) -> None:
    """Raise PreflightError for an architecture whose vLLM model cannot give inner states."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in target.raw_config.get("architectures") or []:
        entry = ModelRegistry.models.get(architecture)
        if entry is not None and not supports_eagle3(entry.load_model_cls()):
            raise PreflightError(
                f"vLLM's {architecture} cannot give inner states (it lacks the EAGLE3 interface); capture with another engine"
            )


def _memory_folder() -> str | None:
    """/dev/shm where there is one: states stay in memory on their way."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
