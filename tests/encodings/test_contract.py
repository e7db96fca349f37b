"""What every registered encoding must do, whatever it is. The registry is the test matrix."""

import io
from dataclasses import fields

import pytest
import torch

import parapos
from parapos import Positions, create_encoding

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PLAIN = dict(dim=26, heads=12, head_dim=8, pos_dim=2)


def tensors(terms):
    """The tensors of score terms, by name."""
    found = {f.name: getattr(term, f.name) for term in terms for f in fields(term)}
    return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}


def test_shapes(case, make, inputs, qk):
    module = make(*case)
    x, r = inputs(module, dtype=torch.float32)
    q, k = qk(module, x)
    for positions in (r, r[0], r[:1], Positions.of(r), module.encoding.prepare(r)):
        q2, k2, terms = module.encoding(x, q, k, positions)
        assert q2.shape == k2.shape
        assert q2.shape[:3] == q.shape[:3]
        assert q2.shape[3] >= q.shape[3]
        assert isinstance(terms, tuple)
        out = parapos.attend(q2, k2, torch.ones(2, module.heads, 7, 5), terms=terms, scale=module.encoding.scale)
        torch.testing.assert_close(out, torch.ones_like(out))
        assert module.encoding.add(x, positions).shape == x.shape
    assert module.encoding.scale == 8**-0.5


@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_every_parameter_gets_a_gradient(case, kernel, make, inputs, run):
    module = make(*case, kernel=kernel)
    x, r = inputs(module, dtype=torch.float32)
    y = run(module, x, r)
    (y * torch.randn_like(y)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.ne(0).any(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_out_is_dtype_in(case, dtype, make, inputs, run, qk):
    module = make(*case, dtype=dtype, kernel="auto")
    x, r = inputs(module, dtype=dtype)
    r = r.float()
    assert all(p.dtype == dtype for p in module.parameters())
    assert module.encoding.add(x, r).dtype == dtype
    q, k, terms = module.encoding(x, *qk(module, x), r)
    assert q.dtype == k.dtype == dtype
    for name, tensor in tensors(terms).items():
        assert tensor.dtype in (torch.float32, torch.promote_types(dtype, torch.float32)), name
    y = run(module, x, r)
    assert y.dtype == dtype
    assert y.isfinite().all()


def test_positional_tensors_stay_float32_under_autocast(case, make, inputs, run, qk):
    module = make(*case, kernel="auto")
    x, r = inputs(module, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        q, k = qk(module, x)
        assert q.dtype == torch.bfloat16
        q2, k2, terms = module.encoding(x, q, k, r)
        y = run(module, x, r)
    assert q2.dtype == k2.dtype == y.dtype == torch.bfloat16
    for name, tensor in tensors(terms).items():
        assert tensor.dtype == torch.float32, name
    form = tensors(terms).get("M")
    assert form is None or form.bfloat16().float().ne(form).any()  # not rounded on the way either
    exact = run(module, x, r)
    assert (y - exact).abs().max() < 0.1 * exact.abs().max()


def test_the_error_for_an_unknown_option_helps(name):
    with pytest.raises(TypeError, match=rf"{name}.*'kompat'.*did you mean 'compat'"):
        create_encoding(name, **PLAIN, kompat="official")
    with pytest.raises(TypeError, match=r"'parabola'.*did you mean 'parabolas'"):
        create_encoding("pape", **PLAIN, parabola=3)
    with pytest.raises(TypeError, match=r"'zzz', only") as error:
        create_encoding(name, **PLAIN, zzz=3)
    assert "did you mean" not in str(error.value)


def test_the_error_for_an_unknown_name_helps():
    with pytest.raises(ValueError, match=r"'papr'.*pape_ri.*did you mean 'pape'\?"):
        create_encoding("papr", **PLAIN)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"dim": 0}, "dim"),
        ({"heads": -1}, "heads"),
        ({"head_dim": 8.0}, "head_dim"),
        ({"pos_dim": 0}, "pos_dim"),
        ({"layer": 3, "depth": 3}, r"layer.*0\.\.2.*3"),
        ({"compat": "oficial"}, "compat.*oficial"),
    ],
)
def test_bad_common_options(name, bad, word):
    with pytest.raises(ValueError, match=word):
        create_encoding(name, **{**PLAIN, **bad})


