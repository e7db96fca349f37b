"""Terms: their definition, their gradients through every kernel, their columns, and terms that users bring."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Polynomial, Quadratic, Relative, Table, Term, attend
from parapos.attention import scores as score_blocks
from parapos.attention import terms as definitions
from parapos.relative import Exponents, contract

from .budget import FORWARD, TRAINING, fed, full

kernels = pytest.mark.parametrize("kernel", ["reference", *TRAINING])
COUNT = 9


def terms(p: int, n: int = 6, batch: int = 2, shared: bool = False, keys: int | None = None) -> list[Term]:
    """One of each kind of term for n queries; with `keys`, for as many keys elsewhere. One query has no position."""
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    def places(count: int) -> Tensor:
        r = 3 * torch.randn(1 if shared else batch, count, p, generator=g, dtype=torch.float64)
        r[0, 2] = torch.nan
        return r

    r, to = places(n), None if keys is None else places(keys)
    root, count = rand(batch, 2, n, p, p), n if keys is None else keys
    return [
        Quadratic(-(root @ root.mT).detach().requires_grad_(), rand(batch, 2, n, p), r, to),
        Quadratic(rand(batch, 2, n, p, p), None, r, to),
        Quadratic(None, rand(batch, 2, n, p), r, to),
        Quadratic(rand(batch, 2, n), rand(batch, 2, n, p), r, to),
        Polynomial(rand(batch, 2, n, p), r, keys=to),
        Polynomial(rand(batch, 2, n, 2), r, ((3,) + (0,) * (p - 1), (0,) * (p - 1) + (1,)), to),
        Distance(rand(2), r, keys=to),
        Table(rand(1, 2, n, count), weight=1.5),
        Table(rand(batch, 1, n, count)),
    ]


def learned(term: Term) -> dict[str, Tensor]:
    return {name: x for name in term.learned if (x := getattr(term, name)) is not None}


def test_every_term_is_here() -> None:
    known = {
        cls
        for _, cls in inspect.getmembers(definitions, inspect.isclass)
        if issubclass(cls, Term) and not inspect.isabstract(cls)
    }
    assert known == {type(term) for term in terms(2)}
    assert len(terms(2)) == COUNT


def test_a_term_by_its_own_text() -> None:
    """D^T M_i D + g_i . D, by loops, between sets of different size."""
    term = terms(3, keys=4, shared=True)[0]
    assert isinstance(term, Quadratic)
    assert term.M is not None
    assert term.g is not None
    assert term.keys is not None
    found = term.scores(torch.float64)
    assert found.shape == (2, 2, 6, 4)
    for i in range(6):
        for j in range(4):
            d = (term.keys.r[0, j] - term.r.r[0, i]).nan_to_num(nan=0.0)
            want = torch.einsum("u,bhuv,v->bh", d, term.M[:, :, i], d) + term.g[:, :, i] @ d
            torch.testing.assert_close(found[:, :, i, j], want)


@kernels
@pytest.mark.parametrize("which", range(COUNT))
@pytest.mark.parametrize(("keys", "kind"), [(None, "padding"), (5, "mask"), full(None, "mask"), full(5, "padding")])
def test_gradcheck(kernel: str, which: int, keys: int | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of few queries and of one sample, so that what blocks share is met too."""
    monkeypatch.setattr(score_blocks, "BLOCK_BYTES", 200)
    term, count = terms(2, n=4, keys=keys)[which], keys or 4
    q = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, count, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.ones(2, count, dtype=torch.bool)
    mask[1, 2] = False
    if kind == "mask":
        mask = torch.rand(1, 2, 4, count) < 0.6
        mask[0, 0, 1] = False

    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        changed = replace(term, **dict(zip(learned(term), tensors, strict=True)))  # type: ignore[type-var]
        out = attend(q, k, v, [changed], mask, kernel=kernel)
        assert isinstance(out, Tensor)
        return out

    assert torch.autograd.gradcheck(run, (q, k, v, *learned(term).values()), fast_mode=True)


