"""Polynomials of the relative position: the definition, its exponents, and PaPE as a special case."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from parapos import Polynomial, Quadratic, create_encoding

GRID = list(itertools.product([1, 2, 3, 4], [1, 2, 3], ["univariate", "multivariate"]))


def exponents_of(degree, p, kind):
    """All exponents of degree 1..degree, by brute force."""
    every = [e for e in itertools.product(range(degree + 1), repeat=p) if 1 <= sum(e) <= degree]
    return {e for e in every if kind == "multivariate" or sum(v > 0 for v in e) == 1}


def encoding(degree, p, kind, **options):
    return create_encoding("polynomial", dim=26, heads=3, head_dim=8, pos_dim=p, degree=degree, kind=kind, **options)


def direct(c, exponents, r):
    """sum_k c_ik D^(e_k), (B, H, N, N), without any expansion."""
    d = r[:, None] - r[:, :, None]
    powers = torch.stack([torch.stack([d[..., u] ** n for u, n in enumerate(e)]).prod(0) for e in exponents], -1)
    return torch.einsum("bhik,bijk->bhij", c, powers)


@pytest.mark.parametrize(("degree", "p", "kind"), GRID)
def test_scores_are_the_polynomial(degree, p, kind):
    exponents = encoding(degree, p, kind).exponents
    assert set(exponents) == exponents_of(degree, p, kind)
    count = p * degree if kind == "univariate" else math.comb(degree + p, p) - 1
    assert len(exponents) == count
    c, r = torch.randn(2, 3, 7, count, dtype=torch.float64), torch.randn(2, 7, p, dtype=torch.float64) * 2
    term = Polynomial(c, r, exponents)
    want = direct(c, exponents, r)
    torch.testing.assert_close(term.scores(torch.float64), want, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("degree", "p", "kind"), GRID)
def test_coefficients_come_from_the_token(degree, p, kind, inputs):
    enc = encoding(degree, p, kind).double()
    x = torch.randn(2, 7, 26, dtype=torch.float64)
    r, q = torch.randn(2, 7, p, dtype=torch.float64), torch.zeros(2, 3, 7, 8, dtype=torch.float64)
    (term,) = enc(x, q, q, r)[2]
    assert enc.w_c.shape == (3, len(enc.exponents), 26)
    assert enc.w_c.abs().max() <= 26**-0.5
    want = torch.einsum("hkd,bnd->bhnk", enc.w_c, x)
    for k, e in enumerate(enc.exponents):
        falling = degree % 2 == 0 and max(e) == degree  # pure even powers of the top degree decay
        expected = -F.softplus(want[..., k]) if falling else want[..., k]
        torch.testing.assert_close(term.c[..., k], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(term.scores(torch.float64), direct(term.c, enc.exponents, r), rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_degree_two_contains_pape(p, make, inputs, qk):
    module = make("pape", p, dtype=torch.float64)
    x, r = inputs(module)
    (term,) = module.encoding(x, *qk(module, x), r)[2]
    assert isinstance(term, Quadratic)
    exponents, columns = [], []
    for u in range(p):
        exponents.append(tuple(int(w == u) for w in range(p)))
        columns.append(term.g[..., u])
        for v in range(u, p):
            exponents.append(tuple((w == u) + (w == v) for w in range(p)))
            columns.append(term.M[..., u, v] * (1 if u == v else 2))
    same = Polynomial(torch.stack(columns, -1), r, tuple(exponents))
    torch.testing.assert_close(same.scores(torch.float64), term.scores(torch.float64), rtol=1e-11, atol=1e-11)


def test_even_degrees_fall_and_odd_degrees_may_rise():
    """Far away the top power rules: with decaying leading coefficients all keys lose, otherwise some win."""
    x = torch.randn(4, 3, 26)
    q = torch.zeros(4, 3, 3, 8)
    r = torch.tensor([[0.0], [1e4], [-1e4]])
    for degree in (1, 2, 3, 4):
        (term,) = encoding(degree, 1, "univariate")(x, q, q, r)[2]
        far = term.scores(torch.float32)[:, :, 0, 1:]
        assert far.lt(0).all() == (degree % 2 == 0)


def test_exponents_follow_from_the_width():
    c = torch.zeros(1, 1, 3, 9)
    assert set(Polynomial(c, torch.zeros(1, 3, 2)).powers) == exponents_of(3, 2, "multivariate")
    with pytest.raises(ValueError, match="4 coefficients in 2 variables"):
        Polynomial(c[..., :4], torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match="exponents"):
        Polynomial(c[..., :1], torch.zeros(1, 3, 2), ((1,),))


@pytest.mark.parametrize(
    ("options", "word"),
    [({"degree": 0}, "degree.*0"), ({"degree": 5}, "degree.*5"), ({"kind": "mixed"}, "kind.*mixed")],
)
def test_bad_options(options, word):
    with pytest.raises(ValueError, match=word):
        encoding(**{"degree": 2, "p": 2, "kind": "univariate", **options})
