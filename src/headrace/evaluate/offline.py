"""Measures drafters on prompt sets by Headrace's own speculative decoding, and checks the output against plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.data.progress import Progress
from headrace.draft.checkpoint import Draft
from headrace.draft.method import DraftMethod
from headrace.engines.hf import load_model
from headrace.errors import ConfigError, InputError, PreflightError
from headrace.evaluate.acceptance import Acceptance
from headrace.evaluate.chain import draft_chain
from headrace.evaluate.config import EvaluateConfig
from headrace.evaluate.decode import Answer, Limits, decode_plainly, speculate
from headrace.evaluate.drafter import Drafter
from headrace.evaluate.prompts import Conversation, PromptSet
from headrace.evaluate.proposal import Proposal
from headrace.evaluate.sampling import Greedy, Rule, Sampling
from headrace.evaluate.tree import draft_tree
from headrace.evaluate.verifier import Verifier
from headrace.target import Target

Say = Callable[[str], None]
Match = Literal["equal", "tie", "different"]

# How close the two best logits must be for another order of summation to swap them: 1-token and K-token forwards round
# differently. bfloat16: measured, every difference lay within 0.25; float32 has 2**16 times its resolution and some room.
TIE_GAPS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}


@dataclass(slots=True)
class Part:
    """What one drafter did on one set."""

    set_name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    """One an answer: line, turn, prompt_tokens, tokens, accepted, match."""
    too_long: int = 0
    """Answers not attempted because prompt and answer exceed the target's context."""
    seconds: float = 0.0
    plain_seconds: float = 0.0
    plain_tokens: int = 0

    def acceptance(self, steps: int) -> Acceptance:
        """Counts over all verifications."""
        return Acceptance.count((a for r in self.records for a in r["accepted"]), steps)

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(r["tokens"]) for r in self.records)

    def matches(self, kind: Match) -> int:
        """How many answers are equal to plain decoding, differ at a tie, or differ."""
        return sum(r["match"] == kind for r in self.records)

    def summary(self, steps: int) -> dict[str, Any]:
        """The part of a report."""
        checked = sum(r["match"] is not None for r in self.records)
        out: dict[str, Any] = {
            "set": self.set_name,
            "prompts": len({r["line"] for r in self.records}),
            "answers": len(self.records),
            "too_long": self.too_long,
            "tokens": self.tokens,
            **self.acceptance(steps).to_dict(),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else None,
            "checked": checked,
            "equal": self.matches("equal"),
            "ties": self.matches("tie"),
            "different": self.matches("different"),
        }
        if self.plain_seconds:
            plain = self.plain_tokens / self.plain_seconds
            out["plain_seconds"] = round(self.plain_seconds, 3)
            out["plain_tokens_per_second"] = round(plain, 1)
            out["speedup"] = round(self.tokens / self.seconds / plain, 3) if self.seconds else None
        return out


