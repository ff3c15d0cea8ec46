"""What is asked of an endpoint before the first conversation: does it give token ids, and is its tokenizer ours."""

from __future__ import annotations

from typing import Any

from headrace.data.api import Endpoint
from headrace.errors import SpecMismatchError

_PROBES = (
    "Hello, wörld!\n\n  two spaces",
    "e\u0301 漢字 👩‍🚀",
    "1234567890 3.14",
    "def f(x):\n    return x ** 2\n",
)


async def gives_ids(endpoint: Endpoint) -> bool:
    """Whether this is SGLang or vLLM, which give sampled ids; each is known by an address that others lack."""
    for path in ("/get_model_info", "/version"):
        if isinstance(await endpoint.get(endpoint.root + path), dict):
            return True
    return False


async def compare_tokenizers(endpoint: Endpoint, model: str, tokenizer: Any) -> bool:
    """Whether the server could be compared. Raises SpecMismatchError at the first text it encodes otherwise.

    Every added token and texts of several kinds are compared: a tokenizer whose special ids are shifted passes any other
    check, and makes every id meaningless.
    """
    special = [str(getattr(t, "content", t)) for t in tokenizer.added_tokens_decoder.values()]
    for text in (*_PROBES, *special):
        reply = await endpoint.post(
            f"{endpoint.root}/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}
        )
        theirs = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(theirs, list):
            return False
        ours = list(tokenizer.encode(text, add_special_tokens=False))
        if theirs and isinstance(theirs[0], list):
            theirs = theirs[0]
        if theirs != ours:
            raise SpecMismatchError(
                f"the server encodes {text!r} as {theirs[:12]}, the local tokenizer as {ours[:12]}; serve and prepare with one"
            )
    return True