@pytest.mark.parametrize("compat", [None, "official"])
def test_common_options_are_kept(name, compat):
    encoding = create_encoding(name, **PLAIN, layer=1, depth=3, compat=compat)
    assert (encoding.layer, encoding.depth, encoding.compat) == (1, 3, compat)
    assert isinstance(encoding.quirks, str)
    assert "dim=26, heads=12, head_dim=8, pos_dim=2" in repr(encoding)
    assert ("official" in repr(encoding)) == (compat is not None)


@pytest.mark.parametrize(
    ("which", "shape"),
    [
        ("x", (2, 6, 26)),
        ("x", (2, 7, 25)),
        ("x", (1, 7, 26)),
        ("q", (2, 11, 7, 8)),
        ("q", (2, 12, 7, 9)),
        ("q", (2, 7, 96)),
        ("k", (2, 12, 6, 8)),
        ("r", (6, 2)),
        ("r", (3, 7, 2)),
        ("r", (7, 3)),
        ("r", (7,)),
    ],
)
def test_wrong_shapes_are_refused(name, which, shape):
    encoding = create_encoding(name, **PLAIN)
    tensors = dict(x=(2, 7, 26), q=(2, 12, 7, 8), k=(2, 12, 7, 8), r=(7, 2))
    tensors[which] = shape
    with pytest.raises(ValueError, match=str(shape).strip("(),")):
        encoding(*(torch.randn(s) for s in tensors.values()))


def test_checked_positions_of_another_dimension_are_refused(name):
    encoding = create_encoding(name, **PLAIN)
    q = torch.randn(1, 12, 7, 8)
    with pytest.raises(ValueError, match="positions must be"):
        encoding(torch.randn(1, 7, 26), q, q, Positions.of(torch.randn(7, 3)))


def test_state_dict_round_trip(case, make, inputs, run):
    module, other = make(*case, seed=0), make(*case, seed=1)
    x, r = inputs(module, dtype=torch.float32)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(run(other, x, r), run(module, x, r))


def test_the_untrained_scale_of_pape_ri_survives(make):
    module, other = make("pape_ri", 2, seed=0), make("pape_ri", 2, seed=1)
    assert "w_p" in module.encoding.state_dict()
    assert "w_p" not in dict(module.encoding.named_parameters())
    assert not torch.equal(other.encoding.w_p, module.encoding.w_p)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.encoding.w_p, module.encoding.w_p)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_tokens_without_a_position(case, kernel, make, inputs, run, qk):
    module = make(*case, kernel=kernel)
    x, r = inputs(module, dtype=torch.float32)
    r[0, 0] = r[1, 3] = r[1, 4] = torch.nan
    x.requires_grad_()
    y = run(module, x, r)
    assert y.isfinite().all()
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    q, k = qk(module, x)
    q2, k2, terms = module.encoding(x, q, k, r)
    for term in terms:  # neither their queries nor their keys are touched
        scores = term.scores(torch.float32)
        assert scores[0, :, 0].eq(0).all()
        assert scores[1, :, :, 3].eq(0).all()
    assert torch.equal(q2[0, :, 0, :4], q[0, :, 0, :4])
    assert torch.equal(k2[1, :, 3, :4], k[1, :, 3, :4])
    alone = r.new_full((2, 7, r.shape[-1]), torch.nan)
    assert torch.equal(module.encoding.add(x, alone), x)
    # Without any position, all encodings are none.
    plain = parapos.attend(q, k, q, kernel="reference")
    q2, k2, terms = module.encoding(x, q, k, alone)
    torch.testing.assert_close(parapos.attend(q2, k2, q, terms, scale=module.encoding.scale, kernel="reference"), plain)


def test_registered_encodings_state_their_claims(name):
    claims = parapos.encodings.ENCODINGS[name].claims
    assert all(isinstance(getattr(claims, f.name), bool) for f in fields(claims))
