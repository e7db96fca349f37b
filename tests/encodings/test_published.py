"""The published forms are the definition in other words."""

import pytest
import torch

from parapos import Quadratic, create_encoding
from parapos.encodings import published

H, N, D, M = 3, 11, 20, 7


def setup(p, name="pape"):
    options = {"parabolas": M} if name == "pape" else {}
    enc = create_encoding(name, dim=D, heads=H, head_dim=8, pos_dim=p, **options).double().requires_grad_(False)
    x, r = torch.randn(2, N, D).double(), 4 * torch.randn(2, N, p).double()
    a, b = published.coefficients(enc, x)
    return enc, x, r, a, b, published.projection(enc)


def weights(scores):
    return (scores / 8**0.5).softmax(-1)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_all_forms_give_the_same_attention(p):
    enc, x, r, a, b, w_p = setup(p)
    q, k = torch.randn(2, 2, H, N, 8).double()
    product = q @ k.mT
    delta = torch.einsum("hmp,bijp->bhijm", w_p, r[:, None] - r[:, :, None])
    literal = (a[..., None, :] * delta**2 + b[..., None, :] * delta).sum(-1)
    m, g = published.collapse(a, b, w_p)
    want = weights(Quadratic(m, g, r).scores(torch.float64) + product)
    (term,) = enc(x, q, k, r)[2]
    torch.testing.assert_close(weights(term.scores(torch.float64) + product), want, atol=1e-10, rtol=0)
    torch.testing.assert_close(weights(literal + product), want, atol=1e-10, rtol=0)
    for query, key in (published.paper(a, b, w_p, r), published.released(-a, -b, w_p, r)):
        torch.testing.assert_close(weights(query @ key.mT + product), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_column_counts(p):
    _, _, r, a, b, w_p = setup(p)
    query, key = published.paper(a, b, w_p, r)
    assert query.shape == (2, H, N, p * p + 2 * p + 2)
    assert key.shape == (2, 1, N, p * p + 2 * p + 2)
    query, key = published.released(-a, b, w_p, r[:1])
    assert query.shape == (2, H, N, 3 * M + 2)
    assert key.shape == (1, H, N, 3 * M + 2)


@pytest.mark.parametrize("p", [2, 3])
def test_pape_ri_is_a_case_of_the_paper_form(p):
    enc, x, r, a, b, w_p = setup(p, "pape_ri")
    q, k = torch.randn(2, 2, H, N, 8).double()
    (term,) = enc(x, q, k, r)[2]
    query, key = published.paper(a, b, w_p, r)
    torch.testing.assert_close(weights(query @ key.mT), weights(term.scores(torch.float64)), atol=1e-10, rtol=0)


def test_released_linear_term_has_the_opposite_sign():
    _, _, r, a, b, w_p = setup(2)
    query, key = published.released(0 * a, b, w_p, r)
    P = r[:, None] @ w_p.mT
    want = (b[..., None, :] * (P[..., :, None, :] - P[..., None, :, :])).sum(-1)
    torch.testing.assert_close(query @ key.mT, want)


def test_ablations_have_no_published_form():
    enc = create_encoding("pape", dim=D, heads=H, head_dim=8, pos_dim=2, direction=False)
    with pytest.raises(ValueError, match="ablation"):
        published.coefficients(enc, torch.zeros(1, 2, D))
    with pytest.raises(ValueError, match="ablation"):
        published.projection(create_encoding("pape", dim=D, heads=H, head_dim=8, pos_dim=2, projection=False))
