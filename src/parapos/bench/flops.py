"""The arithmetic behind the paper's efficiency table: GFLOP of ViT-B/16 at 224 pixels, counted on paper.

Two per multiply-add, matrix products and the patch convolution only. The table's PaPE rows follow from heads widened to
a multiple of 8 by the paper's columns in q.k alone, and from W_b folded into W_p^T W_b at inference, not in training.
"""

from __future__ import annotations

MODEL, SIZE, POS_DIM = "vit_base_patch16", 224, 2
TOKENS, DIM, HEADS, HEAD_DIM, DEPTH, MLP, CLASSES, PATCH_INPUTS = 197, 768, 12, 64, 12, 3072, 1000, 768
EXPLICIT = ("alibi", "lookhere")  # attention by explicit products: nothing is recomputed in training


def gflops(encoding: str, *, parabolas: int = 50, training: bool = False) -> float:
    """One image, forward; with training, forward and backward of one step."""
    n, d, h = TOKENS, DIM, HEADS
    extra = {"pape": POS_DIM**2 + 2 * POS_DIM + 2, "pape_ri": 2 * POS_DIM + 1}.get(encoding, 0)
    width = -(-(HEAD_DIM + extra) // 8) * 8
    projected = {"pape": h * (parabolas + (parabolas if training else POS_DIM)), "pape_ri": h}.get(encoding, 0)
    scores = n * n * h * width
    layer = n * d * (4 * d + 2 * MLP + projected) + scores + n * n * h * HEAD_DIM
    stem = (n - 1) * PATCH_INPUTS * d
    forward = DEPTH * layer + stem + d * CLASSES
    if not training:
        return 2 * forward / 1e9
    again = 0 if encoding in EXPLICIT else DEPTH * scores  # fused attention recomputes q.k in its backward
    return 2 * (3 * forward - stem + again) / 1e9  # images need no gradient
