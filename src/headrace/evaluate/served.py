"""Acceptance read from a running server's own counters, by the same definition as ours, and set beside the offline figure.

SGLang answers every request with its counts (``spec_verify_ct``, ``spec_num_correct_drafts``, a histogram); vLLM keeps
totals (``/metrics``, ``vllm:spec_decode_*``), read before and after each set. SGLang's own ``spec_accept_length`` is another
quantity (completion tokens a verification) and is not used.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx

from headrace.errors import CaptureError, ConfigError, CorruptError, EngineError, EngineUnavailableError
from headrace.evaluate.acceptance import Acceptance
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.offline import Part
from headrace.evaluate.prompts import Conversation, PromptSet
from headrace.files import read_json
from headrace.target import Target

Say = Callable[[str], None]

# A served figure this far from ours, relatively, means that drafter and server do not agree on something.
GAP_LIMIT = 0.10
_MEND = "check the exported taps, norm flags, draft vocabulary and template against the server (headrace diagnose tells which)"


@dataclass(slots=True)
class Reply:
    """One answer of a server."""

    tokens: list[int]
    acceptance: Acceptance | None = None
    """The request's own counts, where the server tells."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a server has counted since it started."""

    acceptance: Acceptance
    tokens: int | None = None
    """Generated tokens of all clients; None where requests carry their own counts."""

    def minus(self, earlier: Totals) -> Totals:
        """What was counted since ``earlier``."""
        tokens = None if self.tokens is None or earlier.tokens is None else self.tokens - earlier.tokens
        return Totals(self.acceptance.minus(earlier.acceptance), tokens)


class Server(ABC):
    """A serving engine as evaluation sees it."""

    name: ClassVar[str]

    def __init__(self, client: httpx.AsyncClient, config: EvaluateConfig, facts: dict[str, Any]) -> None:
        self.client = client
        self.config = config
        self.facts = facts

    @classmethod
    @abstractmethod
    async def probe(cls, client: httpx.AsyncClient, config: EvaluateConfig) -> Server | None:
        """The server if it is of this kind, else None. Raises ConfigError when it drafts otherwise than ``config`` says."""

    @abstractmethod
    async def answer(self, prompt: list[int]) -> Reply:
        """Generate one answer."""

    @abstractmethod
    async def totals(self) -> Totals:
        """Counts since the server started, where it keeps them; zero where requests carry their own."""

    def _sampling(self) -> dict[str, Any]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        if response.status_code != 200:
            raise EngineError(
                f"{self.name} answered {path} with HTTP {response.status_code}: {response.text[:300]}"
            )
        value = response.json()
        if not isinstance(value, dict) or "error" in value:
            raise CaptureError(f"{self.name} answered {path} with {str(value)[:300]}")
        return value


class SglangServer(Server):
    """SGLang: counts come with every answer."""

    name = "sglang"

    @classmethod
    async def probe(cls, client: httpx.AsyncClient, config: EvaluateConfig) -> Server | None:
        """By ``/server_info`` (``/get_server_info`` in older releases)."""
        for path in ("/server_info", "/get_server_info"):
            response = await client.get(path)
            facts = (
                response.json()
                if response.status_code == 200 and "json" in response.headers.get("content-type", "")
                else {}
            )
            if "speculative_algorithm" in facts:
                break
        else:
            return None
        if not facts.get("speculative_algorithm") or not facts.get("speculative_draft_model_path"):
            raise ConfigError(
                f"the SGLang server at {config.server} runs without a drafter; start it with --speculative-algorithm EAGLE3 and "
                "--speculative-draft-model-path"
            )
        _require(config, "steps", facts.get("speculative_num_steps"))
        _require(config, "topk", facts.get("speculative_eagle_topk"))
        if config.topk > 1 and facts.get("speculative_num_draft_tokens") is not None:
            _require(config, "tree_tokens", int(facts["speculative_num_draft_tokens"]) - 1)
        return cls(client, config, facts)

    async def answer(self, prompt: list[int]) -> Reply:
        """Generate through ``/generate``; reads the request's own counts."""
        body = {
            "input_ids": prompt,
            "sampling_params": {**self._sampling(), "max_new_tokens": self.config.max_new_tokens},
        }
        value = await self._post("/generate", body)
        if "output_ids" not in value or "meta_info" not in value:
            raise CaptureError(
                "this SGLang release does not return output_ids and meta_info; use 0.5.11 or newer"
            )
        meta = value["meta_info"]
        verifications = int(meta.get("spec_verify_ct", 0))
        histogram = [int(n) for n in meta.get("spec_correct_drafts_histogram", ())]
        reached = tuple(sum(histogram[i:]) for i in range(1, self.config.steps + 1))
        counts = Acceptance(verifications, reached)
        if verifications and (
            sum(histogram) != verifications or counts.accepted != meta["spec_num_correct_drafts"]
        ):
            raise CaptureError(f"SGLang's counters of one request contradict each other: {meta}")
        return Reply([int(t) for t in value["output_ids"]], counts)

    async def totals(self) -> Totals:
        """Nothing: requests carry their own."""
        return Totals(Acceptance.count([], self.config.steps))


