"""Every name of SGLang's internals that Headrace knows, and nothing else: a new release is mended here.

Read and run in 0.5.17 to 0.5.23 (see docs/engines.md for what was run where). What differs between them:

- states: 0.5.23 captures auxiliary states itself ("native"); before, and for the final state alone, two hooks make the model
  capture and put its final state beside them ("hooks");
- everything else is the same in all of them.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace.sglang_plugin.capture import ForwardStates, Segment
from headrace.types import FINAL, Tap

SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
PAYLOAD = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.to_payload"
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
STORED_STATES = "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store"


def version() -> str:
    """The installed SGLang's version."""
    return importlib.metadata.version("sglang")


def check_names(targets: list[str]) -> list[str]:
    """Those of ``targets`` that this SGLang does not have. Hooks on them would be dropped with no more than a log line."""
    missing: list[str] = []
    for target in targets:
        try:
            pkgutil.resolve_name(target)
        except (AttributeError, ImportError):
            missing.append(target)
    return missing


def register(target: str, hook: Callable[..., Any], kind: str) -> None:
    """Hook ``target``; ``kind`` is before, after or around (see SGLang's HookRegistry)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType(kind))


# --- the scheduler ------------------------------------------------------------------------------------------------


def obstacles(scheduler: Any) -> list[str]:
    """What this server does that rows cannot be captured rightly under, one sentence each."""
    args = _arguments(scheduler)
    parallel = _parallel()
    found: list[str] = []
    if parallel.pp_size > 1:
        found.append(
            "pipeline parallelism: only the last stage's layers would be seen; use tensor or expert parallelism"
        )
    if scheduler.disaggregation_mode.value != "null":
        found.append(
            "prefill/decode disaggregation: its result path drops captured states; start one server for both"
        )
    if getattr(args, "enable_two_batch_overlap", False):
        found.append(
            "two-batch overlap: layers run that way capture nothing; drop --enable-two-batch-overlap"
        )
    if not scheduler.spec_algorithm.is_none():
        found.append(
            "speculative decoding: rows of rejected tokens would mix in; start the target without a draft model"
        )
    if getattr(args, "enable_prefill_cp", False) or getattr(args, "attn_cp_size", 1) > 1:
        found.append("context parallelism: each rank holds a part of the rows; drop it")
    if not scheduler.is_generation:
        found.append("an embedding or reward model: it answers on another path")
    return found


def rank(scheduler: Any) -> int:
    """A number for this scheduler among those that answer requests: over replicas, and over attention groups inside one."""
    parallel = _parallel()
    replica = getattr(parallel, "dp_rank", None)
    if replica is None:
        replica = getattr(getattr(scheduler, "ps", None), "dp_rank", None)
    return int(replica or 0) * int(parallel.attn_dp_size) + int(parallel.attn_dp_rank)


def ranks(scheduler: Any) -> int:
    """How many data-parallel ranks share the server."""
    args = _arguments(scheduler)
    return max(1, int(args.dp_size)) * max(1, int(getattr(args, "attn_dp_size", 1) or 1))


def writes(scheduler: Any) -> bool:
    """Whether this process is the one of its tensor-parallel group that answers requests; states are the same on all."""
    return int(_parallel().attn_tp_rank) == 0


def settings(scheduler: Any) -> dict[str, Any]:
    """What may change a number or a speed, for provenance and for the doctor."""
    args = _arguments(scheduler)
    names = (
        "model_path", "tp_size", "dp_size", "ep_size", "enable_dp_attention", "chunked_prefill_size", "enable_mixed_chunk",
        "max_prefill_tokens", "context_length", "disable_radix_cache", "disable_overlap_schedule", "quantization",
        "kv_cache_dtype", "attention_backend", "disable_cuda_graph", "device", "enable_deterministic_inference",
    )  # fmt: skip
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {
        **{
            name: value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
            for name, value in found.items()
        },
        "max_total_tokens": int(scheduler.max_total_num_tokens),
        "torch": torch.__version__,
    }


def model_facts(scheduler: Any) -> tuple[int, int, str, torch.device]:
    """Decoder layers, hidden size, dtype name and device of the model."""
    config = scheduler.model_config
    runner = scheduler.tp_worker.model_runner
    layers = int(config.hf_text_config.num_hidden_layers)
    return (
        layers,
        int(config.hidden_size),
        str(runner.dtype).removeprefix("torch."),
        torch.device(runner.device),
    )


def _arguments(scheduler: Any) -> Any:
    """The server's arguments as they were resolved; since 0.5.19 the object itself keeps what was typed."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return scheduler.server_args
    return resolving_view(scheduler.server_args)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


# --- layers -------------------------------------------------------------------------------------------------------


def captured_boundaries(scheduler: Any) -> list[int] | None:
    """The boundaries the loaded model captures: its decoder lists layers at whose start it does. None if it has no such list."""
    model = scheduler.tp_worker.model_runner.model
    for module in (model, *(m for name, m in model.named_modules() if name)):
        layers = getattr(module, "layers_to_capture", None)
        if layers:
            return sorted(int(layer) for layer in layers)
    return None


