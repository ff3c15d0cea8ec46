"""The layouts by name."""

from __future__ import annotations

from headrace.store.config import ExportConfig, ImportConfig
from headrace.store.foreign.base import ForeignLayout
from headrace.store.foreign.dumps import ModelOpt, SpecForge
from headrace.store.foreign.four import FourFiles
from headrace.store.foreign.speculators import Speculators


def open_layout(config: ImportConfig | ExportConfig, aux: int) -> ForeignLayout:
    """The layout a command asks for, told how many aux states a sample has."""
    if config.layout == "four-pt":
        if isinstance(config, ImportConfig):
            return FourFiles(config.aux_pattern, config.final_pattern, config.ids_pattern, aux)
        return FourFiles(aux=aux)
    if config.layout == "specforge":
        return SpecForge()
    return Speculators() if config.layout == "speculators" else ModelOpt()
