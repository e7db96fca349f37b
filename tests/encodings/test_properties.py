"""Encodings are held to their claims: what `Claims` says is tested, and where possible that the rest is false.

All in float64 on the reference kernel, so that nothing but mathematics is measured.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import parapos
from parapos import create_encoding, grid_positions
from parapos.encodings import ENCODINGS

few = settings(max_examples=8)  # of each encoding and dimension
seeds = st.integers(0, 2**31)
CLOSE = dict(rtol=1e-9, atol=1e-9)


def rotation(p, g):
    """A random rotation of R^p."""
    turn, _ = torch.linalg.qr(torch.randn(p, p, generator=g, dtype=torch.float64))
    turn[:, 0] *= torch.linalg.det(turn).sign()
    return turn


@few
@given(seed=seeds, reach=st.floats(0.1, 100))
def test_translation(case, make, inputs, run, seed, reach):
    module = make(*case, dtype=torch.float64, seed=seed)
    x, r = inputs(module, seed=seed)
    g = torch.Generator().manual_seed(seed)
    shift = (2 * torch.rand(2, 1, r.shape[-1], generator=g, dtype=torch.float64) - 1) * reach
    still, moved = run(module, x, r), run(module, x, r + shift)
    if module.encoding.claims.translation:
        torch.testing.assert_close(moved, still, **CLOSE)
    else:
        assert (moved - still).abs().max() > 1e-6


@few
@given(seed=seeds)
def test_rotation(case, make, inputs, run, seed):
    module = make(*case, dtype=torch.float64, seed=seed)
    x, r = inputs(module, seed=seed)
    p = r.shape[-1]
    turned = run(module, x, r @ rotation(p, torch.Generator().manual_seed(seed)))
    if module.encoding.claims.rotation or p == 1:
        torch.testing.assert_close(turned, run(module, x, r), **CLOSE)


def test_rotation_is_noticed_by_the_rest(case, make, inputs, run):
    module = make(*case, dtype=torch.float64)
    x, r = inputs(module)
    if not module.encoding.claims.rotation and r.shape[-1] > 1:
        turn = rotation(r.shape[-1], torch.Generator().manual_seed(3))
        assert (run(module, x, r @ turn) - run(module, x, r)).abs().max() > 1e-3


@few
@given(seed=seeds)
def test_permuting_tokens_permutes_the_output(case, make, inputs, run, seed):
    module = make(*case, dtype=torch.float64)
    x, r = inputs(module, seed=seed)
    r[1, 2] = torch.nan
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    y = run(module, x[:, order], r[:, order], mask[:, order])
    torch.testing.assert_close(y, run(module, x, r, mask)[:, order], **CLOSE)


def test_samples_do_not_meet(case, make, inputs, run):
    module = make(*case, dtype=torch.float64)
    x, r = inputs(module, batch=3)
    y = run(module, x, r)
    for b in range(3):
        torch.testing.assert_close(run(module, x[b : b + 1], r[b : b + 1]), y[b : b + 1], **CLOSE)
    torch.testing.assert_close(run(module, x, r[0]), run(module, x, r[:1].expand(3, -1, -1)), **CLOSE)


@few
@given(seed=seeds)
def test_decay(case, make, inputs, scores, seed):
    """Along a ray the positional score falls in the end, or, without the claim, rotations keep it bounded."""
    module = make(*case, dtype=torch.float64, seed=seed)
    encoding, p = module.encoding, case[1]
    g = torch.Generator().manual_seed(seed)
    ray = torch.nn.functional.normalize(torch.randn(p, generator=g, dtype=torch.float64), dim=0)
    x = torch.randn(1, 7, encoding.dim, generator=g, dtype=torch.float64)
    far = torch.tensor([0.0] + [1e6 * 2**n for n in range(6)], dtype=torch.float64)
    r = 5 + far[:, None] * ray
    q = torch.zeros(1, encoding.heads, 7, 8, dtype=torch.float64)
    s = scores(encoding, x, q, q, r)[0, :, 0, 1:]  # (H, 6): far keys as the first token scores them
    if encoding.claims.decay:
        seen = s[s[:, 0].isfinite()]
        assert len(seen)
        assert (s.isfinite() == s[:, :1].isfinite()).all()
        assert (seen.diff(dim=-1) < 0).all()
        assert (seen < 0).all()
    elif not encoding(x, q, q, r)[2]:
        assert s.eq(0).all()


@few
@given(seed=seeds, size=st.floats(0.01, 30))
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("which", ["pape", "pape_ri"])
def test_parabolas_are_concave_at_any_weights(which, p, make, inputs, qk, seed, size):
    module = make(which, p, dtype=torch.float64, seed=seed)
    x, r = inputs(module, seed=seed)
    with torch.no_grad():
        module.encoding.w_a.mul_(size)
        module.encoding.w_p.mul_(size)
    form = module.encoding(x, *qk(module, x), r)[2][0].M
    if which == "pape_ri":
        assert (form < 0).all()
    else:
        torch.testing.assert_close(form, form.transpose(-1, -2), rtol=1e-14, atol=1e-14 * form.abs().max().item())
        assert torch.linalg.eigvalsh(form).max() <= 1e-12 * form.abs().max()
        assert form.diagonal(dim1=-2, dim2=-1).lt(0).all()


def test_direction(case, make, scores, qk):
    """Equal tokens on a sphere around the query: only direction can tell them apart."""
    module = make(*case, dtype=torch.float64)
    p = case[1]
    around = torch.nn.functional.normalize(torch.randn(8, p, dtype=torch.float64), dim=-1)
    around = torch.cat([around, -around])
    r = 4 + torch.cat([torch.zeros(1, p), 2 * around]).double()
    x = torch.randn(1, 1, module.encoding.dim, dtype=torch.float64).expand(1, 17, -1)
    x = module.encoding.add(x, r)
    s = scores(module.encoding, x, *qk(module, x), r)[0, :, 0, 1:].clamp(min=-1e3)
    spread = s.amax(-1) - s.amin(-1)  # (H,)
    if module.encoding.claims.direction:
        assert spread.max() > 1e-2
    else:
        assert spread.max() < 1e-12


def test_context(case, make, inputs, scores, qk):
    """With the same queries and keys, the tokens matter exactly where an encoding reads them."""
    module = make(*case, dtype=torch.float64)
    x, r = inputs(module)
    q, k = qk(module, x)
    one, other = (scores(module.encoding, tokens, q, k, r) for tokens in (x, torch.randn_like(x)))
    if module.encoding.claims.context:
        assert (one - other).abs().amax((0, 2, 3)).min() > 1e-2  # in every head
    else:
        assert torch.equal(one, other)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("which", ["pape", "pape_ri"])
@pytest.mark.parametrize("kernel", ["reference", "fused"])
def test_vanishing_parabolas_leave_plain_attention(which, kernel, p, make, inputs):
    module = make(which, p, dtype=torch.float64, kernel=kernel)
    plain = make("none", p, dtype=torch.float64, kernel=kernel)
    plain.load_state_dict({k: v for k, v in module.state_dict().items() if not k.startswith("encoding.")})
    x, r = inputs(module)
    x[..., 0] = 1
    assert (module(x, r) - plain(x, r)).abs().max() > 1e-3
    encoding = module.encoding
    with torch.no_grad():
        encoding.w_a.zero_()
        encoding.w_a[..., 0] = -1000  # softplus is 0 there
        if which == "pape":
            encoding.w_b.zero_()
    torch.testing.assert_close(module(x, r), plain(x, r), rtol=1e-14, atol=1e-14)


VECTORS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
VECTORS |= {f"{v}-{h}": (VECTORS[h][0], VECTORS[v][1]) for v in ("up", "down") for h in ("left", "right")}
VECTORS["all"] = (0, 0)


@pytest.mark.parametrize("heads", [12, 16])
@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_turning_the_grid_permutes_the_heads_of_lookhere(heads, quarters):
    encoding = create_encoding("lookhere", dim=8, heads=heads, head_dim=8, pos_dim=2)
    names = {vector: name for name, vector in VECTORS.items()}

    def turned(x, y):
        for _ in range(quarters):
            x, y = -y, x
        return x, y

    partner = [
        encoding.directions.index((names[turned(*VECTORS[field])], slope)) for field, slope in encoding.directions
    ]
    assert sorted(partner) == list(range(heads))
    r = grid_positions(4, 5)
    around = torch.stack(turned(*r.unbind(-1)), dim=-1)
    tables = [encoding.bias(encoding.prepare(positions)) for positions in (r, around)]
    assert torch.equal(tables[1][:, partner], tables[0])
    assert not torch.equal(tables[1], tables[0])


def test_only_the_absolute_encoding_gives_up_translation():
    assert [name for name, cls in ENCODINGS.items() if not cls.claims.translation] == ["sincos"]
    assert [name for name, cls in ENCODINGS.items() if cls.claims.rotation] == ["pape_ri", "alibi", "none"]
    assert set(ENCODINGS) == set(parapos.list_encodings())
