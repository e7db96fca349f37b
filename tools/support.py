"""Which kernel serves which term, where, in which type and direction: the table, asked of the kernels themselves.

Run it: python -m tools.support
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from parapos.attention import KERNELS, Call, Distance, Polynomial, Quadratic, Table, Term, native
from parapos.positions import Positions

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DEVICES = ("cpu", "cuda")
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


Make = Callable[..., Tensor]  # of a shape: numbers that may be learned, or are fixed with learned=False


def _quadratic(make: Make, r: Positions, n: int) -> Term:
    root = make(1, 2, n, 2, 2, learned=False)
    form = (-root @ root.mT).requires_grad_(make(1).requires_grad)
    return Quadratic(form, make(1, 2, n, 2), r)


# A small term of each kind: two heads, n tokens in two dimensions.
EXAMPLES: dict[type[Term], Callable[[Make, Positions, int], Term]] = {
    Quadratic: _quadratic,
    Polynomial: lambda make, r, n: Polynomial(make(1, 2, n, 5), r),
    Distance: lambda make, r, n: Distance(make(2), r),
    Table: lambda make, r, n: Table(make(1, 2, n, n, learned=False)),
}
TERMS = {"none": None} | {kind.__name__: kind for kind in EXAMPLES}


def probe(cell: Cell, n: int = 17) -> Call:
    """A small call of this kind, with gradients of everything it can have one of but Table.bias, if backward."""
    grad = cell.direction == "backward"
    wide = torch.promote_types(cell.dtype, torch.float32)

    def make(*shape: int, dtype: torch.dtype = wide, learned: bool = True) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape))
        x = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        return x.to(cell.device).requires_grad_(grad and learned)

    r = Positions(make(1, n, 2, dtype=torch.float32, learned=False))
    kind = TERMS[cell.term]
    terms = () if kind is None else (EXAMPLES[kind](make, r, n),)
    q, k, v = (make(1, 2, n, 16, dtype=cell.dtype) for _ in range(3))
    return Call(q, k, v, terms, None, 0.25)


@contextmanager
def pretended(cell: Cell) -> Iterator[None]:
    """Tensors of the cell may be made and asked about. A GPU is taken to be an NVIDIA one that is recent enough, and a
    C++ compiler to be there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(patch.object(native, "library"))
        if cell.device == "cuda":
            properties = SimpleNamespace(major=8, minor=0)
            stack.enter_context(patch("torch.cuda.get_device_properties", return_value=properties))
            stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.set_grad_enabled(cell.direction == "backward"))
        yield


def refusal(cell: Cell) -> str | None:
    """Why the kernel does not serve such calls, or None."""
    with pretended(cell):
        return KERNELS[cell.kernel].reason_against(probe(cell))


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
