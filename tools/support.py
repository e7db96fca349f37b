"""Which kernel serves which term, where, in which type and direction: the table, asked of the kernels themselves.

Run it: python -m tools.support
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from parapos.attention import KERNELS, Distance, Polynomial, Quadratic, Table, Term
from parapos.attention.select import Call

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEVICES = ("cpu", "cuda")
TERMS = ("none", "Quadratic", "Polynomial", "Distance", "Table")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Cell:
    kernel: str
    term: str
    device: str
    dtype: torch.dtype
    direction: str


def cells() -> Iterator[Cell]:
    return (Cell(*values) for values in product(KERNELS, TERMS, DEVICES, DTYPES, DIRECTIONS))


def probe(cell: Cell, n: int = 17) -> Call:
    """A small call of this kind, with gradients of everything it can have one of but Table.bias, if backward."""
    grad = cell.direction == "backward"

    def tensor(*shape: int, dtype: torch.dtype = cell.dtype, learned: bool = True) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape))
        x = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        return x.to(cell.device).requires_grad_(grad and learned)

    wide = torch.promote_types(cell.dtype, torch.float32)
    r = tensor(1, n, 2, dtype=torch.float32, learned=False)
    term: Term | None = None
    if cell.term == "Quadratic":
        root = tensor(1, 2, n, 2, 2, dtype=wide, learned=False)
        term = Quadratic((-root @ root.mT).requires_grad_(grad), tensor(1, 2, n, 2, dtype=wide), r)
    elif cell.term == "Polynomial":
        term = Polynomial(tensor(1, 2, n, 5, dtype=wide), r)
    elif cell.term == "Distance":
        term = Distance(tensor(2, dtype=wide), r)
    elif cell.term == "Table":
        term = Table(tensor(1, 2, n, n, dtype=wide, learned=False))
    q, k, v = (tensor(1, 2, n, 16) for _ in range(3))
    return Call(q, k, v, (term,) if term is not None else (), None)


@contextmanager
def pretended(cell: Cell) -> Iterator[None]:
    """Tensors of the cell may be made and asked about. A GPU is taken to be an NVIDIA one that is recent enough."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        if cell.device == "cuda":
            properties = SimpleNamespace(major=8, minor=0)
            stack.enter_context(patch("torch.cuda.get_device_properties", return_value=properties))
            stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.set_grad_enabled(cell.direction == "backward"))
        yield


def refusal(cell: Cell) -> str | None:
    """Why the kernel does not serve such calls, or None."""
    with pretended(cell):
        return KERNELS[cell.kernel].refuse(probe(cell))


def table() -> str:
    """Markdown: per kernel, term and device the types it serves forward and backward, or forward only; then reasons."""
    lines = ["| kernel | term | CPU | CUDA |", "|---|---|---|---|"]
    reasons: dict[str, list[str]] = {}
    found = {cell: refusal(cell) for cell in cells()}
    for kernel, term in product(KERNELS, TERMS):
        columns = []
        for device in DEVICES:
            served: dict[str, list[str]] = {}
            for dtype in DTYPES:
                forward, backward = (found[Cell(kernel, term, device, dtype, d)] for d in DIRECTIONS)
                for why in (forward, backward):
                    if why is not None and why not in reasons.setdefault(kernel, []):
                        reasons[kernel].append(why)
                what = "no" if forward is not None else "forward" if backward is not None else "both"
                served.setdefault(what, []).append(str(dtype)[6:])
            parts = [f"{what}: {', '.join(names)}" for what, names in served.items()]
            columns.append(next(iter(served)) if len(served) == 1 else "; ".join(parts))
        lines.append(f"| `{kernel}` | {term} | {columns[0]} | {columns[1]} |")
    lines.append("")
    lines += [f"- `{kernel}` refuses: {'; '.join(why)}." for kernel, why in reasons.items() if why]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
