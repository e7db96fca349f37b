"""PaPE against its definition: by loops, by symbols, by exact integers, by gradients; and its ablations."""

import math

import pytest
import sympy
import torch
import torch.nn.functional as F

import parapos
from parapos import Quadratic, create_encoding
from parapos.attention import fused
from parapos.encodings.parabolic import CACHED_TOKENS, INITS
from parapos.relative import contract

DIMS = [1, 2, 3, 4]
VARIANTS = {  # options: positional parameters of ViT-S, m = 50
    "full": ({}, 2_772_000),
    "distance": ({"distance": False}, 1_389_600),
    "direction": ({"direction": False}, 1_389_600),
    "context": ({"context": False}, 14_400),
    "activation": ({"activation": False}, 2_772_000),
    "projection": ({"projection": False}, 110_592),
}


def coefficients(encoding, x):
    """a, b (B, H, N, m) and W_p (H, m, p) by the text of the definition, without any folding."""

    def read(w, constant):
        if w is not None:
            return torch.einsum("hmd,bnd->bhnm", w, x)
        b, n, _ = x.shape
        return torch.zeros(()) if constant is None else constant[None, :, None, :].expand(b, -1, n, -1)

    a = read(encoding.w_a, encoding.a)
    if encoding.w_a is not None or encoding.a is not None:
        a = -F.softplus(a) if encoding.activation else -a
    p = encoding.pos_dim
    w_p = torch.eye(p).to(x).expand(encoding.heads, p, p) if encoding.w_p is None else encoding.w_p
    return a, read(encoding.w_b, encoding.b), w_p


def literal(a, b, w_p, r):
    """<a_i, (W_p D)^2> + <b_i, W_p D>: (B, H, N, N), vectorised over everything but the parabolas' own algebra."""
    delta = torch.einsum("hmp,bijp->bhijm", w_p, r[:, None] - r[:, :, None])
    total = torch.zeros(delta.shape[:-1], dtype=r.dtype)
    if a.ndim:
        total = total + (a[:, :, :, None] * delta.square()).sum(-1)
    if b.ndim:
        total = total + (b[:, :, :, None] * delta).sum(-1)
    return total


def term_of(module, x, r, qk):
    (term,) = module.encoding(x, *qk(module, x), r)[2]
    return term


@pytest.mark.parametrize("p", DIMS)
def test_definition_by_loops(p, make, inputs, qk):
    module = make("pape", p, dtype=torch.float64, parabolas=3)
    encoding = module.encoding
    x, r = inputs(module, batch=1, tokens=4)
    scores = term_of(module, x, r, qk).scores(torch.float64)
    for head in range(encoding.heads):
        for i in range(4):
            for j in range(4):
                want = 0.0
                for l in range(3):
                    pre = sum(encoding.w_a[head, l, d].item() * x[0, i, d].item() for d in range(encoding.dim))
                    b = sum(encoding.w_b[head, l, d].item() * x[0, i, d].item() for d in range(encoding.dim))
                    delta = sum(encoding.w_p[head, l, u].item() * (r[0, j, u] - r[0, i, u]).item() for u in range(p))
                    want += -math.log1p(math.exp(pre)) * delta**2 + b * delta
                assert scores[0, head, i, j].item() == pytest.approx(want, rel=1e-12, abs=1e-12)
                assert (i != j) or want == 0


