"""``prepare``: conversations → rows. Reads, converts, shuffles, filters, splits, and accounts for every record.

records = records that gave rows + records dropped by reason; rows made = rows kept + rows dropped by reason. Both sums are
asserted before anything appears at ``--out``, and no rows at all is a failure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.data.config import PrepareConfig
from headrace.data.convert import Converted, Converter, ConvertOptions
from headrace.data.emit import EmitOptions, Emitter
from headrace.data.folder import WorkFolder, refuse_foreign_folder
from headrace.data.hygiene import PromptOverlap, require_datasketch
from headrace.data.identity import inputs_key
from headrace.data.mirror import check_mirror, mirror_rows
from headrace.data.pool import Pool, WorkerSetup
from headrace.data.progress import Progress
from headrace.data.readers import Chunk
from headrace.data.reasons import BAD
from headrace.data.render import RenderPolicy
from headrace.data.rows import KIND, RowFolder, RowWriter
from headrace.data.runs import Runs
from headrace.data.sources import Sources, find_sources
from headrace.data.template import ChatTemplate
from headrace.data.tokenizer_checks import check_encoding, check_special_ids
from headrace.errors import CorruptError, HeadraceError, InputError
from headrace.files import read_json
from headrace.modelfiles import tokenizer_fingerprint
from headrace.target import Target
from headrace.types import hash_json

Say = Callable[[str], None]


def prepare(config: PrepareConfig, say: Say = lambda _: None, tokenizer: Any = None) -> dict[str, Any]:
    """Make the row folder ``config.out``, or find it made; returns its manifest and ``seconds``, ``out``, ``reused``.

    ``tokenizer`` replaces the target's own (then one process does the work). Raises InputError for bad input, with file
    and line; ConfigError for options that do not fit; PreflightError for a tokenizer that cannot be trusted;
    HeadraceError when no row is left.
    """
    return _Preparation(config, say, tokenizer).run()


class _Preparation:
    """One run of ``prepare``, step by step."""

    def __init__(self, config: PrepareConfig, say: Say, tokenizer: Any) -> None:
        self.config, self.say = config, say
        self.started = time.monotonic()
        self.given_tokenizer = tokenizer is not None
        self.target = Target.open(config.model, config.revision)
        self.tokenizer = tokenizer if tokenizer is not None else self.target.tokenizer
        self.stop_ids = _stop_ids(self.target.path)
        self.template = ChatTemplate(self.tokenizer, config.date, config.template_args, self.stop_ids)

    def run(self) -> dict[str, Any]:
        config = self.config
        if config.near_duplicates:
            require_datasketch()
        refuse_foreign_folder(config.out, KIND)
        if config.mirror:
            check_mirror(config.mirror)
        sources = find_sources(config.files)
        self._check_tokenizer()
        for name in sources.ignored:
            self.say(f"left out, its name tells no known kind: {name}")
        options = self._options(sources)
        key = inputs_key(config, sources, self.target.path, self._fingerprints())
        if (found := self._reusable(key)) is not None:
            self.say(f"{config.out} was made from the same inputs with the same options; nothing to do")
            return self._result(found.manifest, reused=True)
        with WorkFolder(config.out) as folder:
            runs = Runs(folder.path, key)
            if runs.tally.records:
                self.say(f"going on behind record {runs.tally.records:,}, where an earlier run was stopped")
            self._convert_all(sources, options, runs)
            manifest = self._write(sources, runs, key)
            folder.remove()
        return self._result(manifest, reused=False)

    # --- before the work ----------------------------------------------------------------------------------------

    def _check_tokenizer(self) -> None:
        if not self.given_tokenizer:
            check_special_ids(self.tokenizer, self.target.path)
            if warning := check_encoding(self.tokenizer, self.target.path):
                self.say(f"warning: {warning}")
        self.template.check()

    def _fingerprints(self) -> dict[str, str]:
        return {
            "tokenizer_hash": tokenizer_fingerprint(self.tokenizer),
            "template_hash": hash_json(self.tokenizer.chat_template),
        }

    def _options(self, sources: Sources) -> ConvertOptions:
        config = self.config
        overlap = (
            PromptOverlap.load(config.evaluation_prompts, config.overlap_words)
            if config.evaluation_prompts
            else None
        )
        return ConvertOptions(
            policy=RenderPolicy(
                config.content_tokens, config.rewritten_history, config.last_turn_only, config.cut_turns
            ),
            shape=config.shape,
            aliases=tuple(sorted(config.role_aliases.items())),
            max_length=config.max_length,
            drop_long=config.too_long == "drop",
            min_supervised=config.min_supervised,
            seed=config.seed,
            validation=config.validation,
            vocab_size=max(len(self.tokenizer), self.target.vocab_size),
            names=tuple(item.name for item in sources.items),
            weights=tuple(sources.groups[item.group].weight for item in sources.items),
            sketches=config.near_duplicates > 0,
            overlap=overlap,
            stop_at_bad=config.on_bad_row == "stop",
        )

    def _reusable(self, key: str) -> RowFolder | None:
        """The folder at ``out`` when it is whole and was made from the same inputs by the same options."""
        manifest = self.config.out / "manifest.json"
        try:
            if manifest.is_file() and read_json(manifest).get("inputs_key") == key:
                folder = RowFolder.open(self.config.out)
                return folder if not folder.check() else None
        except (CorruptError, InputError):
            pass  # broken or of another format: it is made anew
        return None

    # --- the work -------------------------------------------------------------------------------------------------

    def _convert_all(self, sources: Sources, options: ConvertOptions, runs: Runs) -> None:
        chunks = sources.chunks(runs.position)
        before = runs.tally.tokens
        with Progress("prepare", sources.size, self.say) as progress:
            for chunk, result in self._converted(chunks, options):
                if result.bad is not None:
                    name, line, what = result.bad
                    raise InputError(
                        f"{name} line {line}: the record {what}. Mend it, or leave such records out with --on-bad-row skip"
                    )
                runs.add(result, (chunk.source, chunk.first + len(chunk)))
                rate = (runs.tally.tokens - before) / max(1e-9, time.monotonic() - self.started)
                facts = f"{runs.tally.records:,} records, {runs.tally.tokens:,} tokens, {rate:,.0f} tokens/s"
                progress.update(sources.bytes_before(chunk), facts)

    def _converted(
        self, chunks: Iterator[Chunk], options: ConvertOptions
    ) -> Iterator[tuple[Chunk, Converted]]:
        config = self.config
        if config.workers == 1 or self.given_tokenizer:
            converter = Converter(self.template, options)
            yield from ((chunk, converter(chunk)) for chunk in chunks)
            return
        args = tuple(config.template_args.items())
        setup = WorkerSetup(config.model, config.revision, config.date, args, tuple(self.stop_ids), options)
        with Pool(config.workers, setup, config.stall_seconds) as pool:
            yield from pool.convert(chunks)

    def _write(self, sources: Sources, runs: Runs, key: str) -> dict[str, Any]:
        config = self.config
        with RowWriter(config.out) as writer:
            limits = tuple(group.limit for group in sources.groups)
            groups = tuple(item.group for item in sources.items)
            drop_outliers = config.outliers == "drop"
            options = EmitOptions(config.near_duplicates, drop_outliers, config.limit, limits, groups)
            emitter = Emitter(options, runs)
            with emitter.open(writer.folder / "dropped.parquet"):
                for table in runs.merged():
                    emitter.emit(table, writer)
            self._check_account(runs, emitter)
            writer.manifest = {**self._describe(sources, key), **emitter.describe()}
        return RowFolder.open(config.out).manifest

    def _check_account(self, runs: Runs, emitter: Emitter) -> None:
        """Every record and row is accounted for, and enough of them are left."""
        tally, config = runs.tally, self.config
        dropped = emitter.dropped
        records = sum(n for (unit, _), n in dropped.items() if unit == "record")
        rows = sum(n for (unit, _), n in dropped.items() if unit == "row")
        if tally.records != tally.kept + records or tally.made != emitter.kept + rows:
            raise HeadraceError(
                f"the account does not add up ({tally.records} records, {tally.kept} kept, {records} dropped; {tally.made} rows, "
                f"{emitter.kept} kept, {rows} dropped); this is a fault of Headrace, please report it"
            )
        reasons = ", ".join(
            f"{reason} {n:,} {unit}s" for (unit, reason), n in sorted(dropped.items(), key=lambda i: -i[1])
        )
        if not emitter.kept and not config.allow_empty:
            raise HeadraceError(
                f"no row is left of {tally.records:,} records ({reasons or 'the input is empty'}){emitter.first_example()}; "
                "look at the data, or allow it with --allow-empty"
            )
        share = records / tally.records if tally.records else 0.0
        if share > config.max_dropped:
            raise HeadraceError(
                f"{share:.1%} of {tally.records:,} records were dropped, more than --max-dropped {config.max_dropped:g} ({reasons})"
            )
        broken = {reason: n for (_, reason), n in dropped.items() if reason in BAD}
        if broken:
            self.say(
                f"skipped {sum(broken.values()):,} bad records: "
                + ", ".join(f"{r} {n:,}" for r, n in sorted(broken.items()))
            )

    def _describe(self, sources: Sources, key: str) -> dict[str, Any]:
        config = self.config
        decides = config.model_dump(
            mode="json", exclude={"files", "out", "workers", "stall_seconds", "model", "revision"}
        )
        return {
            "model": config.model,
            "revision": config.revision,
            **self._fingerprints(),
            "target_config_hash": self.target.config_hash,
            "inputs_key": key,
            "sources": [
                {"spec": g.spec, "files": sum(i.group == n for i in sources.items)}
                for n, g in enumerate(sources.groups)
            ],
            "options": decides,
            "template": self.template.describe(),
        }

    def _result(self, manifest: dict[str, Any], reused: bool) -> dict[str, Any]:
        if self.config.mirror:
            sent = mirror_rows(self.config.out, self.config.mirror)
            self.say(
                f"copied to {self.config.mirror}" if sent else f"{self.config.mirror} has these rows already"
            )
        seconds = time.monotonic() - self.started
        return {**manifest, "out": str(self.config.out), "reused": reused, "seconds": round(seconds, 3)}


def _stop_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a turn by the model's generation config."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return ()
    value = read_json(file).get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(sorted(int(v) for v in values if isinstance(v, int)))


def summary(result: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, how many) lines for people."""
    share = result["supervised"] / result["tokens"] if result["tokens"] else 0.0
    lines = [
        (name, f"{entry['rows']:,} rows, {entry['tokens']:,} tokens")
        for name, entry in result["splits"].items()
    ]
    lines.append(("supervised", f"{result['supervised']:,} tokens, {share:.1%}"))
    dropped: Counter[str] = Counter(result["counts"]["dropped"])
    lines += [(f"dropped: {reason}", f"{n:,}") for reason, n in dropped.most_common()]
    lines += [(note.replace("_", " "), f"{n:,}") for note, n in result["counts"]["notes"].items()]
    return lines
