"""PaPE's direct form against its definition, and its start against the law of the parabolas that it replaces."""

import pytest
import torch
import torch.nn.functional as F

import parapos
from parapos import create_encoding
from parapos.encodings.parabolic import FLOOR, STEEPNESS
from tests.attention.budget import DTYPES, TRAINING, assert_within_budget, make_case

DIMS = [1, 2, 3, 4]


def pair(p, floor=None, **options):
    """The direct form, and the parabolas that it starts from."""
    made = []
    for form in ("direct", "parabolas"):
        torch.manual_seed(0)
        if form == "direct":
            options["floor"] = floor
        else:
            del options["floor"]
        made.append(create_encoding("pape", **{"dim": 26, "heads": 3, "head_dim": 8, **options}, pos_dim=p, form=form))
    return made


def term_of(encoding, x):
    """M and g for tokens (B, N, D)."""
    q = torch.zeros(x.shape[0], encoding.heads, x.shape[1], encoding.head_dim, dtype=x.dtype)
    (term,) = encoding(x, q, q, torch.zeros(x.shape[1], encoding.pos_dim))[2]
    return term


@pytest.mark.parametrize("p", DIMS)
@pytest.mark.parametrize("floor", [0, 0.2, FLOOR])
def test_definition_by_loops(p, floor, make, inputs, qk):
    module = make("pape-direct", p, dtype=torch.float64, **({} if floor == FLOOR else {"floor": floor}))
    encoding = module.encoding
    x, r = inputs(module, batch=1, tokens=4)
    (term,) = encoding(x, *qk(module, x), r)[2]
    scores = term.scores(torch.float64)
    for head in range(encoding.heads):
        for i in range(4):
            lower, start = (torch.zeros(p, p, dtype=torch.float64) for _ in range(2))
            count = 0
            for u in range(p):
                for v in range(u + 1):
                    start[u, v] = encoding.l_0[head, count]
                    lower[u, v] = encoding.l_0[head, count] + encoding.w_l[head, count] @ x[0, i]
                    count += 1
            slope = encoding.w_g[head] @ x[0, i]
            for j in range(4):
                delta = r[0, j] - r[0, i]
                kept = floor / (1 - floor) * (start.T @ delta).square().sum()
                want = -(lower.T @ delta).square().sum() - kept + slope @ delta
                torch.testing.assert_close(scores[0, head, i, j], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", DIMS)
@pytest.mark.parametrize("init", ["paper", "wide", (1.5, 0.0, 2.0)])
@pytest.mark.parametrize("floor", [0, 0.4])
def test_it_starts_from_the_drawn_parabolas(p, init, floor):
    """At x = 0 M is theirs with softplus at its mean, the change with x is theirs to first order, and g is theirs."""
    direct, parabolas = (e.double() for e in pair(p, floor=floor, parabolas=7, init=init))
    unit = direct.unit
    w_p = parabolas.w_p / unit
    mean = 0.733 * w_p.transpose(1, 2) @ w_p
    zero = torch.zeros(1, 1, 26, dtype=torch.float64)
    torch.testing.assert_close(-term_of(direct, zero).M[0, :, 0], mean, rtol=1e-5, atol=1e-6)
    x = torch.randn(1, 1, 26, dtype=torch.float64)
    change = torch.autograd.functional.jvp(
        lambda t: -term_of(direct, t * x).M, torch.zeros(1).double(), torch.ones(1).double()
    )[1]
    want = 0.5 * torch.einsum("hlu,hlv,hl->huv", w_p, w_p, torch.einsum("hld,d->hl", parabolas.w_a, x[0, 0]))
    torch.testing.assert_close(change[0, :, 0], want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(term_of(direct, x).g, term_of(parabolas, x).g, rtol=1e-5, atol=1e-6)
    lower = torch.zeros(3, p, p, dtype=torch.float64)
    lower[:, *torch.tril_indices(p, p)] = direct.l_0
    torch.testing.assert_close(lower, (1 - floor) ** 0.5 * torch.linalg.cholesky(mean), rtol=1e-5, atol=1e-6)


def test_the_mean_of_softplus():
    draws = torch.randn(10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3**-0.5
    assert F.softplus(draws).mean().item() == pytest.approx(STEEPNESS, abs=1e-3)


@pytest.mark.parametrize(("p", "mean", "diagonal", "other"), [(2, 6.11, 0.46, 0.35), (3, 4.07, 0.31, 0.23)])
def test_the_law_of_fifty_parabolas(p, mean, diagonal, other):
    """For unit-variance tokens: the mean of -M, and its deviation over tokens."""
    made = pair(p, parabolas=50, dim=192, heads=256)
    x = torch.randn(1, 200, 192)
    eye = torch.eye(p, dtype=torch.bool)
    for encoding in made:
        form = -term_of(encoding, x).M[0]  # (H, N, p, p)
        spread = form.var(1).mean(0).sqrt()
        assert form.mean((0, 1))[eye].mean().item() == pytest.approx(mean, rel=0.02)
        assert form.mean((0, 1))[~eye].abs().max().item() < 0.02 * mean
        assert spread[eye].mean().item() == pytest.approx(diagonal, abs=0.02)
        assert spread[~eye].mean().item() == pytest.approx(other, abs=0.02)


def test_nearly_aligned_parabolas_start_finite():
    """W_p^T W_p of two parabolas is often close to singular; the start holds all the same."""
    direct, _ = pair(2, parabolas=2, heads=2000)
    x = torch.randn(1, 50, 26)
    term = term_of(direct, x)
    assert term.M.isfinite().all()
    assert (-term.M).diagonal(dim1=-2, dim2=-1).sum(-1).max() < 20
    assert all(p.isfinite().all() for p in direct.parameters())


def test_parameters_of_vit_base():
    """12 layers x 12 heads x (3 + 2) outputs x 768, and L_0."""

    def count(**options):
        with torch.device("meta"):
            return sum(p.numel() for p in parapos.create_model("vit_base_patch16", **options).parameters())

    own = count(encoding="pape", form="direct") - count(encoding="none")
    assert own == 12 * 12 * 5 * 768 + 12 * 12 * 3 == 553_392


@pytest.mark.parametrize("p", DIMS)
def test_every_concave_form_is_reachable(p):
    encoding = pair(p, parabolas=5)[0].double()
    share = 1 - encoding.floor
    root = torch.randn(3, p, p, dtype=torch.float64)
    want = root @ root.transpose(1, 2)
    with torch.no_grad():
        encoding.w_l.zero_()
        encoding.l_0.copy_(torch.linalg.cholesky(want * share)[:, *torch.tril_indices(p, p)])
    torch.testing.assert_close(-term_of(encoding, torch.randn(1, 1, 26).double()).M[0, :, 0], want)


@pytest.mark.parametrize("p", DIMS)
def test_the_floor_holds_for_every_token(p):
    """Whatever the token, -M is at least `floor` times the form at x = 0; without a floor M comes close to singular."""
    zero, x = torch.zeros(1, 1, 26).double(), 30 * torch.randn(1, 5000, 26).double()
    smallest = {}
    for floor in (0, 0.25):
        encoding = pair(p, floor=floor, parabolas=5)[0].double()
        mean, form = (-term_of(encoding, tokens).M for tokens in (zero, x))
        assert torch.linalg.eigvalsh(form - floor * mean).min() > -1e-9
        smallest[floor] = (torch.linalg.eigvalsh(form)[..., 0] / torch.linalg.eigvalsh(mean)[..., 0]).min()
    assert smallest[0] < 1e-3 < 0.25 <= smallest[0.25] + 1e-9


def test_what_it_becomes_is_saved_and_folding_changes_nothing():
    made, other = (pair(2, parabolas=m)[0] for m in (5, 9))
    names = ["l_0", "w_g", "w_l"]
    assert sorted(made.state_dict()) == names
    assert all(p.requires_grad for p in made.parameters())
    x = torch.randn(1, 4, 26)
    other.load_state_dict(made.state_dict())
    assert torch.equal(term_of(other, x).M, term_of(made, x).M)
    parapos.fold(other)
    assert all(p.requires_grad for p in other.parameters())
    assert torch.equal(term_of(other, x).g, term_of(made, x).g)


@pytest.mark.parametrize("p", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", TRAINING)
def test_error_budget(p, dtype, kernel):
    assert_within_budget(make_case("pape", p=p, dtype=dtype, form="direct"), kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_positional_arithmetic_is_not_in_half(dtype):
    """L L^T is formed in float32 from the outputs of the linear layer."""
    encoding = pair(2, floor=0, parabolas=16)[0].to(dtype)
    x = torch.randn(1, 5, 26).to(dtype)
    term = term_of(encoding, x)
    lower = F.linear(x, encoding.w_l.flatten(0, 1)).float().unflatten(-1, (3, 3)).transpose(1, 2)
    a, b, c = (lower + encoding.l_0.float()[:, None]).unbind(-1)
    want = -torch.stack([a * a, a * b, a * b, b * b + c * c], -1).unflatten(-1, (2, 2))
    assert term.M.dtype == term.g.dtype == torch.float32
    torch.testing.assert_close(term.M, want, rtol=1e-6, atol=1e-6)
    assert not torch.equal(term.M, term.M.to(dtype).float())


def test_it_exports_and_compiles():
    torch.manual_seed(0)
    net = parapos.create_model("vit_nano_patch4", encoding="pape", num_classes=3, depth=2, form="direct").eval()
    torch.nn.init.normal_(net.classifier.weight)
    images = torch.randn(2, 3, 16, 16)
    program = torch.export.export(net, (images,))
    torch.testing.assert_close(program.module()(images), net(images))
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), net(images))
