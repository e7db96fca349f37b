"""What a position encoding may promise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claims:
    """Which properties an encoding has at any parameter values; the tests hold it to them.

    translation: a common shift of all positions changes nothing. rotation: nor does a common rotation.
    decay: far keys lose score. direction: score depends on where a key is, not only how far.
    context: the positional part depends on the token. unbounded: works for any p and any set of points.
    """

    translation: bool
    rotation: bool
    decay: bool
    direction: bool
    context: bool
    unbounded: bool = True
