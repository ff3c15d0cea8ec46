"""An engine in its smallest honest form: transformers, one row at a time."""

import importlib.metadata
from collections.abc import Iterable, Iterator

import torch
from transformers import AutoModelForCausalLM

from headrace.engines import Engine, EngineInfo, EngineOptions
from headrace.errors import EngineUnavailableError, PreflightError
from headrace.types import FINAL, Capture, Failure, Row


class PlainOptions(EngineOptions):
    """What the user may set: --engine-options attention=eager."""

    attention: str = "sdpa"
    """Attention implementation of transformers."""


class PlainEngine(Engine):
    """Boundaries 0 to N-1 and the final state, which is all that `hidden_states` holds."""

    Options = PlainOptions

    def __init__(self, target, spec, options):
        if spec.num_layers in spec.taps:  # refuse what cannot be captured rightly; never come close to it
            raise PreflightError(f"transformers does not give boundary {spec.num_layers}; ask for final")
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                target.path, dtype=getattr(torch, spec.dtype), attn_implementation=options.attention
            ).eval()
        except OSError as exc:  # the library's error becomes ours, with the mend
            raise EngineUnavailableError(
                f"{target.path} holds no weights ({exc}); give a model folder"
            ) from exc
        self.spec = spec
        version = importlib.metadata.version("transformers")
        self.info = EngineInfo(
            name="plain", version=version, tokens_in_flight=4096, settings=options.model_dump()
        )

    @classmethod
    def open(cls, target, spec, options):
        return cls(target, spec, options)

    def capture(self, rows: Iterable[Row]) -> Iterator[Capture | Failure]:
        for row in rows:  # one result a row; the next row is pulled when this one is answered
            if len(row) > self.model.config.max_position_embeddings:
                yield Failure(row.key, "too_long", "the target has fewer positions", retryable=False)
                continue
            ids = torch.from_numpy(row.ids).long()[None]
            with torch.inference_mode():
                states = self.model(ids, output_hidden_states=True, use_cache=False).hidden_states
            taps = [states[-1 if tap == FINAL else tap][0] for tap in self.spec.taps]  # k is boundary k here
            yield Capture(row.key, ids[0].int().numpy(), torch.stack(taps))
