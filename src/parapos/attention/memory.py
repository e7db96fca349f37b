"""How much memory a kernel takes beyond the inputs, as read off its code: peak bytes of a forward pass, and of one with
its backward pass. `explain` tells them.

B batch, H heads, N tokens, h query/key size, w value size, p position dims, f basis functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from . import blockwise, features
from .terms import Polynomial, Quadratic, Table, Term


@dataclass(frozen=True)
class Peak:
    """Bytes of a forward pass, and of a forward and a backward pass."""

    forward: int
    training: int


class Sizes:
    """The pieces that estimates are made of, in bytes."""

    def __init__(self, q: Tensor, v: Tensor, terms: Sequence[Term], masked: bool) -> None:
        b, h, n, _ = q.shape
        self.shape, self.terms, self.masked, self.size = (b, h, n), terms, masked, q.element_size()
        self.apart = b > 1 and not q.is_contiguous()  # products copy what they cannot take as one batch
        self.wide = max(4, self.size)
        self.q, self.v = q.numel() * self.size, v.numel() * self.size
        self.out = self.v
        learned = (getattr(term, name) for term in terms for name in term.learned if not isinstance(term, Table))
        self.learned = sum(x.numel() * self.wide for x in learned if x is not None)

    @property
    def hidden(self) -> int:
        """Copies that `attend` makes to hide what padding holds."""
        return self.q + self.learned if self.masked else 0

    @property
    def cleared(self) -> int:
        """Keys and values without what padding holds."""
        return self.q + self.v if self.masked else 0

    @property
    def gradients(self) -> int:
        """Those of q, k, v and the terms, and the one of the output they come from."""
        return self.out + 2 * self.q + self.v + self.learned

    def widened(self, bytes_: int) -> int:
        """What half precision takes as float32."""
        return bytes_ * self.wide // self.size if self.wide > self.size else 0

    def basis(self, samples: int, rows: int) -> int:
        """Basis functions for some rows, when they have just been stacked."""
        total = 0
        for term in self.terms:
            if isinstance(term, Table):
                continue
            p, shared = term.r.shape[-1], term.r.shape[0] == 1 and not self.masked  # which takes positions from padding
            if isinstance(term, Quadratic):
                f = (0 if term.g is None else p) + (0 if term.M is None else 1 if term.M.ndim == 3 else p * p)
            else:
                f = term.c.shape[-1] if isinstance(term, Polynomial) else 1
            total += (1 if shared else samples) * rows * self.shape[2] * self.wide * (2 * f + p)
        return total

    def block(self, share: int = 1) -> tuple[int, int, float]:
        """A block of scores in blockwise.py, the basis functions for it, and its part of the samples."""
        if not all(self.shape):
            return 0, 0, 0.0
        b, h, n = self.shape
        samples, rows = next(blockwise.blocks(b, h, n, self.wide, share))
        samples_, rows_ = samples.stop - samples.start, rows.stop - rows.start
        return samples_ * h * rows_ * n * self.wide, self.basis(samples_, rows_), samples_ / b

    def bias(self, block: int) -> int:
        """The terms' part of a block of scores, which samples or heads may share."""
        _, h, n = self.shape
        if not self.masked and all(blockwise.constant_term(term) for term in self.terms):
            block = min(blockwise.BLOCK_BYTES, h * n * n * self.wide)
        return block // h if all(isinstance(term, Table) and term.bias.shape[1] == 1 for term in self.terms) else block


def in_blocks(s: Sizes) -> Peak:
    """Scores formed in blocks of queries, or, without terms, not at all."""
    spare = 7 * 2**18  # what PyTorch's fused attention takes for itself
    if not s.terms:
        forward = s.out + spare + (s.cleared + s.out if s.masked else 0)
        return Peak(s.hidden + forward, s.hidden + forward + s.gradients + s.q + s.v)
    block, basis, part = s.block()
    tables = any(isinstance(term, Table) for term in s.terms)
    more = 1 + (s.masked or tables) + (len(s.terms) > 1)
    forward = s.hidden + s.cleared + s.out + 2 * s.learned + more * s.bias(block) + basis + spare
    forward += round(part * s.out)
    block, basis, part = s.block(share=2)
    casts = s.cleared + s.widened(2 * s.q + s.v) + round(part * 2 * (s.q + s.v)) * s.apart
    backward = s.hidden + casts + s.out + s.gradients + 2 * s.learned + (4 + (s.masked and tables)) * block + basis
    return Peak(forward, max(forward, backward))


def as_columns(s: Sizes, q: Tensor, v: Tensor, term: Quadratic) -> Peak:
    """Widened queries and keys."""
    b, h, n = s.shape
    extra, width = features.widths(q, v, term)
    per_head = 3 * n * width * s.size
    heads = min(b * h, max(1, features.CHUNK_BYTES // per_head))
    made = 4 * heads * n * extra * s.wide  # columns, and what they are made of
    forward = s.hidden + s.out + heads * per_head + made
    scores = min(blockwise.BLOCK_BYTES, b * h * n * n * s.wide)
    backward = s.hidden + s.out + s.gradients + s.learned + 3 * scores + 3 * heads * n * width * s.wide + made
    return Peak(forward, max(forward, backward))


def dense(s: Sizes) -> Peak:
    """All scores, again for each term and each step of the softmax."""
    b, h, n = s.shape
    scores = b * h * n * n * s.wide
    basis = s.basis(b, n)
    forward = s.hidden + s.cleared + s.out + (3 + len(s.terms)) * scores + basis
    return Peak(forward, forward + s.gradients + 2 * scores + s.widened(2 * s.q + s.v))


def in_kernel(s: Sizes) -> Peak:
    """Terms computed inside a kernel that keeps two numbers of each query, and what rounding took from the output."""
    rest, number = s.out * (s.size < 4), s.shape[0] * s.shape[1] * s.shape[2] * 4
    forward = s.hidden + s.out
    return Peak(forward, forward + rest + s.gradients + 3 * number)


def compiled(s: Sizes) -> Peak:
    """FlexAttention."""
    forward = s.hidden + s.cleared + s.out + s.learned
    return Peak(forward, forward + s.gradients + s.out)
