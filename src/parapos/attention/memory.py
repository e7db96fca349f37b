"""The sizes that kernels estimate their memory from. `explain` reports the estimates.

B batch, H heads, n queries, N keys.
"""

from __future__ import annotations

from math import prod

from .kernels import Call, Peak
from .terms import Relative, Table

SPARE = 7 * 2**18  # what PyTorch's fused attention takes for itself


class Sizes:
    """Sizes in bytes of what a call holds or makes."""

    def __init__(self, call: Call) -> None:
        self.call, self.size = call, call.q.element_size()
        self.wide = max(4, self.size)
        self.rows = prod(call.q.shape[:3])
        self.scores = self.rows * call.k.shape[2]
        self.q, self.k, self.v = (x.numel() * self.size for x in (call.q, call.k, call.v))
        self.out = self.rows * call.v.shape[-1] * self.size
        learned = (x for term in call.terms if isinstance(term, Relative) for x in term.tensors().values())
        self.learned = sum(x.numel() * self.wide for x in learned)

    @property
    def hidden(self) -> int:
        """Copies without what padding holds."""
        return 0 if self.call.mask is None else self.q + self.k + self.v + self.learned

    @property
    def gradients(self) -> int:
        """Those of q, k, v and the terms, and that of the output, which they come from."""
        return self.out + self.q + self.k + self.v + self.learned

    def widened(self, size: int) -> int:
        """What half precision takes as float32."""
        return size * self.wide // self.size if self.wide > self.size else 0

    def block(self, samples: slice, rows: slice) -> tuple[int, int]:
        """A block of scores, and the functions of D that it takes when they have just been stacked."""
        b, n, keys = samples.stop - samples.start, rows.stop - rows.start, self.call.k.shape[2]
        functions = 0
        for term in self.call.terms:
            if isinstance(term, Relative):
                p = term.r.r.shape[-1]
                shared = term.r.r.shape[0] == term.key_positions.r.shape[0] == 1 and self.call.mask is None
                functions += (1 if shared else b) * n * keys * self.wide * (2 * len(term.exponents) + p)
        return b * self.call.q.shape[1] * n * keys * self.wide, functions

    def shared(self, block: int) -> int:
        """The terms' part of a block of scores, which samples and heads may share."""
        b, h = self.call.q.shape[:2]
        tensors = [
            x for term in self.call.terms for x in (getattr(term, name) for name in term.learned) if x is not None
        ]
        alone = self.call.mask is None and all(x.ndim < 3 or len(x) == 1 for x in tensors)
        few = all(isinstance(term, Table) and term.bias.shape[1] == 1 for term in self.call.terms)
        return block // ((b if alone else 1) * (h if few else 1))

    def peak(self, forward: int, backward: int) -> Peak:
        forward += self.hidden + SPARE
        return Peak(forward, max(forward, self.hidden + SPARE + self.out + backward))
