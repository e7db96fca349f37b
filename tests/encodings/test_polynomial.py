"""Polynomials of the relative position: the definition, its exponents, and PaPE as a special case."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from parapos import Polynomial, Quadratic, attend, create_encoding

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


@pytest.mark.parametrize(("degree", "p", "kind"), GRID)
def test_key_dependent_coefficients(degree, p, kind):
    """c_ik h_jk D^(e_k) against the definition, and against the paper's products of separate features."""
    enc = encoding(degree, p, kind, key_dependent=True).double()
    torch.nn.init.normal_(enc.w_h, std=0.5)
    x, r = torch.randn(2, 7, 26, dtype=torch.float64), torch.randn(2, 7, p, dtype=torch.float64)
    q, k = torch.randn(2, 2, 3, 7, 8, dtype=torch.float64)
    changed_q, changed_k, (term,) = enc(x, q, k, r)
    assert changed_q is q
    assert changed_k is k
    c, h = torch.einsum("hkd,bnd->bhnk", enc.w_c, x), torch.einsum("hkd,bhnd->bhnk", enc.w_h, k)
    falling = torch.tensor([degree % 2 == 0 and max(e) == degree for e in enc.exponents])
    c = torch.where(falling, -F.softplus(c), c)
    h = torch.where(falling, F.softplus(h) / math.log(2), 1 + h)
    d = r[:, None] - r[:, :, None]
    powers = torch.stack([torch.stack([d[..., u] ** n for u, n in enumerate(e)]).prod(0) for e in enc.exponents], -1)
    want = torch.einsum("bhik,bhjk,bijk->bhij", c, h, powers)
    torch.testing.assert_close(term.scores(torch.float64), want * 8**-0.5, rtol=1e-11, atol=1e-10)
    separate = torch.zeros_like(want)
    for n, e in enumerate(enc.exponents):
        for part in itertools.product(*(range(power + 1) for power in e)):
            count = math.prod(math.comb(power, s) for power, s in zip(e, part, strict=True))
            at = torch.stack([(-r[..., u]) ** (e[u] - s) for u, s in enumerate(part)]).prod(0)
            to = torch.stack([r[..., u] ** s for u, s in enumerate(part)]).prod(0)
            separate += count * (c[..., n] * at[:, None])[..., None] * (h[..., n] * to[:, None])[..., None, :]
    torch.testing.assert_close(separate, want, rtol=1e-9, atol=1e-9)


def test_key_dependent_coefficients_start_at_one():
    plain, keyed = encoding(2, 2, "multivariate"), encoding(2, 2, "multivariate", key_dependent=True)
    keyed.load_state_dict({**plain.state_dict(), "w_h": keyed.w_h})
    x, r, (q, k, v) = torch.randn(2, 6, 26), torch.randn(6, 2), torch.randn(3, 2, 3, 6, 8)
    r[4] = torch.nan  # a token without a position
    outs = [attend(q, k, v, enc(x, q, k, r)[2], scale=enc.scale) for enc in (plain, keyed)]
    torch.testing.assert_close(*outs)
    outs[1].square().sum().backward()
    assert all(w.grad.isfinite().all() and w.grad.abs().max() > 0 for w in keyed.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_dependent_attention_of_other_keys_on_every_kernel(dtype):
    """Cross-attention, moved far away, forward and backward: the fused kernel is as good as the reference."""
    enc = encoding(4, 2, "univariate", key_dependent=True)
    torch.nn.init.normal_(enc.w_h, std=0.3)
    x, (at, to) = torch.randn(2, 5, 26), (torch.randn(2, 5, 2), torch.randn(2, 9, 2))
    q, k, v = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (5, 9, 9))
    far = torch.tensor([512.0, -256.0])
    found = []
    for kernel, shift in (("reference", 0.0), ("fused", 0.0), ("reference", far)):
        enc.zero_grad()
        terms = enc(x.to(dtype), q, k, (at * 8).round() / 8 + shift, (to * 8).round() / 8 + shift)[2]
        out = attend(q, k, v, terms, scale=enc.scale, kernel=kernel)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        found.append((out, enc.w_c.grad, enc.w_h.grad))
    near = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(found[1], found[0], **near)
    assert torch.equal(found[2][0], found[0][0])
