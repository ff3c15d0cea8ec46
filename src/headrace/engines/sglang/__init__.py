"""The client of SGLang capture servers, and the command that starts one."""

from headrace.engines.sglang.engine import SglangEngine

__all__ = ["SglangEngine"]