class VllmServer(Server):
    """vLLM: counts are server totals, so nothing else may use the server meanwhile."""

    name = "vllm"
    _LINE = re.compile(
        r"^vllm:(spec_decode_\w+?|generation_tokens)(?:_total)?(?:\{(.*)\})? ([0-9.eE+]+)$", re.MULTILINE
    )

    @classmethod
    async def probe(cls, client: httpx.AsyncClient, config: EvaluateConfig) -> Server | None:
        """By its metrics and model list."""
        metrics = await client.get("/metrics")
        if metrics.status_code != 200 or "vllm:" not in metrics.text:
            return None
        counters = cls._counters(metrics.text)
        if "spec_decode_num_drafts" not in counters:
            raise ConfigError(
                f"the vLLM server at {config.server} runs without a drafter; start it with --speculative-config "
                '\'{"method": "eagle3", "model": FOLDER, "num_speculative_tokens": K}\''
            )
        if config.topk > 1:
            raise ConfigError("vLLM drafts chains; evaluate with topk 1 against it")
        _require(config, "steps", len(counters["spec_decode_num_accepted_tokens_per_pos"]))
        models = (await client.get("/v1/models")).json()["data"]
        version = await client.get("/version")
        facts = {
            "model": models[0]["id"],
            "version": version.json().get("version") if version.status_code == 200 else None,
        }
        return cls(client, config, facts)

    async def answer(self, prompt: list[int]) -> Reply:
        """Generate through ``/v1/completions``. With one request in flight the totals tell its own counts too."""
        if self.config.concurrency > 1:
            return await self._complete(prompt)
        before = await self.totals()
        reply = await self._complete(prompt)
        reply.acceptance = (await self.totals()).minus(before).acceptance
        return reply

    async def _complete(self, prompt: list[int]) -> Reply:
        body = {
            "model": self.facts["model"],
            "prompt": prompt,
            "max_tokens": self.config.max_new_tokens,
            "return_token_ids": True,
            **self._sampling(),
        }
        choice = (await self._post("/v1/completions", body))["choices"][0]
        if not choice.get("token_ids"):
            raise CaptureError("this vLLM release does not return token_ids; use 0.10.2 or newer")
        return Reply([int(t) for t in choice["token_ids"]])

    async def totals(self) -> Totals:
        """From ``/metrics``."""
        counters = self._counters((await self.client.get("/metrics")).text)
        reached = tuple(n for _, n in sorted(counters["spec_decode_num_accepted_tokens_per_pos"].items()))
        acceptance = Acceptance(counters["spec_decode_num_drafts"][0], reached)
        return Totals(acceptance, counters["generation_tokens"][0])

    @classmethod
    def _counters(cls, text: str) -> dict[str, dict[int, int]]:
        """Counter → drafted position (0 where it has none) → value, summed over a server's engines."""
        out: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for name, labels, value in cls._LINE.findall(text):
            position = re.search(r'position="(\d+)"', labels)
            out[name][int(position[1]) if position else 0] += int(float(value))
        return out


def measure_server(
    config: EvaluateConfig,
    target: Target,
    sets: Sequence[PromptSet],
    draft: dict[str, Any],
    parts: Sequence[Part],
    say: Say,
) -> dict[str, Any]:
    """Send every set to the server at ``config.server`` and report its acceptance; ``parts`` are ours, possibly none.

    Raises EngineUnavailableError when nothing answers there, ConfigError when it is no known engine or drafts otherwise.
    """
    return asyncio.run(_measure(config, target, sets, draft, parts, say))


async def _measure(
    config: EvaluateConfig,
    target: Target,
    sets: Sequence[PromptSet],
    draft: dict[str, Any],
    parts: Sequence[Part],
    say: Say,
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=config.concurrency)
    timeout = httpx.Timeout(30.0, read=None)  # a long queue of long answers is no fault
    try:
        async with httpx.AsyncClient(base_url=config.server, limits=limits, timeout=timeout) as client:
            server = await _connect(client, config)
            reports, counts = [], []
            for prompt_set in sets:
                part = next((p for p in parts if p.set_name == prompt_set.name), None)
                acceptance, report = await _measure_set(server, target, prompt_set, part, say)
                reports.append(report)
                counts.append(acceptance)
    except httpx.TransportError as exc:
        raise EngineUnavailableError(
            f"the server at {config.server} cannot be reached ({exc!r}); start it or mend --server"
        ) from exc
    pooled = Acceptance.pooled(counts)
    return {
        "engine": server.name,
        "url": config.server,
        "version": server.facts.get("version"),
        "drafter": _served_drafter(server, draft),
        **pooled.to_dict(),
        "parts": reports,
        "mismatch": any(r["mismatch"] for r in reports),
    }


