"""Events to the entries of a sample that an event model takes.

A data set of events states its `clock`, which says what t of a token is, in microseconds: "time" counts from the start
of the sample to the token, "age" from the token to the moment that the sample is about. Both are 0 or more, and a model
divides them by its `time_scale` without asking which it is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..tokenizers.spiking_patches import BUCKETS, Settings, Tokens, tokenize
from .events import Events

RAGGED = ("codes", "x", "y", "t")
CLOCKS = ("time", "age")


@dataclass(frozen=True, kw_only=True)
class Tokenizing(Settings):
    """Spiking Patches with its settings. Making one checks them and compiles, so that workers need not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self(Events.empty())
        codes = 2 * BUCKETS * self.patch**2
        if codes > 2**15:
            raise ValueError(
                f"patch {self.patch} has {codes} codes, expected at most {2**15}: a sample has them as int16"
            )

    def __call__(self, events: Events) -> Tokens:
        return tokenize(events.t, events.x, events.y, events.polarity, **asdict(self))


def tensors(tokens: Tokens, clock: str, origin: int) -> dict[str, Any]:
    """{"codes": int16 (L, threshold), "x", "y": int64 (L,) patches, "t": int64 (L,) microseconds, "length": L}.

    clock: "time" or "age". origin: when it shows 0, on the clock of the tokens.
    """
    if clock not in CLOCKS:
        raise ValueError(f"clock must be one of {', '.join(CLOCKS)}, got {clock!r}")
    places = {name: torch.from_numpy(getattr(tokens, name).astype(np.int64)) for name in ("x", "y", "t")}
    places["t"] = places["t"] - origin if clock == "time" else origin - places["t"]
    return {"codes": torch.from_numpy(tokens.codes.astype(np.int16)), **places, "length": len(tokens)}
