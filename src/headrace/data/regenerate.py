"""``regenerate``: every answer replaced by the target's own, many requests in flight, spend and failures accounted for.

A conversation's turns are asked one after another on the history that was regenerated so far; the user's later messages
stay as they are, even where they no longer fit (a known limit). A tool result is kept only when the new answer makes
the calls it belongs to; else the conversation ends there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import stamina

from headrace.data.account import Totals
from headrace.data.answers import AnswerFile
from headrace.data.api import Answer, Busy, Endpoint, Refused, Stop
from headrace.data.config import RegenerateConfig
from headrace.data.endpoint import compare_tokenizers, gives_ids
from headrace.data.progress import Progress
from headrace.data.readers import Chunk
from headrace.data.reasons import Bad, Drop
from headrace.data.records import Conversation, RecordReader, prune_none
from headrace.data.sources import Sources, find_sources
from headrace.data.talk import Talk, first_prompt, fits, plain, wanted_turns
from headrace.errors import (
    EngineUnavailableError,
    InputError,
    PreflightError,
)
from headrace.target import Target
from headrace.types import hash_json

Say = Callable[[str], None]
_ASKED_OF_IDS = {"return_token_ids": True}


@dataclass(slots=True)
class Task:
    """One conversation to be answered."""

    key: str
    conversation: Conversation
    source: str
    line: int


def regenerate(config: RegenerateConfig, say: Say = lambda _: None) -> dict[str, Any]:
    """Answer the conversations of ``config.files`` into ``config.out``; returns counts, cost, ``seconds``, ``out``.

    Raises ConfigError and InputError before the first request for what is wrong with options, output or input;
    EngineUnavailableError for an endpoint that cannot be reached, PreflightError for one that lacks token ids that were
    required; IncompleteError when conversations failed or a limit ended the run: run it again to go on.
    """
    sources = find_sources(config.files)
    endpoint = Endpoint(config.url, config.api_key_env, config.timeout, config.in_flight)
    with AnswerFile(config.out, _settings(config)) as answers:
        run = _Run(config, sources, endpoint, answers, say)
        try:
            asyncio.run(run.go())
        finally:
            answers.write_manifest({"failed": dict(run.totals.failed), "skipped": dict(run.totals.skipped)})
    return run.result()


def _settings(config: RegenerateConfig) -> dict[str, Any]:
    """What decides an answer; continuing with other values would mix two data sets."""
    keys = (
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "extra_body",
        "turns",
        "keep_cut",
        "provider",
        "quantization",
    )
    return config.model_dump(mode="json", include=set(keys))


class _Run:
    """One run; everything here lives in one event loop."""

    def __init__(
        self, config: RegenerateConfig, sources: Sources, endpoint: Endpoint, answers: AnswerFile, say: Say
    ) -> None:
        self.config, self.sources, self.endpoint, self.answers, self.say = (
            config,
            sources,
            endpoint,
            answers,
            say,
        )
        self.reader = RecordReader(aliases=config.role_aliases, answers=False)
        self.totals = Totals()
        self.totals.cost, self.totals.dearest = answers.spent, answers.dearest
        self.ask_ids = False
        self.position = 0
        self.stopped = ""
        self._reserved = 0.0

    async def go(self) -> None:
        async with self.endpoint.client:
            await self._check_endpoint()
            tasks = self._tasks()
            with Progress("regenerate", self.sources.size, self.say) as progress:
                workers = [
                    asyncio.create_task(self._work(tasks, progress)) for _ in range(self.config.in_flight)
                ]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)

    # --- the endpoint -------------------------------------------------------------------------------------------

    async def _check_endpoint(self) -> None:
        config, endpoint = self.config, self.endpoint
        try:
            models = await endpoint.get(f"{endpoint.url}/models")
            self.ask_ids = config.token_ids != "off" and await gives_ids(endpoint)
            if config.tokenizer and self.ask_ids:
                tokenizer = Target.open(config.tokenizer).tokenizer
                if not await compare_tokenizers(endpoint, config.model, tokenizer):
                    self.say(f"{config.url} has no /tokenize; its tokenizer was not compared")
        except Busy as exc:
            raise EngineUnavailableError(
                f"{config.url} cannot be reached ({exc.detail}); check the address and that it runs"
            ) from exc
        names = (
            [str(m.get("id")) for m in (models or {}).get("data") or [] if isinstance(m, dict)]
            if isinstance(models, dict)
            else []
        )
        if names and config.model not in names:
            self.say(
                f"{config.url} does not list a model {config.model!r}, but {names[:5]}; asking for it all the same"
            )
        if config.token_ids == "require" and not self.ask_ids:
            raise PreflightError(
                f"{config.url} is neither SGLang nor vLLM, it gives no token ids; drop --token-ids require or serve the model yourself"
            )

    # --- the conversations --------------------------------------------------------------------------------------

    def _tasks(self) -> Iterator[Task]:
        """Conversations not answered yet, each once, read as they are needed."""
        seen: set[str] = set()
        for chunk in self.sources.chunks():
            for task in self._read(chunk):
                if task.key in seen:
                    self.totals.skipped["duplicate"] += 1
                elif self.config.limit and len(seen) >= self.config.limit:
                    return
                else:
                    seen.add(task.key)
                    if task.key not in self.answers.done:
                        yield task
            self.position = self.sources.bytes_before(chunk)

    def _read(self, chunk: Chunk) -> Iterator[Task]:
        name = self.sources.items[chunk.source].name
        raw: Any = chunk.texts if chunk.arrow is None else [prune_none(r) for r in chunk.arrow.to_pylist()]
        for line, record in zip(chunk.lines, raw, strict=True):
            try:
                item = self.reader.read(self.reader.parse(record) if chunk.arrow is None else record)
                if not isinstance(item, Conversation):
                    raise Drop("no_conversation")
                if not any(m["role"] in ("user", "tool") for m in item.messages):
                    raise Drop("no_prompt")
            except Drop as exc:
                self.totals.skipped[exc.reason] += 1
                continue
            except Bad as exc:
                if self.config.on_bad_row == "stop":
                    raise InputError(
                        f"{name} line {line}: the record {exc.detail}. Mend it, or go on without with --on-bad-row skip"
                    ) from exc
                self.totals.skipped[exc.reason] += 1
                continue
            yield Task(hash_json([item.messages, item.tools]), item, name, line)

    async def _work(self, tasks: Iterator[Task], progress: Progress) -> None:
        for task in tasks:
            if self._must_stop():
                return
            began = time.monotonic()
            try:
                record = await self._converse(task)
            except (Busy, Refused) as exc:
                self._failed(task, exc.reason, exc.detail)
            except Stop as exc:
                self.stopped = self.stopped or f"the endpoint refuses every request ({exc.detail})"
                return
            else:
                record["generation"]["seconds"] = round(time.monotonic() - began, 3)
                self.answers.add(record)
                self.totals.answered += 1
                self.totals.in_a_row = 0
            progress.update(self.position, self.totals.line())

    def _must_stop(self) -> bool:
        config, totals = self.config, self.totals
        if config.max_cost and totals.cost + self._reserved + totals.dearest > config.max_cost:
            self.stopped = (
                self.stopped
                or f"the cost limit of ${config.max_cost:g} is reached (${totals.cost:.4f} spent)"
            )
        if config.max_total_tokens and totals.tokens >= config.max_total_tokens:
            self.stopped = (
                self.stopped or f"the limit of {config.max_total_tokens:,} answer tokens is reached"
            )
        if totals.in_a_row >= config.give_up_after:
            self.stopped = self.stopped or f"{totals.in_a_row} conversations in a row failed"
        return bool(self.stopped)

    def _failed(self, task: Task, reason: str, detail: str) -> None:
        self.totals.failed[reason] += 1
        self.totals.in_a_row += 1
        place = {"key": task.key, "id": task.conversation.identity, "source": task.source, "line": task.line}
        self.answers.fail({**place, "reason": reason, "message": detail})

    # --- one conversation ---------------------------------------------------------------------------------------

    async def _converse(self, task: Task) -> dict[str, Any]:
        """The finished record of a conversation. Raises Busy, Refused or Stop."""
        wanted = wanted_turns(task.conversation, self.config.turns)
        history: list[dict[str, Any]] = []
        talk = Talk()
        messages, first = task.conversation.messages, first_prompt(task.conversation)
        for index in range(len(messages) + 1):
            if index in wanted:
                answer = await self._ask(history, task, index)
                talk.add(answer, sum(m["role"] == "assistant" for m in history))
                history.append(answer.message)
            elif index < first and messages[index]["role"] == "assistant":
                continue  # nobody had asked anything yet
            elif index < len(messages) and messages[index]["role"] == "assistant":
                history.append(
                    {**plain(messages[index]), "weight": 0}
                )  # not the target's words: context only
                talk.finish.append(None)
            elif index < len(messages):
                history.append(plain(messages[index]))
            if wanted and index >= max(wanted):
                break
            if not fits(history, messages, index):
                self.totals.skipped["tool_path_left"] += 1
                break
        record = {
            "id": task.conversation.identity,
            "key": task.key,
            "source": task.source,
            "line": task.line,
            "messages": history,
        }
        if task.conversation.tools:
            record["tools"] = task.conversation.tools
        return {**record, **talk.describe()}

    async def _ask(self, history: list[dict[str, Any]], task: Task, index: int) -> Answer:
        """One turn's answer, with retries. Raises Busy when these are used up, Refused or Stop."""
        body = self._body(history, task, index)
        reserved = self.totals.dearest
        self._reserved += reserved
        try:
            # The pause the server asks for is kept first; stamina's own jittered back-off comes on top.
            retries = stamina.retry_context(
                on=Busy,
                attempts=self.config.tries,
                timeout=None,
                wait_initial=0.5,
                wait_max=self.config.max_wait,
                wait_jitter=1.0,
            )
            async for attempt in retries:
                with attempt:
                    self.totals.requests += 1
                    self.totals.retries += attempt.num > 1
                    try:
                        answer = await self.endpoint.chat(body)
                    except Busy as exc:
                        if exc.after and attempt.num < self.config.tries:
                            await asyncio.sleep(min(exc.after, self.config.max_wait))
                        raise
        finally:
            self._reserved -= reserved
        self._spend(answer)
        self._check(answer)
        return answer

    def _body(self, history: list[dict[str, Any]], task: Task, index: int) -> dict[str, Any]:
        config = self.config
        sent = [{k: v for k, v in m.items() if k != "weight"} for m in history]
        body: dict[str, Any] = {"model": config.model, "messages": sent, "max_tokens": config.max_tokens}
        body |= {"temperature": config.temperature, "top_p": config.top_p}
        if config.seed is not None:
            body["seed"] = int(hash_json([config.seed, task.key, index])[:8], 16) & 0x7FFFFFFF
        if task.conversation.tools:
            body["tools"] = task.conversation.tools
        if config.provider or config.quantization:
            provider: dict[str, Any] = {"allow_fallbacks": False}
            if config.provider:
                provider |= {"order": [config.provider], "only": [config.provider]}
            if config.quantization:
                provider["quantizations"] = [config.quantization]
            body |= {"provider": provider, "usage": {"include": True}}
        if self.ask_ids:
            body |= _ASKED_OF_IDS
        return {**body, **config.extra_body}

    def _spend(self, answer: Answer) -> None:
        config, usage = self.config, answer.usage
        if "cost" not in usage and (config.price_in or config.price_out):
            usage["cost"] = (
                usage.get("prompt_tokens", 0) * config.price_in
                + usage.get("completion_tokens", 0) * config.price_out
            ) / 1e6
        self.totals.tokens += int(usage.get("completion_tokens", 0))
        self.totals.cost += usage.get("cost", 0.0)
        self.totals.dearest = max(self.totals.dearest, usage.get("cost", 0.0))
        self.answers.spent = self.totals.cost

    def _check(self, answer: Answer) -> None:
        config = self.config
        if config.provider and answer.provider and answer.provider.lower() != config.provider.lower():
            raise Refused(
                "other_provider", f"{answer.provider} answered although {config.provider} was pinned"
            )
        if answer.finish == "length" and not config.keep_cut:
            raise Refused(
                "cut",
                f"the answer was cut at {config.max_tokens} tokens; raise --max-tokens or keep cut answers",
            )
        if config.token_ids == "require" and (answer.ids is None or answer.prompt_ids is None):
            raise Stop("it sends no token ids; update the server or drop --token-ids require")

    def result(self) -> dict[str, Any]:
        """The account of the run. Raises IncompleteError or HeadraceError when it is not whole."""
        if len(self.answers.providers) > 1:
            self.say(
                f"answers come from several providers: {dict(self.answers.providers)}; pin one with --provider"
            )
        self.totals.require_whole(self.answers, self.stopped)
        return {"out": str(self.config.out), **self.totals.account(self.answers)}
