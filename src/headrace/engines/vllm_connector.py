"""Runs inside vLLM: a KV connector that hands over the hidden states vLLM keeps in its paged cache, one file a request.

Loaded by vLLM itself (``kv_connector_module_path``), with the speculative method ``extract_hidden_states``: the states of the
asked layers lie in cache pages of their own, so chunked prefill and prefix caching leave none out, and a preempted request
computes them again. When a request is done, its pages are copied out before they are freed (:mod:`headrace.engines.vllm_pages`).

A request asks for its states with ``kv_transfer_params={"headrace": {"name": ..., "key": ...}}``; one that does not is left alone.
The reply names the file, which holds ``states`` [layers, tokens, hidden] and ``ids`` int32 [tokens], and in its metadata the key, a
checksum of the states and the facts of this engine. If it cannot be written, a file of the same name but ``.error`` says why.

    STAGING/vllm-PID-RANDOM/alive                locked as long as this engine lives; what dead ones left is removed at start
    STAGING/vllm-PID-RANDOM/NAME.safetensors     a finished capture, which the client deletes when it has read it
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.version import __version__ as vllm_version

from headrace.engines.vllm_pages import Limits, PageWriter, Save
from headrace.sglang_plugin.staging import reclaim_dead

PROTOCOL = 1
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,120}")


@dataclass
class SaveList(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side tells the workers in one step."""

    saves: list[Save] = field(default_factory=list)


class HeadraceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One instance in the scheduler's process, one in each worker; vLLM says which by ``role``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                "hidden states of earlier pipeline stages never reach the last one: use pipeline_parallel_size=1"
            )
        if (
            vllm_config.speculative_config is None
            or vllm_config.speculative_config.method != "extract_hidden_states"
        ):
            raise ValueError(
                "HeadraceConnector needs the speculative method extract_hidden_states; see headrace.engines.vllm"
            )
        extra = self._kv_transfer_config.get_from_extra_config
        self._limits = Limits(int(extra("pending_bytes", 4 << 30)), int(extra("staging_bytes", 16 << 30)))
        self._facts = facts_of(vllm_config)
        layers = self._facts["layers"]
        if list(layers) != sorted(set(layers)):
            raise ValueError(
                f"vLLM gives layers in ascending order whatever was asked: ask for {sorted(set(layers))}, not {layers}"
            )
        self._folder: Path | None = None
        self._alive = -1
        if role == KVConnectorRole.SCHEDULER:
            self._folder, self._alive = _own_folder(Path(extra("staging", "")))
        self._group = _hidden_states_group(kv_cache_config)
        self._saves: list[Save] = []
        self._worker: PageWriter | None = None

    def get_finished_count(self) -> int:
        """Only rank 0 writes: states are the same on every tensor-parallel rank."""
        return 1

    # --- in the scheduler ---------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> SaveList:
        """Hand the finished requests to the workers."""
        saves, self._saves = self._saves, []
        return SaveList(saves)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan the copy of a finished request; its pages stay until the worker reports the copy done."""
        asked = (request.kv_transfer_params or {}).get("headrace")
        if asked is None:
            return False, None
        blocks = list(block_ids[self._group]) if self._group < len(block_ids) else []
        ids = list(request.prompt_token_ids or [])
        problem = _refusal(asked, request, ids)
        if problem:
            return False, {"headrace": {"key": asked.get("key"), "error": problem}}
        assert self._folder is not None  # made by the constructor in this role
        path = self._folder / f"{asked['name']}.safetensors"
        self._saves.append(Save(request.request_id, str(path), str(asked["key"]), ids, blocks))
        return True, {"headrace": {"key": asked["key"], "path": str(path), "tokens": len(ids)}}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same for engines with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,) * (self._group + 1))

    # --- in the workers -----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the pages that hold hidden states."""
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise ValueError(f"expected one cache of hidden states, vLLM has {len(layers)}")
        if get_tensor_model_parallel_rank() == 0:
            self._worker = PageWriter(kv_caches[next(iter(layers))], self._facts, self._limits)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """States are copied when a request is done, not layer by layer."""

    def wait_for_save(self) -> None:
        """See :meth:`get_finished`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the copies planned by the scheduler; report those whose pages may be freed."""
        if self._worker is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            if isinstance(metadata, SaveList):
                for save in metadata.saves:
                    self._worker.start(save)
        return self._worker.copied(finished_req_ids) or None, None

    def shutdown(self) -> None:
        """Finish the writes under way; the scheduler's side removes the folder, which nobody can be reading any more."""
        if self._worker is not None:
            self._worker.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._alive)
            self._folder = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """Pages of [block, layer, slot, hidden]."""
        return "LBNHC"


def _own_folder(staging: Path) -> tuple[Path, int]:
    """Make a folder of our own in ``staging`` and lock its ``alive`` file; remove what dead engines left."""
    if not staging.is_absolute():
        raise ValueError(
            f"kv_connector_extra_config needs 'staging', an absolute path; it is {str(staging)!r}"
        )
    staging.mkdir(parents=True, exist_ok=True)
    reclaim_dead(staging)
    folder = staging / f"vllm-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    alive = os.open(folder / "alive", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, alive


def _refusal(asked: Any, request: Any, ids: list[int]) -> str:
    """Why this request's states cannot be given, ``""`` when they can."""
    if not isinstance(asked, dict) or not _NAME.fullmatch(str(asked.get("name", ""))) or "key" not in asked:
        return "the request's headrace parameters are malformed (name and key are needed)"
    if not ids:
        return "the request has no token ids (embeddings are not supported)"
    if request.num_computed_tokens < len(ids):
        return f"only {request.num_computed_tokens} of {len(ids)} tokens were computed (aborted)"
    return ""


def facts_of(config: Any) -> dict[str, Any]:
    """What a client must know of this engine to trust its states."""
    text = config.model_config.hf_text_config
    parallel, scheduler, cache = config.parallel_config, config.scheduler_config, config.cache_config
    return {
        "protocol": PROTOCOL,
        "vllm": vllm_version,
        "layers": list(
            config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        ),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization or "",
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "tensor_parallel": parallel.tensor_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "eager": bool(config.model_config.enforce_eager),
    }


def _hidden_states_group(config: Any) -> int:
    """Which cache group holds the hidden states."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = [] if config is None else list(config.kv_cache_groups)
    found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1:
        return found[0]
    if not found and len(groups) <= 1:
        return 0
    raise ValueError(
        f"vLLM keeps hidden states in {len(found)} of {len(groups)} cache groups, expected one of its own"
    )
