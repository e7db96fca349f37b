"""FlexAttention against the reference, by the error budget, and every call it must refuse.

Compiling takes seconds per graph, so every term stands in every call, and a case sets the others to zero.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import KERNELS, Call, Distance, Polynomial, Quadratic, Table, Term, flex
from parapos.positions import Positions
from tools.support import EXAMPLES

from .criterion import DTYPES, assert_within_budget

TERMS = tuple(EXAMPLES)
B, H, SIZE = 2, 3, 16

lacking = flex._cpu_lacks()
compiles = pytest.mark.skipif(lacking is not None, reason=str(lacking))


def make_call(
    dtype: torch.dtype,
    *,
    on: tuple[type[Term], ...] = TERMS,
    n: int = 70,
    keys: int | None = None,
    dims: tuple[int, int, int] = (1, 1, 4),
    mask: str = "padding",
    r_dtype: torch.dtype = torch.float32,
    shift: float = 0.0,
    spread: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, list[Term], Tensor | None]:
    """q, k, v, terms and a mask. Token 1 has no position; query 3 of head 0 sees nothing if there is a table.

    on: the terms that are not set to zero. dims: position dimensions of Quadratic, Polynomial and Distance.
    keys: how many, if they are others. Padding hides all of sample 0; a mask of each query, all from query 2.
    """
    g = torch.Generator().manual_seed(n)
    count = n if keys is None else keys

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    def positions(size: int, p: int) -> Positions:
        r = torch.randint(0, 12, (B, size, p), generator=g).to(r_dtype) + shift
        if spread:  # two clusters of fractions, far apart
            r = r / 3 + spread * (torch.arange(size) % 2)[None, :, None]
        r[:, 1] = torch.nan
        return Positions(r)

    q, k, v = randn(B, H, n, SIZE).to(dtype), randn(B, H, count, SIZE).to(dtype), randn(B, H, count, SIZE).to(dtype)
    r = [(positions(n, p), None if keys is None else positions(keys, p)) for p in dims]
    bias = randn(1, H, n, count)
    bias[bias > 1.5] = -torch.inf
    bias[:, 0, 3] = -torch.inf
    factor = {kind: float(kind in on) for kind in TERMS}
    form = -0.1 * randn(B, H, n, dims[0], dims[0]).abs()
    width = dims[1] * (dims[1] + 3) // 2  # of all monomials of degree two
    made: list[Term] = [
        Quadratic(form * factor[Quadratic], randn(B, H, n, dims[0]) * factor[Quadratic], *r[0]),
        Polynomial(0.1 * randn(B, H, n, width) * factor[Polynomial], r[1][0], keys=r[1][1]),
        Distance(torch.rand(H, generator=g) * factor[Distance], r[2][0], keys=r[2][1]),
        Table(bias if Table in on else torch.zeros_like(bias), weight=1.5),
    ]
    assert {type(term) for term in made} == set(TERMS)
    padding = torch.rand(B, count, generator=g) > 0.2
    padding[0] = False
    each = torch.rand(B, 1, n, count, generator=g) > 0.2
    each[:, :, 2] = False
    return q, k, v, made, {"padding": padding, "mask": each, "none": None}[mask]


def run(call: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        out = parapos.attend(*call, kernel="flex")
    assert isinstance(out, Tensor)
    return out


def check(call: tuple[Any, ...]) -> Tensor:
    """The output, which is within the budget."""
    q, k, v, *rest = call
    ours = run(call)
    assert ours.dtype == q.dtype
    theirs = parapos.attend(*call, kernel="reference")
    truth = parapos.attend(q.double(), k.double(), v.double(), *rest, kernel="reference")
    assert isinstance(theirs, Tensor)
    assert isinstance(truth, Tensor)
    assert_within_budget({"out": ours.double()}, {"out": theirs.double()}, {"out": truth}, q.dtype, SIZE)
    return ours


# A case for each promise: every term and dtype, one to four dimensions, both kinds of mask, self- and cross-attention
# with more and fewer keys than queries, positions in float64. Compiling takes longer the more functions of D there are.
FEW: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, dict(n=20, keys=70, dims=(1, 1, 3), mask="mask", r_dtype=torch.float64)),
]
MANY: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, dict()),
    (torch.float16, dict(n=70, keys=20, dims=(1, 1, 2))),
]
MANY += [
    (dtype, dict(n=n, keys=keys, dims=(2, 2, 2), mask=mask, r_dtype=r_dtype))
    for n, keys, r_dtype in ((130, None, torch.float32), (20, 130, torch.float64), (130, 20, torch.float64))
    for dtype, mask in zip(DTYPES, ("padding", "mask", "none"), strict=True)
]
MANY += [(torch.float32, dict(dims=(p, p, p), keys=20, mask="mask")) for p in (3, 4)]


@compiles
@pytest.mark.parametrize(
    ("dtype", "options"), [*FEW, *(pytest.param(*case, marks=pytest.mark.full) for case in MANY)], ids=str
)
def test_every_term(dtype: torch.dtype, options: dict[str, Any]) -> None:
    for on in (TERMS, *((kind,) for kind in TERMS), ()):
        call = make_call(dtype, on=on, **options)
        out = check(call)
        mask = call[-1]
        assert (out[1, 0, 3] == 0).all() == (Table in on)
        if mask is not None:
            empty = out[0] if mask.ndim == 2 else out[:, :, 2]
            assert (empty == 0).all()


@compiles
def test_padding_may_hold_anything() -> None:
    call = make_call(torch.float32)
    want = run(call)
    _, k, v, _, mask = call
    assert mask is not None
    for x in (k, v):
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    assert torch.equal(run(call), want)


@pytest.mark.full
@compiles
def test_positions_may_be_far() -> None:
    far = make_call(torch.float32, shift=1e9, r_dtype=torch.float64)
    assert torch.equal(run(far), run(make_call(torch.float32)))  # integer grids stay exact, wherever they are
    check(make_call(torch.float32, on=(Quadratic, Distance), spread=1e6, r_dtype=torch.float64))


@pytest.mark.full
@compiles
def test_queries_in_float32_and_keys_in_float64() -> None:
    q, k = torch.randn(1, H, 9, SIZE), torch.randn(1, H, 20, SIZE)
    r, keys = torch.rand(1, 9, 2), torch.rand(1, 20, 2).double() + 1e5 * (torch.arange(20) > 9)[None, :, None]
    check((q, k, k, [Distance(torch.rand(H), Positions(r), keys=Positions(keys))], None))


@pytest.mark.full
@compiles
def test_one_term_alone_then_another_with_more_tokens() -> None:
    """What encodings ask for, one call after the other in one process."""
    for tokens, kind in ((17, Distance), (130, Quadratic)):
        q, r = torch.randn(1, H, tokens, SIZE), Positions(torch.rand(1, tokens, 2))
        m, g = -torch.rand(1, H, tokens, 2, 2), torch.randn(1, H, tokens, 2)
        check((q, q, q, [Distance(torch.rand(H), r) if kind is Distance else Quadratic(m + m.mT, g, r)], None))


@pytest.mark.full
@compiles
def test_one_sample_of_strided_heads_without_mask() -> None:
    """A multiple of the identity as M, values of another size, q, k and v as views of one projection."""
    qkv = torch.randn(1, 20, H * (2 * SIZE + 8))
    q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in qkv.split([H * SIZE, H * SIZE, H * 8], dim=-1))
    check((q, k, v, [Quadratic(-torch.rand(1, H, 20), None, Positions(torch.rand(1, 20, 2)))], None))


@pytest.mark.parametrize(("b", "n", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_to_do(b: int, n: int, keys: int) -> None:
    q, k = torch.zeros(b, H, n, SIZE), torch.zeros(b, H, keys, SIZE)
    assert torch.equal(run((q, k, k[..., :4])), torch.zeros(b, H, n, 4))


def shaped(device: str, size: int, dtype: torch.dtype = torch.float16) -> Any:
    """What `refuse` looks at of a tensor, for devices that are not here."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 4, size), requires_grad=True)