@pytest.mark.parametrize("keys", [None, 9])
@pytest.mark.parametrize("shared", [False, True])
def test_blocks_of_any_size_agree(keys: int | None, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All terms at once, in blocks of one query of one sample, of a few, and of everything."""
    count = keys or 6
    q = torch.randn(2, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, count, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(2, 2, 6, count) < 0.8
    results = []
    for size in (0, 1, 16 * count * 4, 16 * count * 6, 10**9):
        monkeypatch.setattr(score_blocks, "BLOCK_BYTES", size)
        every = terms(2, shared=shared, keys=keys)
        out = attend(q, k, v, every, mask, kernel="fused" if size else "reference")
        leaves = [q, k, v, *(x for term in every for x in learned(term).values())]
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_distance_is_blind_to_nothing_but_missing_positions() -> None:
    r = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [torch.nan, torch.nan]]])
    scores = Distance(torch.tensor([2.0]), r).scores(torch.float32)[0, 0]
    assert scores.tolist() == [[0, -10, 0], [-10, 0, 0], [0, 0, 0]]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("p", "full_form", "multiple"), [(1, 2, 2), (2, 5, 3), (3, 9, 4), (4, 14, 5)])
@pytest.mark.parametrize("unplaced", [False, True])
def test_explain_counts_the_columns_that_run(
    p: int, full_form: int, multiple: int, unplaced: bool, dtype: torch.dtype
) -> None:
    """Minimal features and one for the constant of a query, in float32 whatever the queries are."""
    r = torch.rand(1, 40, p)
    r[0, 0] = torch.nan if unplaced else 0.5
    q, k = torch.rand(2, 1, 2, 40, 24).add(0.5).to(dtype).unbind()
    form, slope = -0.1 * torch.rand(1, 2, 40, p, p), torch.rand(1, 2, 40, p)
    for term, count in (
        (Quadratic(form @ form.mT, slope, parapos.Positions.of(r)), full_form),
        (Quadratic(-torch.rand(1, 2, 40), None, parapos.Positions.of(r)), multiple),
    ):
        count += 1
        with fed() as calls:
            parapos.attend(q, k, k, [term], kernel="fused")
            method = parapos.explain(q, k, k, [term]).method
        query, key = (torch.cat(heads, dim=1) for heads in zip(*calls, strict=True))
        assert query.shape[-1] == key.shape[-1] == 24 + count
        assert query.dtype == key.dtype == torch.float32
        assert all((x[..., 24:].abs().amax((0, 1, 2)) > 0).all() for x in (query, key))
        assert f"as {count} extra query/key columns in batched products of width {24 + count}" in method


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 1e-4), (torch.bfloat16, 2e-3)])
@pytest.mark.parametrize("shift", [0.0, 1e4])
@pytest.mark.parametrize("cross", [False, True])
def test_columns_are_the_scores(dtype: torch.dtype, most: float, shift: float, cross: bool) -> None:
    """With a column for the constant, up to nothing at all; also keys without a position, and keys elsewhere."""
    g = torch.Generator().manual_seed(0)
    r = 9 * torch.rand(1, 20, 2, generator=g, dtype=torch.float64) + shift
    keys = 5 + 6 * torch.rand(1, 13, 2, generator=g, dtype=torch.float64) + shift if cross else None
    (r if keys is None else keys)[0, 5] = torch.nan
    form = -torch.eye(2).expand(1, 1, 20, 2, 2) * 0.1
    term = Quadratic(form, 0.1 * torch.randn(1, 1, 20, 2, generator=g), r, keys)
    q, k = torch.zeros(1, 1, 20, 8, dtype=dtype), torch.zeros(1, 1, 13 if cross else 20, 8, dtype=dtype)
    with fed() as calls:
        parapos.attend(q, k, k, [term], kernel="fused")
    ((query, key),) = calls
    error = query.double() @ key.double().mT - term.scores(torch.float64)
    assert error.abs().max() < most


@dataclass(frozen=True, eq=False)
class Ripple(Relative):
    """A term of a user: c_i D_x^3 + e_i |D|, of functions that no built-in term combines."""

    c: Tensor
    e: Tensor
    r: parapos.Positions
    keys: parapos.Positions | None = None
    scaled: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("c", "e")

    @property
    def exponents(self) -> Exponents:
        return ((3, 0), (-1, 0))

    def coefficients(self, dtype: torch.dtype) -> Tensor:
        return torch.stack([self.c, self.e], dim=-1).to(dtype)


@dataclass(frozen=True, eq=False)
class Bowl(Relative):
    """A term of a user that can be columns: c_i |D|^2 + D_y."""

    c: Tensor
    r: parapos.Positions
    keys: parapos.Positions | None = None
    scaled: ClassVar[bool] = True
    learned: ClassVar[tuple[str, ...]] = ("c",)

    @property
    def exponents(self) -> Exponents:
        return ((-2, 0), (0, 1))

    def coefficients(self, dtype: torch.dtype) -> Tensor:
        return torch.stack([self.c, torch.ones_like(self.c)], dim=-1).to(dtype)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", [Ripple, Bowl])
@pytest.mark.parametrize("kernel", [full(name) if name == "flex" else name for name in FORWARD])
def test_a_new_term_is_served_without_registration(kind: type[Relative], kernel: str, cross: bool) -> None:
    """By its exponents and coefficients alone; its scores and gradients are those of plain operations."""
    n, keys = 12, 20 if cross else 12
    r, to = torch.rand(1, n, 2) * 4, torch.rand(1, keys, 2) * 4 if cross else None
    q = torch.randn(2, 2, n, 16)
    k, v = torch.randn(2, 2, 2, keys, 16).unbind()
    names = kind.learned
    tensors = [-torch.rand(2, 2, n) for _ in names]
    mask = torch.rand(2, keys) < 0.8
    term = kind(*tensors, r, to)
    d = (r if to is None else to)[:, None, None, :, :] - r[:, None, :, None, :]  # (1, 1, n, N, 2)
    if kind is Ripple:
        want = tensors[0][..., None] * d[..., 0] ** 3 + tensors[1][..., None] * d.norm(dim=-1)
    else:
        want = tensors[0][..., None] * d.square().sum(-1) + d[..., 1]
    torch.testing.assert_close(term.scores(torch.float32), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        attend(q, k, v, [term], mask, kernel=kernel), attend(q, k, v, [term], mask, kernel="reference"),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    if kernel not in TRAINING:
        return
    found = []
    for name in (kernel, "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *tensors)]
        out = attend(*leaves[:3], [kind(*leaves[3:], r, to)], mask, kernel=name)
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("held", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tables_of_any_type(kernel: str, dtype: torch.dtype, held: torch.dtype) -> None:
    """A table may be narrower or wider than queries; it is widened before it is weighted."""
    q, k, v = torch.randn(3, 2, 2, 9, 8).to(dtype).unbind()
    bias = torch.randn(1, 2, 9, 9).to(held).requires_grad_()
    out = attend(q, k, v, [Table(bias, weight=2.5)], kernel=kernel)
    wide = [x.double() for x in (q, k, v)]
    want = (wide[0] @ wide[1].mT * 8**-0.5 + 2.5 * bias.double()).softmax(-1) @ wide[2]
    eps = max(torch.finfo(dtype).eps, 1e-7 if dtype != torch.float64 else 0)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=16 * eps)
    (found,) = torch.autograd.grad(out.double().square().sum(), bias)
    assert found.dtype == held
    (exact,) = torch.autograd.grad(want.square().sum(), bias)
    rounding = 64 * max(eps, torch.finfo(held).eps)
    torch.testing.assert_close(found.double(), exact.double(), rtol=0, atol=rounding * exact.abs().max().item())


def test_a_term_that_is_neither_relative_nor_a_table_is_left_to_the_reference() -> None:
    class Odd(Term):
        scaled, learned = False, ()

        def check(self, q: Tensor, k: Tensor) -> None:
            pass

        def scores(self, dtype: torch.dtype) -> Tensor:
            return torch.arange(5.0).to(dtype).expand(1, 1, 5, 5)

    q = torch.randn(1, 1, 5, 8)
    plan = parapos.explain(q, q, q, [Odd()])
    assert plan.kernel == "reference"
    assert plan.passed_over["fused"] == "Odd is neither relative nor a table"
    want = attend(q, q, q, [Table(torch.arange(5.0).expand(1, 1, 5, 5))])
    torch.testing.assert_close(attend(q, q, q, [Odd()]), want)


def test_bad_terms() -> None:
    r = torch.zeros(1, 4, 2)
    with pytest.raises(ValueError, match="M, g or both"):
        Quadratic(None, None, r)
    with pytest.raises(ValueError, match="exponents"):
        Polynomial(torch.zeros(1, 1, 4, 4), r)
    for dtype in (torch.bool, torch.int64):
        with pytest.raises(TypeError, match=rf"Table\.bias must be floating, got {dtype}; to hide keys.*mask"):
            Table(torch.ones(1, 1, 4, 4, dtype=dtype))
    for weight in (0.0, -1.0, torch.inf):
        with pytest.raises(ValueError, match=r"Table\.weight must be positive and finite"):
            Table(torch.ones(1, 1, 4, 4), weight=weight)


def test_contract_of_shared_and_separate_functions() -> None:
    """The three ways that products are summed give one result."""
    c, basis = torch.randn(3, 2, 5, 4, dtype=torch.float64), torch.randn(3, 5, 4, 7, dtype=torch.float64)
    torch.testing.assert_close(contract(c, basis), torch.einsum("bhif,bifj->bhij", c, basis))
    torch.testing.assert_close(contract(c, basis[:1]), torch.einsum("bhif,ifj->bhij", c, basis[0]))
    one = c[:1, :, :1]
    torch.testing.assert_close(contract(one, basis), torch.einsum("hf,bifj->bhij", one[0, :, 0], basis))
