"""An SGLang platform for the CPU on plain torch: no Intel AMX build, no compiled kernel, no accelerator.

SGLang's own CPU backend needs ``sgl-kernel`` built from source. Through its entry-point group ``sglang.srt.platforms`` an
out-of-tree platform may say instead that every operator runs its ``forward_native`` and attention runs ``torch_native``.
Slow and exact: made for tests.
"""

from __future__ import annotations

import gc
from typing import Any

import psutil
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


def activate() -> str:
    """Entry point of the group ``sglang.srt.platforms``: the dotted name of the platform class."""
    # Up to 0.5.22 the platform chooses memory pools; since then SGLang does, and warns about a platform that still tries.
    name = "TorchCpuPlatform" if hasattr(SRTPlatform, "get_kv_pool_cls") else "TorchCpuPlatformWithPools"
    return f"{__name__}.{name}"


class TorchCpuPlatform(SRTPlatform):  # type: ignore[misc]
    """Everything SGLang asks a platform, answered for plain torch on the CPU."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """No CUDA graphs, and sampling in torch."""
        server_args.sampling_backend = server_args.sampling_backend or "pytorch"
        server_args.disable_cuda_graph = True

    def post_load_model(self, model: Any) -> None:
        """torch_native reads K and V back from the cache, so MLA must run absorbed in prefill too, as it does in decode."""
        from sglang.srt.models.deepseek_common.attention_backend_handler import (
            AttentionBackendRegistry,
            AttnForwardMethod,
        )

        AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)

    def get_device(self, device_id: int = 0) -> str:
        """A str: a torch.device would end up in a command line."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        from torch.profiler import ProfilerActivity

        return ProfilerActivity.CPU

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_current_memory_usage(self, device: Any = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def set_device(self, device: Any) -> None:
        """There is one."""

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def empty_cache(self) -> None:
        gc.collect()

    def supports_speculative_algorithm(self, algorithm: Any) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: Any, backend: Any) -> bool:
        return True


class TorchCpuPlatformWithPools(TorchCpuPlatform):
    """For releases that ask the platform which memory pools to use."""

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_mla_kv_pool_cls(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        def pool(*args: Any, index_head_dim: int | None = None, **kwargs: Any) -> Any:
            return MLATokenToKVPool(*args, **kwargs)

        return pool

    def get_paged_allocator_cls(self) -> Any:
        """Pages of one token: torch_native knows no others."""
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        def allocator(size: int, *, page_size: int, **kwargs: Any) -> Any:
            if page_size != 1:
                raise ValueError(f"the CPU platform for tests has pages of one token, not {page_size}")
            return TokenToKVPoolAllocator(size, **kwargs)

        return allocator
