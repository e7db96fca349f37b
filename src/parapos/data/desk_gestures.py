"""Generated gestures in the format of DvsGesture, enough of them to learn from in a minute or two of one core.

They are written when they are first asked for. Like all that is generated here they say nothing about the true data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .augment.events import EventAugment as Augment
from .dvsgesture import GIVES, OF_MODELS, Gestures, dvsgesture
from .events_tree import make_dvsgesture
from .generated import ensure

__all__ = ["GIVES", "OF_MODELS", "Augment", "desk_gestures"]
USERS = 29  # as many as the true recordings have


def write(root: Path) -> None:
    """Eleven gestures of 29 users in two lights: 480 for training, 144 for testing."""
    make_dvsgesture(root, users=range(1, USERS + 1))


def desk_gestures(
    split: str,
    *,
    root: str | Path = "data/desk_gestures",
    seed: int = 0,
    augment: Augment | None = None,
    patch: int = 16,
    threshold: int = 64,
    refractory_us: int = 20_000,
    enlarge: int = 1,
) -> Gestures:
    """Moving blobs. enlarge: as of `dvsgesture`."""
    ensure(root, "trials_to_train.txt", write)
    options: dict[str, Any] = dict(patch=patch, threshold=threshold, refractory_us=refractory_us, enlarge=enlarge)
    return dvsgesture(split, root=root, seed=seed, augment=augment, complete=False, **options)
