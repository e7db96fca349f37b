"""FlexAttention against the reference, by the error budget, and every call it must refuse.

Compiling takes seconds per graph, so all four terms stand in every call and a case sets the others to zero.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Polynomial, Quadratic, Table, flex, reference

TERMS = ("Quadratic", "Polynomial", "Distance", "Table")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
B, H, P, SIZE = 2, 3, 2, 16
SCALE = 0.3

lacking = flex._cpu_lacks()
compiles = pytest.mark.skipif(lacking is not None, reason=str(lacking))


def make_call(dtype, *, terms=TERMS, tokens=130, batch=B, shift=0.0, spread=0.0, r_dtype=torch.float32):
    """q, k, v, terms and a mask. Sample 0 is all padding; token 1 has no position; query 3 of head 0 sees nothing."""
    g = torch.Generator().manual_seed(tokens)

    def randn(*shape):
        return torch.randn(shape, generator=g)

    shape = (batch, H, tokens)
    q, k, v = (randn(*shape, SIZE).to(dtype) for _ in range(3))
    r = torch.randint(0, 12, (batch, tokens, P), generator=g).to(r_dtype) + shift
    if spread:  # two clusters of fractions, far apart
        r = r / 3 + spread * (torch.arange(tokens) % 2)[None, :, None]
    r[:, 1] = torch.nan
    M = -0.1 * randn(*shape, P, P).abs()
    bias = randn(1, H, tokens, tokens)
    bias[bias > 1.5] = -torch.inf
    bias[:, 0, 3] = -torch.inf
    on = {name: float(name in terms) for name in TERMS}
    made = [
        Quadratic(M * on["Quadratic"], randn(*shape, P) * on["Quadratic"], r),
        Polynomial(0.1 * randn(*shape, 5) * on["Polynomial"], r),
        Distance(torch.rand(H, generator=g) * on["Distance"], r),
        Table(bias if "Table" in terms else torch.zeros_like(bias), weight=1.5),
    ]
    mask = torch.rand(batch, tokens, generator=g) > 0.2
    mask[0] = False
    return q, k, v, made, mask


def run(call):
    assert flex.refuse(*call, needs_grad=False) is None
    with torch.no_grad():
        return flex.attention(*call, SCALE)


def assert_within_budget(out: Tensor, call) -> None:
    """The criterion of budget.py for outputs: twice the reference's own error, or one unit in the last place."""
    q, k, v, *rest = call
    theirs = reference.attention(q, k, v, *rest, SCALE)[0].double()
    truth = reference.attention(q.double(), k.double(), v.double(), *rest, SCALE)[0]
    assert out.dtype == q.dtype
    assert out.isfinite().all()
    ulp = torch.finfo(q.dtype).eps * truth.abs().max()
    mine, other = (out.double() - truth).abs(), (theirs - truth).abs()
    assert mine.square().mean().sqrt() <= 2 * other.square().mean().sqrt() + ulp
    assert mine.max() <= 4 * other.max() + ulp


@compiles
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_term(dtype):
    for terms in (TERMS, *((name,) for name in TERMS), ()):
        call = make_call(dtype, terms=terms)
        out = run(call)
        assert_within_budget(out, call)
        assert (out[0] == 0).all()
        assert (out[1, 0, 3] == 0).all() == ("Table" in terms)


@compiles
def test_padding_may_hold_anything_and_positions_may_be_far():
    call = make_call(torch.float32)
    want = run(call)
    _, k, v, _, mask = call
    for x in (k, v):
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    assert torch.equal(run(call), want)
    far = make_call(torch.float32, shift=1e9, r_dtype=torch.float64)
    assert torch.equal(run(far), want)  # integer grids stay exact, wherever they are
    wide = make_call(torch.float32, terms=("Quadratic", "Distance"), spread=1e6, r_dtype=torch.float64)
    assert_within_budget(run(wide), wide)


@compiles
def test_one_term_alone_then_another_with_more_tokens():
    """What encodings ask for, one call after the other in one process."""
    for tokens, kind in ((17, Distance), (130, Quadratic)):
        q, r = torch.randn(1, H, tokens, SIZE), torch.rand(1, tokens, P)
        m, g = -torch.rand(1, H, tokens, P, P), torch.randn(1, H, tokens, P)
        term = Distance(torch.rand(H), r) if kind is Distance else Quadratic(m + m.mT, g, r)
        with torch.no_grad():
            found = parapos.attend(q, q, q, [term], kernel="flex")
            assert torch.allclose(found, parapos.attend(q, q, q, [term], kernel="reference"), atol=1e-5)


@compiles
def test_one_sample_of_strided_heads_without_mask():
    """A multiple of the identity as M, values of another size, q, k and v as views of one projection."""
    qkv = torch.randn(1, 20, H * (2 * SIZE + 8))
    q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in qkv.split([H * SIZE, H * SIZE, H * 8], dim=-1))
    call = (q, k, v, [Quadratic(-torch.rand(1, H, 20), None, torch.rand(1, 20, P))], None)
    assert_within_budget(run(call), call)


def test_nothing_to_do():
    q = torch.zeros(0, H, 5, SIZE)
    assert flex.attention(q, q, q[..., :4], [], None, SCALE).shape == (0, H, 5, 4)


def shaped(device: str, size: int, dtype=torch.float16):
    """What `refuse` looks at of a tensor, for devices that are not here."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 4, size), requires_grad=True)


def test_refusals():
    x = torch.zeros(1, 1, 4, SIZE)
    assert flex.refuse(x.double(), x.double(), x.double(), [], None, False) == "FlexAttention has no float64"
    assert "no backward pass on the CPU" in flex.refuse(x, x, x, [], None, True)
    assert "not for meta" in flex.refuse(*[x.to("meta")] * 3, [], None, False)
    small, large = shaped("cuda", 8), shaped("cuda", 64)
    assert "16 at least" in flex.refuse(small, small, large, [], None, False)
    assert "16 at least" in flex.refuse(large, large, small, [], None, False)
    assert flex.refuse(large, large, large, [], None, True) is None
    found = []
    torch.func.vmap(lambda y: (found.append(flex.refuse(x, x, x, [], None, False)), y)[1])(torch.zeros(2))
    assert "function transform" in found[0]


def test_gradients_of_terms_are_refused():
    x, r = shaped("cuda", 64), torch.zeros(1, 4, P)
    fixed, learned = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert flex.refuse(x, x, x, [Distance(fixed, r)], None, True) is None
    assert "atomic additions" in flex.refuse(x, x, x, [Distance(learned, r)], None, True)
    assert flex.refuse(x, x, x, [Distance(learned, r)], None, False) is None
    moved = Distance(fixed, r.clone().requires_grad_())
    assert "positions require a gradient" in flex.refuse(x, x, x, [moved], None, True)


def test_a_machine_that_cannot_compile_says_so(monkeypatch):
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in flex._cpu_lacks.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(flex.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "needs AVX2 or AVX512, got DEFAULT" in flex._cpu_lacks.__wrapped__()