async def _connect(client: httpx.AsyncClient, config: EvaluateConfig) -> Server:
    for kind in (SglangServer, VllmServer):
        server = await kind.probe(client, config)
        if server is not None:
            return server
    raise ConfigError(
        f"the server at {config.server} is neither SGLang nor vLLM with its metrics on; see docs/evaluate.md"
    )


async def _measure_set(
    server: Server, target: Target, prompt_set: PromptSet, part: Part | None, say: Say
) -> tuple[Acceptance, dict[str, Any]]:
    config = server.config
    tokenizer = target.tokenizer if target.has_tokenizer else None
    talks = [Conversation(p, tokenizer, chat=config.chat) for p in prompt_set.prompts]
    gate = asyncio.Semaphore(config.concurrency)

    async def talk(conversation: Conversation) -> list[Reply]:
        replies = []
        while not conversation.done:
            async with gate:
                replies.append(await server.answer(conversation.ids()))
            conversation.answer(replies[-1].tokens)
        return replies

    before = await server.totals()
    replies = await asyncio.gather(*(talk(conversation) for conversation in talks))
    counted = (await server.totals()).minus(before)
    own = [r.acceptance for rs in replies for r in rs if r.acceptance is not None]
    ours = sum(len(r.tokens) for rs in replies for r in rs)
    if counted.tokens not in (None, ours):
        raise CaptureError(
            f"{server.name} generated {counted.tokens} tokens while ours were {ours}: another client uses the server at "
            f"{config.server}, and its counters are totals. Run again when it is idle"
        )
    acceptance = Acceptance.pooled(own) if own else counted.acceptance
    say(f"{prompt_set.name}: served acceptance length {acceptance.length:.3f}")
    report = {
        "set": prompt_set.name,
        "answers": sum(map(len, replies)),
        **acceptance.to_dict(),
        "mismatch": False,
    }
    if part is not None:
        report |= _beside(
            acceptance,
            dict(zip((p.line for p in prompt_set.prompts), replies, strict=True)),
            part,
            config.steps,
        )
        if report["mismatch"]:
            say(f"{prompt_set.name}: served and offline acceptance differ by {report['gap']:+.1%}; {_MEND}")
    return acceptance, report


def _beside(
    acceptance: Acceptance, replies: dict[int, list[Reply]], part: Part, steps: int
) -> dict[str, Any]:
    """Served against offline: the pooled gap, and answer by answer what is equal."""
    ours = part.acceptance(steps)
    gap = acceptance.length / ours.length - 1 if ours.length else 0.0
    tokens = counts = pairs = 0
    for record in part.records:
        of_line = replies.get(record["line"], [])
        if record["turn"] > len(of_line):
            continue
        reply = of_line[record["turn"] - 1]
        pairs += 1
        tokens += reply.tokens == record["tokens"]
        counts += reply.acceptance == Acceptance.count(record["accepted"], steps)
    out: dict[str, Any] = {
        "offline": round(ours.length, 4),
        "gap": round(gap, 4),
        "mismatch": abs(gap) > GAP_LIMIT,
        "equal_to_offline": f"{tokens}/{pairs}",
    }
    if any(r.acceptance is not None for rs in replies.values() for r in rs):
        out["counts_equal_to_offline"] = f"{counts}/{pairs}"
    return out


def _require(config: EvaluateConfig, option: str, served: Any) -> None:
    value = config.verify_tokens if option == "tree_tokens" else getattr(config, option)
    if served is not None and int(served) != value:
        raise ConfigError(
            f"the server at {config.server} drafts with {option} {served}, the evaluation with {value}; give --{option.replace('_', '-')} {served}"
        )


def _served_drafter(server: Server, draft: dict[str, Any]) -> dict[str, Any]:
    """Which drafter the server loaded, as far as it tells, and whether it was exported from ours."""
    path = server.facts.get("speculative_draft_model_path")
    out: dict[str, Any] = {"path": path, "weights_hash": None, "is_ours": None}
    if not path:
        return out
    try:
        manifest = read_json(Path(path) / "manifest.json")
    except (FileNotFoundError, NotADirectoryError, CorruptError, PermissionError):
        return out  # served from another host, or not exported by Headrace
    source = manifest.get("draft", {}).get("weights_hash") if isinstance(manifest, dict) else None
    return {
        **out,
        "weights_hash": source,
        "is_ours": None if source is None else source == draft["weights_hash"],
    }
