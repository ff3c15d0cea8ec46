"""One request to an OpenAI-compatible endpoint and every way it can fail, told apart.

A reply counts only when it says something: status 200 is no promise. Faults are of three kinds: :class:`Busy` (try
again: 429, 5xx, time-outs, broken bodies, and all of these hidden inside a 200), :class:`Refused` (this conversation
cannot be answered) and :class:`Stop` (no conversation can: wrong key, no credit).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from headrace.errors import ConfigError

_TRANSIENT = frozenset({408, 409, 425, 429})
_HOPELESS = frozenset({401, 402, 403})
_REASONING = ("reasoning_content", "reasoning")


class Busy(Exception):
    """Trying again may help. ``after`` is what the server asked to wait, in seconds."""

    def __init__(self, reason: str, detail: str, after: float | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.after = reason, detail, after


class Refused(Exception):
    """This conversation cannot be answered, however often it is sent."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class Stop(Exception):
    """No conversation can be answered."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


@dataclass(slots=True)
class Answer:
    """What the target said in one turn."""

    message: dict[str, Any]
    finish: str
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    provider: str = ""
    model: str = ""
    usage: dict[str, float] = field(default_factory=dict)
    """prompt_tokens, completion_tokens and, where told, cost in US dollars."""


class Endpoint:
    """Sends chat requests. The key is read from the environment, goes into one header, and is kept nowhere else."""

    def __init__(self, url: str, api_key_env: str, timeout: float, in_flight: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url} is no web address; give one such as http://127.0.0.1:30000/v1")
        if parts.username or parts.password:
            raise ConfigError(
                "--url holds a user name or password; put the key into the environment variable of --api-key-env"
            )
        self.url = url.rstrip("/")
        self.root = self.url.removesuffix("/v1")
        key = os.environ.get(api_key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
        self.client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(timeout, connect=30.0, pool=None), limits=limits
        )

    async def chat(self, body: dict[str, Any]) -> Answer:
        """One answer. Raises Busy, Refused or Stop."""
        try:
            reply = await self.client.post(f"{self.url}/chat/completions", json=body)
        except httpx.TimeoutException as exc:
            raise Busy("timeout", f"no answer in time ({type(exc).__name__})") from exc
        except httpx.TransportError as exc:
            raise Busy("connection", f"{type(exc).__name__}: {exc}") from exc
        if reply.status_code != 200:
            raise _fault(reply.status_code, _error_text(reply.text), _retry_after(reply.headers))
        return read_answer(read_body(reply.text), _retry_after(reply.headers))

    async def get(self, url: str) -> Any:
        """JSON of a GET, None when the server has no such thing. Raises Busy when it cannot be reached."""
        return await self._quiet(self.client.build_request("GET", url))

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        """JSON of a POST, None when the server has no such thing. Raises Busy when it cannot be reached."""
        return await self._quiet(self.client.build_request("POST", url, json=body))

    async def _quiet(self, request: httpx.Request) -> Any:
        try:
            reply = await self.client.send(request)
        except httpx.TransportError as exc:
            raise Busy("connection", f"{type(exc).__name__}: {exc}") from exc
        try:
            return reply.json() if reply.status_code == 200 else None
        except ValueError:
            return None


def _fault(code: int, detail: str, after: float | None) -> Busy | Refused | Stop:
    if code in _HOPELESS:
        return Stop(f"status {code}: {detail}")
    if code in _TRANSIENT or code >= 500:
        return Busy("rate_limited" if code == 429 else f"status_{code}", detail, after)
    return Refused(f"status_{code}", detail)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        return None  # a date, or nothing: the usual back-off does


def _error_text(text: str) -> str:
    try:
        error = json.loads(text)
    except ValueError:
        error = text
    while isinstance(error, dict) and ("error" in error or "message" in error):
        error = error.get("error") or error.get("message")
    return str(error)[:300]


def read_body(text: str) -> dict[str, Any]:
    """The reply as one object; a stream of events, which some proxies send unasked, is put together. Raises Busy."""
    if text.lstrip().startswith(("data:", ":", "event:")):
        return _join_events(text)
    try:
        body = json.loads(text)
    except ValueError as exc:
        raise Busy("broken_body", f"the reply is not JSON: {text[:100]!r}") from exc
    if not isinstance(body, dict):
        raise Busy("broken_body", f"the reply is a JSON {type(body).__name__}")
    return body


def _join_events(text: str) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    finish = None
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError as exc:
            raise Busy("broken_body", "an event of the reply is not JSON") from exc
        if event.get("error"):
            return {"error": event["error"]}
        whole.update({k: v for k, v in event.items() if k != "choices"})
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or choice.get("message") or {}
            for key in ("content", *_REASONING):
                if delta.get(key):
                    message[key] = message.get(key, "") + delta[key]
            finish = choice.get("finish_reason") or finish
    if finish is None:
        raise Busy("broken_body", "the event stream ended before the answer did")
    return {**whole, "choices": [{"message": message, "finish_reason": finish}]}


def read_answer(body: dict[str, Any], after: float | None = None) -> Answer:
    """The answer inside a status-200 body. Raises Busy, Refused or Stop for a body that holds none."""
    _raise_error(body.get("error"), after)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Busy("no_choices", f"the reply has no choices: {json.dumps(body)[:200]}")
    choice = choices[0]
    _raise_error(choice.get("error"), after)
    finish = str(choice.get("finish_reason") or "")
    if finish in ("error", "abort"):
        raise Busy("finish_error", f"the provider ended the answer with {finish!r}")
    if finish == "content_filter":
        raise Refused("content_filter", "the provider's filter stopped the answer")
    usage = body.get("usage") or {}
    return Answer(
        _said(choice.get("message"), finish),
        finish,
        _ids(choice.get("prompt_token_ids", body.get("prompt_token_ids"))),
        _ids(choice.get("response_token_ids", choice.get("token_ids"))),
        str(body.get("provider") or ""),
        str(body.get("model") or ""),
        {
            k: float(usage[k])
            for k in ("prompt_tokens", "completion_tokens", "cost")
            if isinstance(usage.get(k), (int, float))
        },
    )


def _raise_error(error: Any, after: float | None) -> None:
    """Raise what an error object inside a body stands for: by its code as by an HTTP status, else try again."""
    if not error:
        return
    detail = _error_text(json.dumps(error))
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    if isinstance(code, int) and not isinstance(code, bool) and code >= 400:
        raise _fault(code, detail, after)
    raise Busy("error_in_body", detail, after)


def _said(message: Any, finish: str) -> dict[str, Any]:
    """The assistant message, without keys that are empty. Raises Busy or Refused when it says nothing."""
    if not isinstance(message, dict):
        raise Busy("no_message", "the reply has a choice without a message")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(p.get("text", "") for p in content if isinstance(p, dict))
    said: dict[str, Any] = {"role": "assistant", "content": content or ""}
    for key in _REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            said[key] = message[key]
            break
    calls = message.get("tool_calls") or []
    if calls:
        said["tool_calls"] = calls
    if said["content"].strip() or calls:
        return said
    if finish == "length":
        raise Refused(
            "budget_consumed_by_reasoning",
            "the token budget went into reasoning, no answer came; raise --max-tokens",
        )
    raise Busy("empty_answer", f"the answer is empty (finish reason {finish or 'missing'})")


def _ids(value: Any) -> list[int] | None:
    if isinstance(value, list) and value and all(isinstance(i, int) for i in value):
        return list(value)
    return None
