"""What models of images, videos and events share: class token, encoder, pooling over real tokens, classifier.

B batch, N tokens, D width, p position dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks import Encoder
from ..positions import ClassToken, Positions


class Backbone(nn.Module):
    """Tokens that `embedding` makes, through an encoder. `axes`: how many dimensions their positions have. `patch`: the
    side in pixels of what a token sees.

    Other keywords go to the encoder: encoding and its options, head_dim, qk_dim, kernel, strict, exact, tolerance.
    inputs: the entries of a batch that forward takes, in order.
    """

    inputs: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        embedding: nn.Module,
        *,
        axes: int,
        patch: int,
        dim: int,
        heads: int,
        depth: int,
        mlp_dim: int,
        drop_path: float = 0.1,
        encoding: str = "pape",
        pos_dim: int | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        if pos_dim not in (None, axes):
            raise ValueError(f"pos_dim of {type(self).__name__} is {axes}, got {pos_dim}")
        self.embedding, self.patch = embedding, patch
        self.encoder = Encoder(
            dim, depth, mlp_dim, drop_path, heads=heads, encoding=encoding, pos_dim=axes, **attention
        )
        self.cls: nn.Parameter | None = None
        self.cls_token: ClassToken = False

    def encode(self, x: Tensor, r: Positions, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N, D), positions of these and of the class token before them, mask (B, N) with True for real
        tokens -> encoded tokens (B, N [+ 1], D), class token first if there is one."""
        if self.cls is not None:
            x = torch.cat([self.cls.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        return self.encoder(x, r, mask)

    def load_backbone(self, state: Mapping[str, Tensor]) -> None:
        """Takes over embedding, encoder and class token, if both have one, of a model with other outputs."""
        own, parts = self.state_dict(), ("embedding.", "encoder.")
        mine, theirs = ({name: x for name, x in held.items() if name.startswith(parts)} for held in (own, state))
        for name in [*mine, *theirs]:
            want, got = (tuple(x[name].shape) if name in x else "none" for x in (mine, theirs))
            if want != got:
                raise ValueError(f"{name}: expected {want}, got {got}; backbones must have the same size and encoding")
        if "cls" in own and "cls" in state:
            theirs["cls"] = state["cls"]
        self.load_state_dict({**own, **theirs})


class Classifier(Backbone):
    """pool: "cls" or "mean" (then there is no class token). cls_position: "origin", "unplaced", or None for what the
    encoding prefers. Other arguments are those of `Backbone`.
    """

    def __init__(
        self,
        embedding: nn.Module,
        *,
        dim: int,
        num_classes: int,
        pool: str = "cls",
        cls_position: str | None = None,
        **common: Any,
    ) -> None:
        if pool not in ("cls", "mean"):
            raise ValueError(f"pool must be 'cls' or 'mean', got {pool!r}")
        if cls_position not in (None, "origin", "unplaced"):
            raise ValueError(f"cls_position must be None, 'origin' or 'unplaced', got {cls_position!r}")
        if cls_position is not None and pool == "mean":
            raise ValueError("cls_position has no effect with pool='mean', which has no class token")
        at_least_one(num_classes=num_classes)
        super().__init__(embedding, dim=dim, **common)
        self.pool = pool
        self.classifier = nn.Linear(dim, num_classes)
        nn.init.zeros_(self.classifier.weight)
        nn.init.constant_(self.classifier.bias, -math.log(num_classes))
        if pool == "cls":
            self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
            choice = {None: self.encoder.encoding.cls_token, "origin": True, "unplaced": "unplaced"}
            self.cls_token = choice[cls_position]

    def classify(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (B, classes) of encoded tokens; mask as in `encode`. The mean of no tokens is zero."""
        if self.cls is not None:
            return self.classifier(x[:, 0])
        if mask is None:
            return self.classifier(x.mean(1))
        dtype = torch.promote_types(x.dtype, torch.float32)  # a sum may leave the range of half precision
        total = torch.where(mask[..., None], x, 0.0).sum(1, dtype=dtype)
        return self.classifier((total / mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype))


def at_least_one(**sizes: int) -> None:
    """Check sizes, which are named in the error."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_scale(scale: float | Sequence[float], axes: int) -> None:
    """A position_scale is one factor, or one per axis of a video or of events."""
    factors = [scale] * axes if isinstance(scale, int | float) else list(scale)
    if len(factors) != axes or not all(0 < factor < math.inf for factor in factors):
        raise ValueError(f"position_scale must be positive and finite, one number or {axes}, got {scale}")


def real(lengths: Tensor | Sequence[int], like: Tensor, most: int) -> Tensor:
    """(B, most) boolean on the device of `like` (B, ...): True for the first lengths[b]. Values are not looked at while
    compiling."""
    lengths = torch.as_tensor(lengths, device=like.device)
    if lengths.shape != like.shape[:1] or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths must be {like.shape[0]} integers, got {lengths.dtype} {tuple(lengths.shape)}")
    if not torch.compiler.is_compiling() and ((lengths < 0) | (lengths > most)).any():
        raise ValueError(f"lengths must be in 0..{most}, got {lengths.tolist()}")
    return torch.arange(most, device=like.device) < lengths[:, None]
