"""Data preparation against its floor (encoding the rendered text alone) and against two usual ways of doing the same.

    python bench/prepare.py --model MODEL --data conversations.jsonl.gz

Wall time on a busy machine says little about a ratio, so the processor time of the single-process contestants stands
beside it. All contestants do the same work on the same records and their ids and masks are compared before anything is timed:
``prepare`` whole (read, parse, render, mask, shuffle, write), its conversion alone, a plain loop over
``apply_chat_template`` that renders every prompt and turn and encodes each, and the same loop inside ``datasets.map``. The floor is the tokenizer's public
call, ``tokenizer(texts)``, over texts that were rendered before; what is left of it when only its Rust core is called stands beside it. Tokenizer threads are off everywhere; processes are the parallelism.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from common import Bench, Timing, interleaved, main
from headrace.data.config import PrepareConfig
from headrace.data.convert import Converter, ConvertOptions
from headrace.data.pool import Pool, WorkerSetup
from headrace.data.prepare import prepare
from headrace.data.readers import Chunk
from headrace.data.rows import RowFolder
from headrace.data.sources import find_sources
from headrace.data.template import ChatTemplate
from headrace.demo import cached_demo_model
from headrace.target import Target

ROOT = Path(__file__).resolve().parent.parent
FLOOR = "encode the rendered text: tokenizer(texts)"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="", help="model folder with tokenizer and template (default: the demo model)"
    )
    parser.add_argument(
        "--data", default=str(ROOT / "examples" / "data" / "conversations.jsonl"), help="conversations"
    )
    parser.add_argument("--records", type=int, default=6000, help="how many of them")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="worker counts to time")


def by_hand(tokenizer: Any, record: dict[str, Any]) -> dict[str, list[int]]:
    """Ids and mask of one record with ``apply_chat_template``, the way it is usually written."""
    messages = record["messages"]
    ids = list(tokenizer.apply_chat_template(messages, return_dict=False))
    mask = [0] * len(ids)
    reasons = iter(record.get("finish_reasons") or [])
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = len(
            tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, return_dict=False)
        )
        turn = list(tokenizer.apply_chat_template(messages[: place + 1], return_dict=False))
        end = len(turn) - 1 - turn[::-1].index(tokenizer.eos_token_id)
        stop = end if next(reasons, None) == "length" else end + 1
        mask[start:stop] = [1] * (stop - start)
    return {"input_ids": ids, "loss_mask": mask}


class Work:
    """The records, and every contestant as a function without arguments."""

    def __init__(self, args: argparse.Namespace, records: int, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.tokenizer = Target.open(args.model).tokenizer
        self.template = ChatTemplate(self.tokenizer)
        chunks = list(find_sources([f"{args.data}?head={records}"]).chunks())
        lines = [line for chunk in chunks for line in chunk.texts]
        self.file = folder / "data.jsonl"
        self.file.write_bytes(b"".join(line + b"\n" for line in lines))
        self.records = [json.loads(line) for line in lines]
        self.chunks = [Chunk(0, c.first, c.lines, c.texts) for c in chunks]
        self.texts = [
            [self.tokenizer.apply_chat_template(json.loads(t)["messages"], tokenize=False) for t in c.texts]
            for c in chunks
        ]
        self.options = ConvertOptions(names=(str(self.file),), weights=(1.0,), max_length=0)
        self.runs = 0

    def encode(self) -> int:
        backend = self.tokenizer.backend_tokenizer
        return sum(
            len(e.ids)
            for texts in self.texts
            for e in backend.encode_batch_fast(texts, add_special_tokens=False)
        )

    def encode_call(self) -> int:
        return sum(
            len(i)
            for texts in self.texts
            for i in self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        )

    def convert(self) -> int:
        convert = Converter(self.template, self.options)
        return sum(convert(chunk).rows.num_rows for chunk in self.chunks)

    def prepare(self) -> dict[str, Any]:
        self.runs += 1
        out = self.folder / f"rows{self.runs}"
        config = PrepareConfig(files=[str(self.file)], model=self.args.model, out=out, max_length=0)
        return prepare(config, tokenizer=self.tokenizer)

    def loop(self) -> list[dict[str, list[int]]]:
        return [by_hand(self.tokenizer, record) for record in self.records]

    def datasets_map(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        datasets.disable_caching()
        data = datasets.load_dataset(
            "json", data_files=str(self.file), split="train", cache_dir=str(self.folder / "cache")
        )
        return data.map(
            lambda record: by_hand(self.tokenizer, record), remove_columns=data.column_names, num_proc=None
        )

    def pool(self, workers: int) -> tuple[Pool, Callable[[], int]]:
        setup = WorkerSetup(self.args.model, "", "", (), (), self.options)
        pool = Pool(workers, setup, 300.0)
        return pool, lambda: sum(result.rows.num_rows for _, result in pool.convert(iter(self.chunks)))

    def check(self) -> None:
        """All contestants make the same rows (where duplicates are left out, the same set of them)."""
        self.prepare()
        ours = {
            (tuple(r.ids.tolist()), tuple(r.mask.astype(int).tolist()))
            for r in RowFolder.open(self.folder / "rows1").rows()
        }
        hand = {(tuple(r["input_ids"]), tuple(r["loss_mask"])) for r in self.loop()}
        mapped = {(tuple(r["input_ids"]), tuple(r["loss_mask"])) for r in self.datasets_map()}
        assert ours == hand == mapped, (
            f"{len(ours)} {len(hand)} {len(mapped)} rows differ: {len(ours ^ hand)}"
        )


def run(bench: Bench) -> None:
    records = 400 if bench.quick else bench.args.records
    bench.args.model = bench.args.model or str(cached_demo_model())
    with tempfile.TemporaryDirectory() as folder:
        work = Work(bench.args, records, Path(folder))
        work.check()
        tokens = work.encode()
        contestants: dict[str, Callable[[], object]] = {
            FLOOR: work.encode_call,
            "the tokenizer's Rust core alone": work.encode,
            "headrace prepare": work.prepare,
            "headrace, conversion alone": work.convert,
            "apply_chat_template loop": work.loop,
            "datasets.map": work.datasets_map,
        }
        cpu: dict[str, list[float]] = {name: [] for name in contestants}
        metered = {name: meter(contestant, cpu[name]) for name, contestant in contestants.items()}
        timings = interleaved(metered, repeats=2 if bench.quick else 5)
        least = statistics.median(cpu[FLOOR])
        for name, timing in timings.items():
            add_row(bench, name, timing, tokens, timings[FLOOR].median, statistics.median(cpu[name]) / least)
        ratio = timings["headrace prepare"].median / timings[FLOOR].median
        bench.target("prepare / encoding the rendered text", ratio, 1.3, ratio <= 1.3)
        ratio = statistics.median(cpu["headrace prepare"]) / least
        bench.target("the same in processor time", ratio, 1.3, ratio <= 1.3)
        floor = timings[FLOOR].median
        scale(bench, work, tokens, floor)


def meter(contestant: Callable[[], object], seconds: list[float]) -> Callable[[], object]:
    """The contestant, noting the processor time of each call."""

    def metered() -> object:
        started = time.process_time()
        result = contestant()
        seconds.append(time.process_time() - started)
        return result

    return metered


def add_row(bench: Bench, name: str, timing: Timing, tokens: int, floor: float, cpu: float | str) -> None:
    bench.row(
        what=name,
        seconds=timing.median,
        spread=timing.spread,
        tokens_per_s=round(tokens / timing.median),
        times_floor=timing.median / floor,
        cpu_times_floor=cpu,
    )


def scale(bench: Bench, work: Work, tokens: int, floor: float) -> None:
    """Conversion by worker processes, once they have started."""
    pools = {f"{n} worker processes": work.pool(n) for n in bench.args.workers}
    try:
        timings = interleaved(
            {name: convert for name, (_, convert) in pools.items()}, repeats=2 if bench.quick else 5
        )
    finally:
        for pool, _ in pools.values():
            pool.__exit__(None, None, None)
    for name, timing in timings.items():
        add_row(bench, name, timing, tokens, floor, "")
    most = max(bench.args.workers)
    if most > 1 and 1 in bench.args.workers:
        gain = timings["1 worker processes"].median / timings[f"{most} worker processes"].median
        bench.target(f"speed-up of {most} workers", gain, 0.8 * most, gain >= 0.8 * most)


if __name__ == "__main__":
    main("prepare", run, arguments)