def capture_boundaries(runner: Any, boundaries: list[int]) -> None:
    """Make a freshly loaded model capture ``boundaries``. Raises ValueError when its class cannot.

    "Output of layer k" is boundary k + 1, and so mean both setters wherever the first exists; only among the families
    that lack it (Qwen2, Gemma3, GLM-4, ...) is the second used, and none of those has the exception DeepSeek makes in it.
    """
    model = runner.model
    for name in ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"):
        setter = getattr(model, name, None)
        if setter is not None:
            setter([boundary - 1 for boundary in boundaries])
            return
    raise ValueError(
        f"{type(model).__name__} cannot capture boundaries in this SGLang; capture 'final' alone or use another engine"
    )


# --- forwards -----------------------------------------------------------------------------------------------------


def segments(batch: Any) -> Iterator[Segment] | None:
    """The segments of a forward in the order of its rows; None when it is no prefill. Read now: the batch changes later."""
    if batch is None or not batch.forward_mode.is_extend():
        return None
    return _segments(batch)


def _segments(batch: Any) -> Iterator[Segment]:
    decoding = {id(request) for request in batch.decoding_reqs or ()}
    for request, rows, start in zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True):
        # A request decoding in a mixed batch has one row, for a position after its prompt: nobody wants it.
        wish = None if id(request) in decoding else request.sampling_params.custom_params
        yield Segment(request, request.rid, wish, len(request.origin_input_ids), start, rows)


def native_states(
    batch: Any, result: Any, boundaries: list[int], taps: tuple[Tap, ...], rows: int
) -> ForwardStates:
    """States of a forward where SGLang captures by itself. Raises ValueError when they are not those asked for."""
    output = result.logits_output
    final = getattr(output, "last_hidden_states", None)
    if output is None or output.hidden_states is None or (FINAL in taps and final is None):
        raise ValueError("the forward gave no hidden states; start the server with headrace serve")
    return _split(batch, output.hidden_states, final if FINAL in taps else None, boundaries, taps, rows)


def hooked_states(
    batch: Any, result: Any, boundaries: list[int], taps: tuple[Tap, ...], rows: int
) -> ForwardStates:
    """States of a forward as :func:`stored_states` packed them. Raises ValueError when they are not those asked for."""
    output = result.logits_output
    if output is None or output.hidden_states is None:
        raise ValueError("the forward gave no hidden states; start the server with headrace serve")
    packed = output.hidden_states
    width = packed.shape[-1] // (len(boundaries) + 1)
    cut = width * len(boundaries)
    return _split(batch, packed[:, :cut], packed[:, cut:], boundaries, taps, rows)


def stored_states(original: Callable[..., Any], boundaries: list[int], *args: Any, **kwargs: Any) -> Any:
    """Around ``LogitsProcessor._get_hidden_states_to_store``: [rows, (boundaries + 1) * hidden], final state last.

    One tensor, because under a CUDA graph only the output's own fields are copied out of the graph's buffers.
    """
    _processor, hidden, _before_norm, auxiliary, *_ = args
    metadata = kwargs.get("logits_metadata", args[-1])
    if not metadata.capture_hidden_mode.is_full():
        return original(*args, **kwargs)
    if not boundaries:
        return hidden
    parts = [auxiliary] if isinstance(auxiliary, torch.Tensor) else list(auxiliary or ())
    packed = torch.cat([*parts, hidden], dim=-1)
    if packed.shape[-1] != hidden.shape[-1] * (len(boundaries) + 1):
        got = packed.shape[-1] / hidden.shape[-1] - 1
        raise ValueError(
            f"the model captured {got:g} boundaries, {len(boundaries)} were asked for: {boundaries}"
        )
    return packed


def _split(
    batch: Any,
    packed: torch.Tensor,
    final: torch.Tensor | None,
    boundaries: list[int],
    taps: tuple[Tap, ...],
    rows: int,
) -> ForwardStates:
    """One view a tap, in the order of ``taps``; SGLang packs boundaries in ascending order, whatever was asked."""
    order = sorted(boundaries)
    by_tap: dict[Tap, torch.Tensor] = {}
    if order:
        if packed.shape[-1] % len(order):
            raise ValueError(f"states are {packed.shape[-1]} wide, not {len(order)} boundaries of one width")
        by_tap.update(zip(order, packed.chunk(len(order), dim=-1), strict=True))
    if final is not None:
        by_tap[FINAL] = final
    parts = [by_tap[tap] for tap in taps]
    ids = batch.input_ids
    if (
        ids is None
        or ids.shape[0] != rows
        or any(part.shape[0] != rows or part.dtype != parts[0].dtype for part in parts)
    ):
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(
            f"a forward of {rows} rows gave states {shapes} and ids {None if ids is None else tuple(ids.shape)}"
        )
    return ForwardStates(ids, parts)


# --- replies ------------------------------------------------------------------------------------------------------


def finished(payload: Any) -> Iterator[tuple[int, str, bool]]:
    """Place, request id and "was aborted" of each finished request in a reply that is about to be sent."""
    for place, (rid, reason) in enumerate(zip(payload.rids, payload.finished_reasons, strict=True)):
        if reason is not None:
            yield place, rid, reason.get("type") == "abort"


def attach(payload: Any, key: str, values: dict[int, dict[str, Any]]) -> None:
    """Put ``values`` (by place) into the replies' ``meta_info[key]``, each as a list of one."""
    payload.customized_info[key] = [[values[i]] if i in values else [] for i in range(len(payload.rids))]