@pytest.mark.parametrize("p", DIMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ablations_are_the_formula_without_their_part(p, variant, make, inputs, qk):
    module = make("pape", p, dtype=torch.float64, **VARIANTS[variant][0])
    x, r = inputs(module)
    a, b, w_p = coefficients(module.encoding, x)
    want = literal(a, b, w_p, r)
    torch.testing.assert_close(term_of(module, x, r, qk).scores(torch.float64), want, rtol=1e-12, atol=1e-12)
    # With the full encoding's weights, an ablation is the full formula with one part zeroed or replaced.
    full = make("pape", p, dtype=torch.float64, parabolas=p if variant == "projection" else 5).encoding
    own = module.encoding
    with torch.no_grad():
        for name, weight in own.named_parameters():
            if name in dict(full.named_parameters()):
                weight.copy_(getattr(full, name))
        a, b, w_p = coefficients(full, x)
        if variant == "distance":
            a = torch.zeros_like(a)
        elif variant == "direction":
            b = torch.zeros_like(b)
        elif variant == "context":
            a, b = (c[None, :, None].expand_as(a) for c in (-F.softplus(own.a), own.b))
        elif variant == "activation":
            a = -torch.einsum("hmd,bnd->bhnm", full.w_a, x)
        elif variant == "projection":
            w_p = torch.eye(p).double().expand_as(w_p)
        torch.testing.assert_close(
            term_of(module, x, r, qk).scores(torch.float64), literal(a, b, w_p, r), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("p", DIMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_definition(p, variant, make, inputs, qk):
    """Folding W_b before it meets a token changes no gradient."""
    module = make("pape", p, dtype=torch.float64, **VARIANTS[variant][0])
    x, r = inputs(module)
    weights = [*module.encoding.parameters(), *([x.requires_grad_()] if module.encoding.context else [])]
    upstream = torch.randn(2, module.heads, 7, 7, dtype=torch.float64)
    folded = torch.autograd.grad((term_of(module, x, r, qk).scores(torch.float64) * upstream).sum(), weights)
    plain = torch.autograd.grad((literal(*coefficients(module.encoding, x), r) * upstream).sum(), weights)
    for one, other in zip(folded, plain, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 1e-12 * other.norm()


@pytest.mark.parametrize("p", DIMS)
def test_rotation_invariant_form(p, make, inputs, qk):
    for learn_wp in (False, True):
        module = make("pape_ri", p, dtype=torch.float64, learn_wp=learn_wp)
        encoding = module.encoding
        x, r = inputs(module)
        alpha = -F.softplus(torch.einsum("hd,bnd->bhn", encoding.w_a, x))
        square = (r[:, None] - r[:, :, None]).square().sum(-1)[:, None]
        want = (alpha * encoding.w_p[:, None] ** 2)[..., None] * square
        torch.testing.assert_close(term_of(module, x, r, qk).scores(torch.float64), want, rtol=1e-12, atol=1e-12)
        assert ("w_p" in dict(encoding.named_parameters())) == learn_wp
        assert encoding.w_p.shape == (encoding.heads,)
        # PaPE contains it: m = p, W_p = w_p I, a_l = alpha, b = 0.
        eye = torch.eye(p).double() * encoding.w_p[:, None, None]
        a = alpha[..., None].expand(*alpha.shape, p)
        torch.testing.assert_close(literal(a, torch.zeros(()), eye, r), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("p", DIMS)
def test_minimal_features_by_symbols(p, m):
    """psi.phi + const is the definition, identically in all of its letters."""

    def letters(name, *shape):
        return sympy.symarray(name, shape)

    w, a, b, query, key = letters("w", m, p), letters("a", m), letters("b", m), letters("r", p), letters("s", p)
    delta = [sum(w[l, u] * (key[u] - query[u]) for u in range(p)) for l in range(m)]
    definition = sum(a[l] * delta[l] ** 2 + b[l] * delta[l] for l in range(m))
    form = [[sum(a[l] * w[l, u] * w[l, v] for l in range(m)) for v in range(p)] for u in range(p)]
    slope = [sum(w[l, u] * b[l] for l in range(m)) for u in range(p)]
    turned = [sum(form[u][v] * query[v] for v in range(p)) for u in range(p)]
    pairs = [(u, v) for u in range(p) for v in range(u, p)]
    psi_i = [form[u][v] * (1 if u == v else 2) for u, v in pairs] + [slope[u] - 2 * turned[u] for u in range(p)]
    phi_j = [key[u] * key[v] for u, v in pairs] + list(key)
    const = sum((turned[u] - slope[u]) * query[u] for u in range(p))
    assert len(phi_j) == {1: 2, 2: 5, 3: 9, 4: 14}[p]
    total = sum(x * y for x, y in zip(psi_i, phi_j, strict=True)) + const
    assert sympy.expand(total - definition) == 0
    assert sympy.expand(total - definition - const) != 0  # the constant is not idle


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("p", DIMS)
def test_minimal_features_by_integers(p, m):
    """The library's own functions, fed with integers, where float64 is exact: equal to the last bit."""

    def integers(*shape):
        return torch.randint(-9, 10, shape).double()

    a, b, w_p, r = integers(2, 3, 6, m), integers(2, 3, 6, m), integers(3, m, p), integers(2, 6, p)
    definition = literal(a, b, w_p, r)
    form = torch.einsum("bhnm,hmu,hmv->bhnuv", a, w_p, w_p)
    slope = torch.einsum("bhnm,hmu->bhnu", b, w_p)

    def by_columns(term, count):
        """Scores from the columns that the fused kernel uses, whose last one is the constant."""
        T, phi, _ = fused.columns(term)
        assert T.shape[-1] == phi.shape[-1] == count + 1
        return contract(term.coefficients(torch.float64), T.double()) @ phi[:, None].double().transpose(-1, -2)

    term = Quadratic(form, slope, r)
    assert torch.equal(by_columns(term, p * (p + 1) // 2 + p), definition)
    assert torch.equal(term.scores(torch.float64), definition)
    # A multiple of the identity needs p + 1 features, |r|^2 and r.
    alpha = integers(2, 3, 6)
    eye = alpha[..., None, None] * torch.eye(p).double()
    dense = Quadratic(eye, slope, r).scores(torch.float64)
    assert torch.equal(by_columns(Quadratic(alpha, slope, r), p + 1), dense)
    assert torch.equal(Quadratic(alpha, slope, r).scores(torch.float64), dense)
    for part in (Quadratic(form, None, r), Quadratic(None, slope, r)):
        other = Quadratic(form if part.M is None else None, slope if part.g is None else None, r)
        assert torch.equal(part.scores(torch.float64) + other.scores(torch.float64), definition)


@pytest.mark.parametrize("p", DIMS)
def test_wide_forms_of_the_literature_agree(p, make, inputs, qk):
    """The p^2 + 2p + 2 features of the paper and the 3m + 2 of the release give the same scores."""
    module = make("pape", p, dtype=torch.float64)
    x, r = inputs(module)
    a, b, w_p = coefficients(module.encoding, x)
    term = term_of(module, x, r, qk)
    want, form, slope = term.scores(torch.float64), term.M, term.g
    turned = (form @ r[:, None, :, :, None])[..., 0]  # M_i r_i
    at = r[:, None].expand_as(turned)
    own = (turned * at).sum(-1, keepdim=True)
    query = torch.cat([own, form.flatten(-2), -2 * turned, slope, -(slope * at).sum(-1, keepdim=True)], -1)
    one = torch.ones_like(r[..., :1])
    key = torch.cat([one, (r[..., :, None] * r[..., None, :]).flatten(-2), r, r, one], -1)[:, None]
    assert key.shape[-1] == p * p + 2 * p + 2
    torch.testing.assert_close(query @ key.transpose(-1, -2), want, rtol=1e-10, atol=1e-10)
    spot = torch.einsum("hmp,bnp->bhnm", w_p, r)
    parts = [(a * spot**2).sum(-1, keepdim=True), -a, -2 * a * spot, (-b * spot).sum(-1, keepdim=True), -b]
    one = torch.ones_like(spot[..., :1])
    wide = torch.cat(parts, -1) @ torch.cat([one, -(spot**2), spot, one, -spot], -1).transpose(-1, -2)
    torch.testing.assert_close(wide, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_positional_parameters_of_vit_small(variant):
    def count(**options):
        with torch.device("meta"):
            return sum(p.numel() for p in parapos.create_model("vit_small_patch16", **options).parameters())

    options, want = VARIANTS[variant]
    assert count(encoding="pape", **options) - count(encoding="none") == want


@pytest.mark.parametrize("p", DIMS)
def test_weights_start_uniform(p):
    torch.manual_seed(p)
    encoding = create_encoding("pape", dim=96, heads=16, head_dim=8, pos_dim=p, parabolas=200)
    assert encoding.w_p.shape == (16, 200, p)
    assert encoding.w_a.shape == encoding.w_b.shape == (16, 200, 96)
    for weight, fan_in in ((encoding.w_p, p), (encoding.w_a, 96), (encoding.w_b, 96)):
        bound = fan_in**-0.5
        assert 0.99 * bound < weight.abs().max() <= bound
        levels = torch.linspace(0.05, 0.95, 19)
        found = torch.quantile(weight.detach().flatten()[:300_000], levels)
        assert (found - bound * (2 * levels - 1)).abs().max() < 0.04 * bound  # a uniform law, not only its bounds
    assert not torch.equal(encoding.w_a, encoding.w_b)
    scale = create_encoding("pape_ri", dim=96, heads=4000, head_dim=8, pos_dim=p).w_p
    assert 0.99 * p**-0.5 < scale.abs().max() <= p**-0.5


def test_untold_coefficients_start_as_told_ones():
    encoding = create_encoding("pape", dim=8, heads=64, head_dim=8, pos_dim=2, parabolas=200, context=False)
    for told in (encoding.a, encoding.b):
        assert told.shape == (64, 200)
        assert told.mean().abs() < 0.03
        assert told.var().item() == pytest.approx(1 / 3, rel=0.05)


def test_attention_starts_local():
    """For unit-variance tokens the mean of M is -0.735 m / 3 times the identity in two dimensions."""
    encoding = create_encoding("pape", dim=192, heads=32, head_dim=8, pos_dim=2)
    x, q = torch.randn(1, 64, 192), torch.zeros(1, 32, 64, 8)
    (term,) = encoding(x, q, q, torch.zeros(64, 2))[2]
    want = -0.735 * 50 / 6 * torch.eye(2)
    assert (term.M.mean((0, 1, 2)) - want).abs().max() < 0.4


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "direction"])
def test_the_release_flips_the_linear_term(variant, make, inputs, qk):
    options = VARIANTS[variant][0]
    module = make("pape", 2, dtype=torch.float64, **options)
    official = make("pape", 2, dtype=torch.float64, compat="official", **options)
    official.load_state_dict(module.state_dict())
    x, r = inputs(module)
    ours, theirs = (term_of(m, x, r, qk) for m in (module, official))
    assert torch.equal(theirs.g, -ours.g)
    assert ours.g.abs().max() > 0.1
    assert (ours.M is None and theirs.M is None) or torch.equal(theirs.M, ours.M)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"parabolas": 0}, "parabolas.*0"),
        ({"parabolas": 2.5}, "parabolas.*2.5"),
        ({"distance": False, "direction": False}, "none"),
        ({"distance": False, "activation": False}, "activation"),
        ({"projection": False, "parabolas": 7}, "parabolas"),  # would be ignored: m = p
        ({"init": "papre"}, "init must be one of paper, wide or three numbers.*'papre'"),
        ({"init": (1.0, 0.0)}, "init must be"),
        ({"init": "wide", "projection": False}, "where a part is off, got 'wide'"),
        ({"form": "straight"}, "form must be one of parabolas, direct, got 'straight'"),
        *(
            ({"form": "direct", part: False}, "form='direct' has no ablations.*form='parabolas'")
            for part in ("direction", "context", "activation", "projection")
        ),
        ({"form": "direct", "distance": False}, "form='direct' has no ablations"),
        ({"form": "direct", "compat": "official"}, "compat must be None, got 'official'"),
        ({"form": "direct", "init": (1.0, -2.0, 1.0)}, "second number of init must be 0, got -2.0"),
        ({"floor": 0.1}, "floor must be .*with form='direct' only, got 0.1 with 'parabolas'"),
        ({"form": "direct", "floor": 1.0}, "floor must be at least 0 and below 1"),
        ({"form": "direct", "floor": -0.1}, "floor must be at least 0 and below 1.*-0.1"),
        ({"form": "direct", "parabolas": 1}, "parabolas must be at least 2 with form='direct', got 1.*singular"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises(ValueError, match=word):
        create_encoding("pape", dim=8, heads=2, head_dim=4, pos_dim=2, **options)


@pytest.mark.parametrize("start", ["wide", (2.0, 0.0, 1.0), (0.5, -1.5, 2.0), [0.5, -1.5, 2.0]])
def test_other_starts(start, make, inputs, qk):
    """The same draws with W_p smaller, a constant inside softplus and D in another unit; nothing more to learn."""
    paper, other = (make("pape", 2, dtype=torch.float64, init=init) for init in ("paper", start))
    factor, offset, unit = INITS[start] if isinstance(start, str) else start
    assert (factor, offset, unit) != INITS["paper"]
    for (name, one), (_, two) in zip(paper.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(two, one * factor if name == "encoding.w_p" else one, rtol=1e-7, atol=0)
    x, r = inputs(other)
    encoding = other.encoding
    a = -F.softplus(torch.einsum("hmd,bnd->bhnm", encoding.w_a, x) + offset)
    b = torch.einsum("hmd,bnd->bhnm", encoding.w_b, x)
    want = literal(a, b, encoding.w_p, r / unit)
    torch.testing.assert_close(term_of(other, x, r, qk).scores(torch.float64), want, rtol=1e-12, atol=1e-12)
    want = other(x, r)
    parapos.fold(other)
    torch.testing.assert_close(other(x, r), want, rtol=1e-12, atol=1e-12)


def test_the_papers_start_is_the_default(make):
    assert INITS["paper"] == (1.0, 0.0, 1.0)
    default, named = (make("pape", 2, **options) for options in ({}, {"init": "paper"}))
    for one, two in zip(default.parameters(), named.parameters(), strict=True):
        assert torch.equal(one, two)
    model = parapos.create_model("vit_small_patch16", num_classes=2)
    assert (model.encoder.encoding.offset, model.encoder.encoding.unit) == (0.0, 1.0)
    assert model.encoder.encoding.w_p.abs().max() > 0.7


def test_how_far_attention_sees_at_the_start():
    """On 8 x 8 patches, the share of a query's attention within one patch of it."""
    shares = {}
    for init in INITS:
        torch.manual_seed(0)
        encoding = create_encoding("pape", dim=48, heads=4, head_dim=12, pos_dim=2, parabolas=16, init=init)
        r, x = parapos.grid_positions(8, 8), torch.randn(8, 64, 48)
        q = torch.zeros(8, 4, 64, 12)
        (term,) = encoding(x, q, q, r)[2]
        weights = (term.scores(torch.float32) * encoding.scale).softmax(-1)
        near = (r[:, None] - r).square().sum(-1) <= 1
        shares[init] = (weights * near).sum(-1).mean().item()
    assert shares["wide"] < 0.3 < 0.6 < shares["paper"]


@pytest.mark.parametrize("batch", [1, 3])
def test_forms_of_many_tokens_are_those_of_the_formula(batch):
    """As many tokens as are computed at a time, and more, with gradients."""
    enc = create_encoding("pape", dim=12, heads=3, head_dim=4, pos_dim=2, parabolas=5).double()
    x = torch.randn(batch, 400, 12, dtype=torch.float64, requires_grad=True)
    assert (x.shape[:2].numel() > CACHED_TOKENS) == (batch > 1)
    found = enc._form(x, enc._projection())
    a = -torch.nn.functional.softplus(torch.einsum("hmd,bnd->bhnm", enc.w_a, x))
    want = torch.einsum("bhnm,hmu,hmv->bhnuv", a, enc.w_p, enc.w_p)
    assert torch.allclose(found, want, atol=1e-12)
    weights, inputs = torch.randn_like(want), (x, enc.w_a, enc.w_p)
    grads = (torch.autograd.grad((form * weights).sum(), inputs) for form in (found, want))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-9)