def refusal(q: Any, k: Any = None, v: Any = None, terms: tuple[Term, ...] = (), grad: bool = False) -> str | None:
    with torch.set_grad_enabled(grad):
        return KERNELS["flex"].reason_against(Call(q, q if k is None else k, q if v is None else v, terms, None, 1.0))


class Strange(Term):
    """Neither relative nor a table."""

    scaled, learned = True, ()

    def check(self, q: Tensor, k: Tensor) -> None: ...

    def scores(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(1, 1, 4, 4, dtype=dtype)


def test_refusals() -> None:
    x = torch.zeros(1, 1, 4, SIZE)
    assert refusal(x.double()) == "FlexAttention has no float64"
    assert "no backward pass on the CPU" in str(refusal(x.clone().requires_grad_(), grad=True))
    assert "not for meta" in str(refusal(x.to("meta")))
    assert refusal(x, terms=(Strange(),)) == "Strange is neither relative nor a table"
    small, large = shaped("cuda", 8), shaped("cuda", 64)
    assert "16 at least" in str(refusal(small, v=large))
    assert "16 at least" in str(refusal(large, v=small))
    assert refusal(large, grad=True) is None
    found: list[str | None] = []
    torch.func.vmap(lambda y: (found.append(refusal(x)), y)[1])(torch.zeros(2))
    assert "function transform" in str(found[0])


def test_gradients_of_terms_are_refused() -> None:
    x, r = shaped("cuda", 64), Positions(torch.zeros(1, 4, 2))
    fixed, learned = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert refusal(x, terms=(Distance(fixed, r),), grad=True) is None
    assert "atomic additions" in str(refusal(x, terms=(Distance(learned, r),), grad=True))
    assert refusal(x, terms=(Distance(learned, r),)) is None
    moved = Distance(fixed, Positions(torch.zeros(1, 4, 2, requires_grad=True)))
    assert "positions require a gradient" in str(refusal(x, terms=(moved,), grad=True))


def test_a_machine_that_cannot_compile_says_so(monkeypatch):
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in flex._cpu_lacks.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(flex.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "needs AVX2 or AVX512, got DEFAULT" in flex._cpu_lacks.__wrapped__()
