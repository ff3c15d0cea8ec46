"""What a pipeline is made of, from the config: the same in one process and in every worker of many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace._version import __version__
from headrace.extract import checks
from headrace.extract.admission import Budget
from headrace.extract.config import ExtractConfig
from headrace.extract.disk import DiskGuard
from headrace.extract.pipeline import ROW_OVERHEAD
from headrace.extract.progress import Progress
from headrace.extract.stages import Limits
from headrace.remote import is_url
from headrace.store import StoreWriter, WriterOptions
from headrace.types import CaptureSpec


def make_writer(
    config: ExtractConfig, spec: CaptureSpec, codec: str, engine: checks.Described
) -> StoreWriter:
    """A writer of the store at ``--store`` or ``--out``, which is made if it is not there. Errors as of :class:`StoreWriter`."""
    return StoreWriter(
        config.place,
        spec,
        codec=codec,
        final_positions=config.final_positions,
        provenance={"engine": checks.engine_provenance(engine), "headrace": __version__},
        # check_capture has judged every value, zero states tap by tap: at boundary 0 they are legitimate.
        options=WriterOptions(
            checked_values=True,
            shard_bytes=int(config.shard_bytes),
            shard_seconds=60 * config.seal_minutes,
            queue_bytes=_queue_bytes(config),
            writers=max(1, config.workers),
            trust_bytes=0,  # join_store has checked it, before the rows to do were chosen
        ),
    )


def make_guard(
    config: ExtractConfig,
    spec: CaptureSpec,
    budget: Budget,
    progress: Progress,
    *,
    tokens: int | None = None,
    share: Callable[[], int] = lambda: 1,
) -> DiskGuard:
    """A guard that knows what is on its way to the disk: never more than ``tokens`` in all; ``share`` writers do the same there."""
    per_token = spec.bytes_per_token
    before = progress.bytes_raw
    waiting = 2 * int(config.shard_bytes) + _queue_bytes(config)

    def on_its_way() -> int:
        """Bytes that may still go to disk without another row being admitted; never more than the run has left."""
        written = progress.bytes_raw - before
        coming = budget.used * per_token + waiting
        if tokens is not None:
            coming = min(coming, tokens * per_token - written + min(waiting, written))
        return share() * (coming + ROW_OVERHEAD * progress.rows_out)

    local = not is_url(config.place)
    disk = Path(config.place) if local else config.out
    return DiskGuard(disk, int(config.min_free), on_its_way, holds_states=local)


def _queue_bytes(config: ExtractConfig) -> int:
    """States that wait for an encoder at most."""
    return min(512 << 20, 2 * int(config.shard_bytes))


def limits_of(config: ExtractConfig, **changes: Any) -> Limits:
    """The limits of the config, with ``changes``."""
    limits: dict[str, Any] = {
        "tries": config.tries,
        "failures_in_a_row": config.max_failures_in_a_row,
        "failed_share": config.max_failed_share,
        "engine_wait_seconds": 60 * config.engine_wait_minutes,
        "stall_seconds": 60 * config.stall_minutes,
        "pause_seconds": 60 * config.pause_minutes,
        "seal_seconds": 60 * config.seal_minutes,
    }
    return Limits(**{**limits, **changes})
