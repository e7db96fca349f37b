"""Generated clips in the format of UCF101, enough of them to learn from in a minute or two of one core.

They are written when they are first asked for. Like all that is generated here they say nothing about the true data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .augment.video import VideoAugment as Augment
from .generated import ensure
from .readers.ucf101_lists import LISTS
from .ucf101 import GIVES, OF_MODELS, Videos, ucf101
from .video_tree import DIRECTIONS, make_ucf101

__all__ = ["GIVES", "OF_MODELS", "Augment", "desk_clips"]


def write(root: Path) -> None:
    """A square that crosses the picture in one of eight directions: 408 clips for training, 168 for testing."""
    make_ucf101(root, classes=len(DIRECTIONS), groups=25, clips=3)


def desk_clips(
    split: str,
    *,
    root: str | Path = "data/desk_clips",
    height: int = 24,
    width: int = 32,
    seed: int = 0,
    augment: Augment | None = None,
    pixel_scale: str = "unit",
) -> Videos:
    """Moving squares, the first fold."""
    ensure(root, LISTS, write)
    options: dict[str, Any] = dict(height=height, width=width, pixel_scale=pixel_scale, complete=False)
    return ucf101(split, root=root, seed=seed, augment=augment, **options)
