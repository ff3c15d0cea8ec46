"""What keeps a training set honest: near duplicates, overlap with evaluation prompts, and rows that stand out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from headrace.data.reasons import Bad, Drop
from headrace.data.records import Conversation, Item, RecordReader, Text
from headrace.data.sources import find_sources
from headrace.errors import ConfigError, InputError

PERMUTATIONS = 64
SHINGLE_WORDS = 5
OUTLIER_DEVIATIONS = 5.0
_WORD = re.compile(r"\w+")


# --- near duplicates ----------------------------------------------------------------------------------------------


def require_datasketch() -> None:
    """Raise ConfigError with the install line when the MinHash library is missing."""
    try:
        import datasketch  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            "--near-duplicates needs the datasketch package; pip install 'headrace[data]'"
        ) from exc


def signature(item: Item) -> bytes:
    """MinHash of an item's word shingles, uint32 [PERMUTATIONS] as bytes; ``b""`` for items without text."""
    from datasketch import MinHash

    words = _WORD.findall("\n".join(_spoken(item)).lower())
    if not words:
        return b""
    last = max(1, len(words) - SHINGLE_WORDS + 1)
    shingles = {" ".join(words[i : i + SHINGLE_WORDS]).encode() for i in range(last)}
    sketch = MinHash(num_perm=PERMUTATIONS, hashfunc=xxhash.xxh32_intdigest)
    sketch.update_batch(sorted(shingles))
    return np.asarray(sketch.hashvalues).astype("<u4").tobytes()


class NearDuplicates:
    """Decides conversation by conversation, in the order asked: the first of a group of near duplicates stays."""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        self._index: Any = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self._kept: dict[str, np.ndarray] = {}
        self._dropped: dict[str, str] = {}

    def like(self, conversation: str, sketch: bytes) -> str | None:
        """The conversation kept before that this one nearly repeats, None for a new one. Rows of one conversation agree."""
        if conversation in self._kept or not sketch:
            return None
        if conversation in self._dropped:
            return self._dropped[conversation]
        return self._compare(conversation, sketch)

    def _compare(self, conversation: str, sketch: bytes) -> str | None:
        from datasketch import MinHash

        values = np.frombuffer(sketch, dtype="<u4")
        minhash = MinHash(num_perm=PERMUTATIONS, hashfunc=xxhash.xxh32_intdigest)
        minhash.hashvalues = values.astype(minhash.hashvalues.dtype)
        candidates: list[str] = sorted(self._index.query(minhash))
        for other in candidates:
            if float((self._kept[other] == values).mean()) >= self._threshold:
                self._dropped[conversation] = other
                return other
        self._index.insert(conversation, minhash)
        self._kept[conversation] = values
        return None


def _spoken(item: Item) -> Iterable[str]:
    if isinstance(item, Conversation):
        return [m["content"] for m in item.messages if m["role"] != "system"]
    return [item.text] if isinstance(item, Text) else []


# --- evaluation prompts -------------------------------------------------------------------------------------------


class PromptOverlap:
    """Finds prompts of evaluation sets in conversations: ``words`` words in a row, or a shorter prompt as a whole turn."""

    def __init__(self, words: int) -> None:
        self.words = words
        self._runs: dict[int, str] = {}
        self._short: dict[int, str] = {}
        self.prompts: dict[str, int] = {}

    @classmethod
    def load(cls, specs: Sequence[str], words: int) -> PromptOverlap:
        """Read prompt sets, ``FILE`` or ``NAME=FILE``. Raises InputError for one that holds no prompts."""
        overlap = cls(words)
        for spec in specs:
            name, _, path = spec.rpartition("=")
            prompts = list(_prompts(path))
            if not prompts:
                raise InputError(
                    f"evaluation prompts {path} hold no prompt; give records with prompt, turns, question, messages or text"
                )
            overlap.add(name or path, prompts)
        return overlap

    def add(self, name: str, prompts: Iterable[str]) -> None:
        """Add one set under a name."""
        for prompt in prompts:
            words = _WORD.findall(prompt.lower())
            self.prompts[name] = self.prompts.get(name, 0) + 1
            if len(words) < self.words:
                if words:
                    self._short.setdefault(_hash(words), name)
            else:
                for run in self._all_runs(words):
                    self._runs.setdefault(run, name)

    def find(self, item: Item) -> str | None:
        """Name of a set that a prompt of this item overlaps with."""
        for text in _asked(item):
            words = _WORD.findall(text.lower())
            if (name := self._short.get(_hash(words))) is not None:
                return name
            for run in self._all_runs(words):
                if (name := self._runs.get(run)) is not None:
                    return name
        return None

    def _all_runs(self, words: list[str]) -> Iterable[int]:
        return (_hash(words[i : i + self.words]) for i in range(len(words) - self.words + 1))


def _hash(words: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest(" ".join(words).encode())


def _asked(item: Item) -> list[str]:
    if isinstance(item, Conversation):
        return [m["content"] for m in item.messages if m["role"] == "user"]
    return [item.text] if isinstance(item, Text) else []


def _prompts(path: str) -> Iterable[str]:
    reader = RecordReader(answers=False)
    sources = find_sources([path])
    for chunk in sources.chunks():
        records = chunk.arrow.to_pylist() if chunk.arrow is not None else chunk.texts
        for line, raw in zip(chunk.lines, records, strict=True):
            try:
                record = raw if chunk.arrow is not None else reader.parse(raw)
                if isinstance(record, dict) and isinstance(record.get("turns"), list):
                    yield from (turn for turn in record["turns"] if isinstance(turn, str))
                    continue
                item = reader.read(record)
            except (Bad, Drop) as exc:
                raise InputError(
                    f"{sources.items[chunk.source].name} line {line}: {exc.detail}; mend the prompt set"
                ) from exc
            yield from _asked(item)


# --- the shape of the whole ---------------------------------------------------------------------------------------


def histogram(values: np.ndarray, edges: Sequence[float]) -> dict[str, int]:
    """How many values lie in [edge, next edge), under the name of the edge; empty bins are left out."""
    counts, _ = np.histogram(values, bins=[*edges, np.inf])
    return {f"{edge:g}": int(n) for edge, n in zip(edges, counts, strict=True) if n}


def length_edges(longest: int) -> list[float]:
    """Powers of two up to ``longest``."""
    edges = [1.0]
    while edges[-1] * 2 <= longest:
        edges.append(edges[-1] * 2)
    return edges


def outlier_bounds(values: np.ndarray) -> tuple[float, float]:
    """Bounds at OUTLIER_DEVIATIONS robust standard deviations (1.4826 x MAD) around the median; infinite for a flat set."""
    if len(values) < 20:
        return -np.inf, np.inf
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    if spread == 0:
        return -np.inf, np.inf
    return middle - OUTLIER_DEVIATIONS * spread, middle + OUTLIER_DEVIATIONS * spread
