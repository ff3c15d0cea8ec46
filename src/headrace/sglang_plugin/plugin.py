"""The hooks: where the capture meets SGLang's life cycle. What SGLang calls things is all in ``compat``."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from headrace._version import __version__
from headrace.sglang_plugin import compat
from headrace.sglang_plugin.capture import Capturer
from headrace.sglang_plugin.protocol import KEY, Facts, PluginConfig
from headrace.sglang_plugin.staging import Staging
from headrace.types import FINAL

_LOG = logging.getLogger(__name__)


class Plugin:
    """One process's plug-in: registers hooks, and holds the capturer once the scheduler is up."""

    def __init__(self, config: PluginConfig) -> None:
        self.config = config
        self.boundaries = sorted(tap for tap in config.taps if tap != FINAL)
        self._capturer: Capturer | None = None
        self._states = compat.native_states if config.source == "native" else compat.hooked_states

    @classmethod
    def from_environment(cls, text: str) -> Self:
        """Raises SystemExit when ``text`` is no configuration."""
        try:
            return cls(PluginConfig.from_json(text))
        except (ValueError, TypeError) as exc:
            raise SystemExit(f"headrace: {exc}; start the server with headrace serve") from exc

    def register(self) -> None:
        """Register all hooks. Raises SystemExit when this SGLang lacks what they hold on to."""
        hooks: list[tuple[str, Callable[..., Any], str]] = [
            (compat.SCHEDULER_INIT, self._started, "after"),
            (compat.FORWARD, self._forward, "around"),
            (compat.PAYLOAD, self._payload, "before"),
        ]
        if self.config.source == "hooks":
            hooks.append((compat.STORED_STATES, self._stored_states, "around"))
            if self.boundaries:
                hooks.append((compat.LOAD_MODEL, self._loaded, "after"))
        missing = compat.check_names([target for target, _, _ in hooks])
        if missing:
            raise SystemExit(
                f"headrace: SGLang {compat.version()} has no {', '.join(missing)}; "
                "use a release of the tested list in docs/engines.md or a newer Headrace"
            )
        for target, hook, kind in hooks:
            compat.register(target, hook, kind)

    # --- hooks ------------------------------------------------------------------------------------------------

    def _started(self, _result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """After the scheduler is built: refuse what cannot be right, here where an exception ends the server."""
        found = compat.obstacles(scheduler)
        if found:
            raise RuntimeError(f"headrace cannot capture rightly with {'; and with '.join(found)}")
        if self.boundaries:
            captured = compat.captured_boundaries(scheduler)
            if captured != self.boundaries:
                raise RuntimeError(
                    f"headrace: boundaries {self.boundaries} were asked and the model captures {captured}; "
                    "this model family needs another naming, see docs/engines.md"
                )
        if compat.writes(scheduler):
            self._capturer = self._make_capturer(scheduler)

    def _make_capturer(self, scheduler: Any) -> Capturer:
        config = self.config
        layers, hidden, dtype, device = compat.model_facts(scheduler)
        rank = compat.rank(scheduler)
        limit = config.staging_bytes // compat.ranks(scheduler)
        staging = Staging(
            Path(config.staging), f"{config.run}.{rank}", limit, stall_s=config.stall_s, keep_s=config.keep_s
        )
        atexit.register(staging.close)
        facts = Facts(
            plugin=__version__,
            engine=compat.version(),
            run=config.run,
            rank=rank,
            staging=str(staging.root),
            staging_bytes=limit,
            taps=config.taps,
            source=config.source,
            dtype=dtype,
            num_layers=layers,
            hidden_size=hidden,
            settings=compat.settings(scheduler),
        )
        _LOG.info(
            "headrace %s captures %s of %d layers into %s",
            __version__,
            list(config.taps),
            layers,
            staging.folder,
        )
        return Capturer(facts, staging, writers=config.writers, host_bytes=config.host_bytes, device=device)

    def _forward(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(worker, batch, *args, **kwargs)
        if self._capturer is not None:
            segments = compat.segments(batch)
            if segments is not None:
                self._capturer.forward(
                    segments, partial(self._states, batch, result, self.boundaries, self.config.taps)
                )
        return result

    def _payload(self, payload: Any, *_args: Any, **_kwargs: Any) -> None:
        """Before replies are sent: wait for the files of the finished ones and put the proof in."""
        if self._capturer is None or not self._capturer.busy:
            return
        values: dict[int, dict[str, Any]] = {}
        for place, rid, aborted in compat.finished(payload):
            reply = self._capturer.reply(rid, aborted=aborted)
            if reply is not None:
                values[place] = reply.to_dict()
        if values:
            compat.attach(payload, KEY, values)

    def _loaded(self, _result: None, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        compat.capture_boundaries(runner, self.boundaries)

    def _stored_states(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return compat.stored_states(original, self.boundaries, *args, **kwargs)