class Offline:
    """The target, loaded once; measures any number of drafters."""

    def __init__(self, target: Target, config: EvaluateConfig) -> None:
        self.target = target
        self.config = config
        self.model = load_model(target, config.dtype, config.device)
        self.device = next(self.model.parameters()).device
        self.tokenizer = target.tokenizer if target.has_tokenizer else None
        room = config.max_new_tokens + max(config.verify_tokens, config.steps * config.topk) + 2
        self.limits = Limits(config.max_new_tokens, stop_ids(self.model, self.tokenizer), room)
        self._plain = Verifier(self.model, target.num_layers, ())
        self._plain_answers: dict[tuple[tuple[int, ...], ...], tuple[list[Answer], float]] = {}

    def measure(
        self, draft: Draft | DraftMethod, prompt_set: PromptSet, say: Say, *, title: str = ""
    ) -> Part:
        """Run one drafter on one set; ``title`` names both in the progress.

        Raises PreflightError when every prompt is too long for the target's context.
        """
        added = isinstance(draft, DraftMethod)
        drafter = draft if isinstance(draft, DraftMethod) else Drafter(draft.model)
        taps = draft.taps if isinstance(draft, DraftMethod) else draft.model.config.taps
        verifier = Verifier(self.model, self.target.num_layers, taps)
        rule = self._rule()
        decode = partial(speculate, verifier, drafter, self._drafting(rule, added=added), rule)
        decode(
            [[0, 0, 0]], replace(self.limits, max_new_tokens=4)
        )  # not timed: first calls allocate and compile
        part = Part(prompt_set.name)
        talks = [
            Conversation(p, self._tokenizer_for(prompt_set), chat=self.config.chat)
            for p in prompt_set.prompts
        ]
        turn = 0
        with Progress(title or prompt_set.name, sum(p.turns for p in prompt_set.prompts), say) as progress:
            while talks:
                turn += 1
                for batch in self._batches(talks, verifier, part):
                    self._decode_batch(decode, rule, batch, turn, part)
                    progress.update(
                        len(part.records),
                        f"acceptance length {part.acceptance(self.config.steps).length:.3f}",
                    )
                talks = [t for t in talks if not t.done]
        if not part.records:
            raise PreflightError(
                f"every prompt of {prompt_set.path} is too long for the {verifier.context} positions of {self.target.name}; lower max_new_tokens"
            )
        return part

    def _rule(self) -> Rule:
        if self.config.temperature == 0:
            return Greedy()
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        sampled = self.config.proposals == "sampled"
        return Sampling(self.config.temperature, self.config.top_p, generator, sampled_proposals=sampled)

    def _drafting(self, rule: Rule, *, added: bool) -> Callable[[Any], Proposal]:
        config = self.config
        if added:
            if config.topk > 1 or config.proposals == "sampled":
                raise ConfigError(
                    "an added draft method proposes chains of its best tokens; leave out --topk and --proposals sampled"
                )
            return lambda drafter: Proposal.chain(drafter.propose(config.steps))
        if config.topk == 1:
            return lambda drafter: draft_chain(drafter, config.steps, rule)
        return lambda drafter: draft_tree(drafter, config.steps, config.topk, config.verify_tokens)

    def _tokenizer_for(self, prompt_set: PromptSet) -> Any:
        if self.tokenizer is None and not all(p.ids for p in prompt_set.prompts):
            raise InputError(f"{self.target.path} has no tokenizer, so {prompt_set.path} must give input_ids")
        return self.tokenizer

    def _batches(
        self, talks: list[Conversation], verifier: Verifier, part: Part
    ) -> Iterator[list[tuple[Conversation, list[int]]]]:
        """Prompts of about equal length together, as a batch costs what its longest costs."""
        room = self.config.max_new_tokens + self.config.verify_tokens + 1
        ready = []
        for talk in talks:
            ids = talk.ids()
            if len(ids) + room > verifier.context:
                part.too_long += 1
                talk.abandon()
            else:
                ready.append((talk, ids))
        ready.sort(key=lambda pair: len(pair[1]))
        for start in range(0, len(ready), self.config.batch_size):
            yield ready[start : start + self.config.batch_size]

    def _decode_batch(
        self,
        decode: Callable[[list[list[int]], Limits], list[Answer]],
        rule: Rule,
        batch: list[tuple[Conversation, list[int]]],
        turn: int,
        part: Part,
    ) -> None:
        prompts = [ids for _, ids in batch]
        start = time.perf_counter()
        answers = decode(prompts, self.limits)
        part.seconds += time.perf_counter() - start
        plain = self._decode_plainly(prompts, rule, part) if self.config.plain else [None] * len(batch)
        for (talk, ids), answer, truth in zip(batch, answers, plain, strict=True):
            match = None
            if truth is not None and self.config.temperature == 0:
                match = compare(answer.tokens, truth, TIE_GAPS[self.config.dtype])
            talk.answer(answer.tokens)
            part.records.append(
                {
                    "line": talk.prompt.line,
                    "turn": turn,
                    "prompt_tokens": len(ids),
                    "tokens": answer.tokens,
                    "accepted": answer.accepted,
                    "match": match,
                }
            )

    def _decode_plainly(self, prompts: list[list[int]], rule: Rule, part: Part) -> list[Answer]:
        """Plain answers, decoded once however many drafters are compared on the same prompts."""
        key = tuple(map(tuple, prompts))
        if key not in self._plain_answers:
            start = time.perf_counter()
            answers = decode_plainly(self._plain, prompts, rule, self.limits)
            self._plain_answers[key] = answers, time.perf_counter() - start
        answers, seconds = self._plain_answers[key]
        part.plain_seconds += seconds
        part.plain_tokens += sum(len(a.tokens) for a in answers)
        return answers


def compare(tokens: Sequence[int], plain: Answer, tie_gap: float) -> Match:
    """Whether an answer equals the plain one, or first leaves it where the two best tokens were tied."""
    if list(tokens) == plain.tokens:
        return "equal"
    first = next((i for i, (a, b) in enumerate(zip(tokens, plain.tokens, strict=False)) if a != b), None)
    return "tie" if first is not None and plain.gaps[first] <= tie_gap else "different"


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config, or of the model's config, and the tokenizer's."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config):
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
        if found:
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return frozenset(found)


def draft_name(folder: Path, others: Sequence[Path]) -> str:
    """The shortest tail of ``folder`` that tells it from the other drafters."""
    parts = folder.resolve().parts
    for size in range(1, len(parts)):
        tail = parts[-size:]
        if sum(other.resolve().parts[-size:] == tail for other in others) <= 1:
            return "/".join(tail)
    return str(folder)
