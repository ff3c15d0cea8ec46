"""Store → foreign files, one sample at a time, converting only what can be converted exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from headrace.errors import ConfigError, InputError, StoreError
from headrace.files import write_json
from headrace.store.config import ExportConfig
from headrace.store.foreign.base import ForeignLayout, Sample, read_manifest
from headrace.store.foreign.layouts import open_layout
from headrace.store.format import Array
from headrace.store.reader import Store
from headrace.target import Target
from headrace.types import FINAL, Tap

Progress = Callable[[int, int], None]
KIND = "headrace.states-export"


def export_states(config: ExportConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Write the captures of ``config.store`` to ``config.out``; goes on where an earlier export of the same keys stopped.

    Raises ConfigError when the layout needs a state that the store does not have, InputError when the folder holds
    something else.
    """
    store = Store.open(config.store)
    boundaries = _boundaries(store, config.layers)
    layout = open_layout(config, len(boundaries))
    final = _FinalState(store, layout, config.model)
    keys = store.keys()[: config.limit or None]
    if not keys:
        raise StoreError(
            f"{store.name} holds no captures with taps {list(store.spec.taps)}; nothing to export"
        )
    manifest = {
        "kind": KIND,
        "layout": layout.name,
        "boundaries": list(boundaries),
        "final_normed": final.normed,
        "dtype": store.spec.dtype,
        "spec": store.spec.to_dict(),
        "samples": len(keys),
        "keys": xxhash.xxh3_64_hexdigest("".join(keys).encode()),
        "complete": False,
    }
    _claim(config.out, manifest)
    written = 0
    for number, key in enumerate(keys):
        if not layout.place(config.out, number, key).exists():
            layout.write(config.out, number, key, _sample(store, key, boundaries, final))
            written += 1
        if progress is not None:
            progress(number + 1, len(keys))
    layout.finish(config.out, _rows(store, keys))
    write_json(config.out / "manifest.json", {**manifest, "complete": True})
    return {"out": str(config.out), "samples": len(keys), "written": written, "present": len(keys) - written}


def _boundaries(store: Store, layers: str) -> tuple[Tap, ...]:
    if not layers:
        return tuple(tap for tap in store.spec.taps if tap not in (FINAL, store.spec.num_layers))
    known = {str(tap): tap for tap in store.taps}
    names = [name.strip() for name in layers.split(",")]
    missing = [name for name in names if name not in known or name == FINAL]
    if missing:
        raise ConfigError(
            f"{store.name} has no boundaries {missing}; it has {[t for t in known if t != FINAL]}"
        )
    return tuple(known[name] for name in names)


class _FinalState:
    """The final state as a layout wants it: as it is stored, or with the target's own norm applied."""

    def __init__(self, store: Store, layout: ForeignLayout, model: str) -> None:
        spec = store.spec
        last: Tap = spec.num_layers
        has_final, has_last = FINAL in store.taps, last in store.taps
        wanted = layout.final_normed
        self.tap: Tap = FINAL
        self.normed = spec.final_normed
        self._norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        if has_final and wanted in (None, spec.final_normed):
            return
        if has_last and wanted in (None, False):
            self.tap, self.normed = last, False
        elif wanted and ((has_final and not spec.final_normed) or has_last):
            if not model:
                raise ConfigError(
                    f"{layout.name} wants the final state after the norm, {store.name} has it before; give --model"
                )
            target = Target.open(model)
            target.require(spec, f"store {store.name}")
            self.tap, self.normed, self._norm = (FINAL if has_final else last), True, target.final_norm
        elif has_final:
            raise ConfigError(
                f"{layout.name} wants the state before the final norm and {store.name} has it after; a norm cannot be undone. "
                f"Extract boundary {last} as well (--taps …,{last})"
            )
        else:
            raise ConfigError(
                f"{store.name} has no final state (taps {list(store.taps)}); extract it, then export"
            )

    def take(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._norm is None else self._norm(states)


def _sample(store: Store, key: str, boundaries: tuple[Tap, ...], final: _FinalState) -> Sample:
    capture = store.get(key, (*boundaries, final.tap))
    return Sample(
        key,
        list(capture.states[:-1]),
        final.take(capture.states[-1]),
        capture.ids,
        capture.mask,
        final.normed,
    )


def _rows(store: Store, keys: list[str]) -> Iterator[tuple[Array, Array]]:
    for key in keys:
        yield store.tokens_of(key)


def _claim(out: Path, manifest: dict[str, Any]) -> None:
    """Samples may be numbered: a folder begun with other keys, or by another tool, is refused."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is not a folder; give another --out")
    found = read_manifest(out) if out.exists() else None
    if found is None and out.exists() and any(out.iterdir()):
        raise InputError(f"{out} holds something else than an export of ours; give an empty or new folder")
    if found is not None and any(found.get(k) != v for k, v in manifest.items() if k != "complete"):
        raise InputError(f"{out} holds an export of other captures or taps; give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "manifest.json", manifest)
