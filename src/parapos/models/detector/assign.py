"""Which anchor learns which box: task-aligned assignment, over the pairs whose anchor lies inside of the box.

B images, G most boxes of an image, A anchors, C classes, n pairs, m positives. Pairs are few: nothing here has B G A
floats, and nothing has a dimension of classes beside that of the scores that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .boxes import Anchors, ciou


class Positives(NamedTuple):
    """Pairs (m,) each: image, anchor and box by their numbers, and the score that the anchor shall give. An anchor is
    in at most one pair. Pairs that would have the score 0 are left out, since they have no part in a loss."""

    image: Tensor
    anchor: Tensor
    box: Tensor
    score: Tensor


@dataclass(frozen=True)
class TaskAlignedAssigner:
    """A pair is worth p^alpha u^beta: p is the score of the box's class, u the overlap (CIoU) of the predicted box.

    topk: how many anchors a box takes at most. An anchor that several boxes take goes to the box that it overlaps most
    of all boxes of the image, the first of equals; a box may therefore end with none.
    """

    topk: int
    alpha: float = 0.5
    beta: float = 6.0
    eps: float = 1e-9

    @torch.no_grad()
    def __call__(
        self,
        scores: Tensor,
        predicted: Tensor,
        anchors: Anchors,
        boxes: Tensor,
        labels: Tensor,
        counts: Tensor,
        mask: Tensor | None = None,
    ) -> Positives:
        """scores: class logits (B, C, A). predicted: boxes (B, A, 4), and boxes (B, G, 4) with labels (B, G), of which
        the first counts (B,) are real, in pixels. mask (B, A): anchors that may be taken."""
        size, most = boxes.shape[:2]
        image, box, anchor = self._inside(anchors, boxes, counts, mask).nonzero().unbind(1)
        overlap = ciou(boxes[image, box], predicted[image, anchor]).clamp(min=0)
        score = scores[image, labels[image, box], anchor].sigmoid()
        worth = score**self.alpha * overlap**self.beta  # (n,)
        image, box, anchor, overlap, worth = (x[worth > 0] for x in (image, box, anchor, overlap, worth))
        owner, place = image * most + box, image * len(anchors.points) + anchor
        chosen = self._best(owner, worth)
        takers = torch.zeros(size * len(anchors.points), dtype=torch.long, device=boxes.device)
        contested = takers.index_add_(0, place[chosen], torch.ones_like(place[chosen]))[place] > 1
        most_overlap = _segment_max(overlap, place, len(takers))[place]
        first = torch.full_like(takers, most).scatter_reduce_(
            0, place, torch.where(overlap == most_overlap, box, most), "amin"
        )
        final = torch.where(contested, box == first[place], chosen)
        image, box, anchor, overlap, worth, owner = (x[final] for x in (image, box, anchor, overlap, worth, owner))
        best_overlap, best_worth = (_segment_max(x, owner, size * most)[owner] for x in (overlap, worth))
        return Positives(image, anchor, box, worth * best_overlap / (best_worth + self.eps))

    @staticmethod
    def _inside(anchors: Anchors, boxes: Tensor, counts: Tensor, mask: Tensor | None) -> Tensor:
        """(B, G, A) boolean: the anchor's centre lies strictly inside of the box, which is real."""
        x, y = (anchors.points * anchors.stride).to(boxes).unbind(1)
        x1, y1, x2, y2 = boxes[..., None].unbind(2)  # (B, G, 1) each
        inside = (x - x1 > 1e-9) & (y - y1 > 1e-9) & (x2 - x > 1e-9) & (y2 - y > 1e-9)
        inside &= (torch.arange(boxes.shape[1], device=boxes.device) < counts[:, None])[..., None]
        return inside if mask is None else inside & mask[:, None]

    def _best(self, owner: Tensor, worth: Tensor) -> Tensor:
        """(n,) boolean: the topk pairs of each owner, earlier ones first where they are equal. owner ascends."""
        order = worth.argsort(descending=True, stable=True)
        order = order[owner[order].argsort(stable=True)]
        ranks = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
        chosen = torch.empty_like(owner, dtype=torch.bool)
        chosen[order] = ranks < self.topk
        return chosen


def _segment_max(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """(count,) the largest value of each segment, 0 for those without any. values (n,) are not negative."""
    return values.new_zeros(count).scatter_reduce_(0, segment, values, "amax")
