"""One mask rule everywhere: True may be seen; a query that sees no key gives zeros and has zero gradients.

A mask of two dimensions is key padding (B, N), one of four (B or 1, H or 1, n, N) says what each query may see.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import parapos

from .budget import FORWARD, TRAINING, Case, full, make_case

kernels = pytest.mark.parametrize("kernel", ["reference", *TRAINING])
encodings = pytest.mark.parametrize("name", parapos.list_encodings())
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])


def padded(name: str, dtype: torch.dtype = torch.float32) -> Case:
    mask = torch.ones(3, 30, dtype=torch.bool)
    mask[0, 20:] = False
    mask[1, :7] = False
    r = parapos.grid_positions(5, 6).expand(3, -1, -1).clone()
    return make_case(name, r=r, batch=3, mask=mask, dtype=dtype)


def blind(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """A mask (B, H, n, N) that hides keys 4 and 11 from all, and all keys from queries 2 of sample 0 and head 1."""
    case = padded(name, dtype)
    g = torch.Generator().manual_seed(5)
    case.mask = torch.rand(3, 2, 30, 30, generator=g) < 0.7
    case.mask[..., [4, 11]] = False
    case.mask[0, 1, 2] = False
    return case


def empty(case: Case) -> Tensor:
    """(B, H, n): queries that see no key."""
    seen = case.mask.expand(3, 2, 30, 30)
    q = torch.zeros(3, 2, 30, 16)
    for term in case.encoding(torch.zeros(3, 30, 24, dtype=case.dtype), q, q, case.r)[2]:
        seen = seen & (term.scores(torch.float32) > -torch.inf)
    return ~seen.any(-1)


@kernels
@encodings
@DTYPES
@pytest.mark.parametrize("fill", [torch.nan, full(7.0), full(-1e4), full(torch.inf)])
def test_padding_never_matters(name: str, kernel: str, dtype: torch.dtype, fill: float) -> None:
    """Whatever stands in padded keys and values, NaN included, valid outputs are equal to the last bit."""
    case = padded(name, dtype)
    before = case.run(kernel, dtype)
    for key in "kv":
        case.tensors[key][~case.mask[:, None, :].expand(-1, 2, -1)] = fill
    after = case.run(kernel, dtype)
    assert torch.equal(before["out"], after["out"])
    for key in ("dq", "dk", "dv"):
        rows = case.mask[:, None, :, None].expand_as(before[key])
        assert torch.equal(before[key][rows], after[key][rows]), key


@kernels
@encodings
@DTYPES
@pytest.mark.parametrize("fill", [torch.nan, full(7.0), full(torch.inf)])
def test_keys_that_nobody_sees_never_matter(name: str, kernel: str, dtype: torch.dtype, fill: float) -> None:
    case = blind(name, dtype)
    before = case.run(kernel, dtype)
    for key in "kv":
        case.tensors[key][:, :, [4, 11]] = fill
    after = case.run(kernel, dtype)
    for key in set(before) - {"dfrequencies"}:  # rope_mixed turns keys before they are hidden, and 0 * NaN is NaN
        assert torch.isfinite(after[key]).all(), key
        assert torch.equal(before[key], after[key]), key


@kernels
@encodings
def test_padding_moves_nothing(name: str, kernel: str) -> None:
    """Positions of padding do not move the centre, so far-away padding costs no digits."""
    case = padded(name)
    before = case.run(kernel, torch.float32)["out"]
    case.r[~case.mask] += 1000.0
    assert torch.equal(before, case.run(kernel, torch.float32)["out"])


@kernels
@encodings
def test_alone_equals_padded(name: str, kernel: str) -> None:
    case = padded(name)
    together = case.run(kernel, torch.float64)["out"]
    for b in range(3):
        keep = case.mask[b]
        alone = Case(
            case.encoding,
            {key: t[b : b + 1, ..., keep, :] for key, t in case.tensors.items()},
            case.r[b][keep],
            None,
            torch.float64,
        ).run(kernel, torch.float64)["out"]
        torch.testing.assert_close(together[b][:, keep], alone[0], rtol=1e-9, atol=1e-11)


@kernels
@encodings
@DTYPES
def test_empty_samples(name: str, kernel: str, dtype: torch.dtype) -> None:
    case = padded(name, dtype)
    case.mask[2] = False
    q, k, v = (case.tensors[key].clone().requires_grad_() for key in "qkv")
    out = case.attend(kernel, case.tensors["x"], q, k, v)
    assert (out[2] == 0).all()
    assert (out[:2] != 0).any()
    for t in torch.autograd.grad(out.float().square().sum(), (q, k, v)):
        assert torch.isfinite(t).all()
        assert (t[2] == 0).all()
    for t in torch.autograd.grad(case.attend(kernel, case.tensors["x"], q, k, v).float().sum(), (q, k, v)):
        assert (t[2] == 0).all()


@kernels
@encodings
@DTYPES
def test_empty_rows(name: str, kernel: str, dtype: torch.dtype) -> None:
    """A row of a mask (B, H, n, N) without any key: zeros, and no gradient comes from it, whatever it is asked."""
    case = blind(name, dtype)
    leaves = {key: t.clone().requires_grad_() for key, t in case.tensors.items()}
    out = case.attend(kernel, **leaves)
    assert (out[0, 1, 2] == 0).all()
    assert torch.equal(out.abs().sum(-1) == 0, empty(case))
    wanted = [*leaves.values(), *case.encoding.parameters()]
    for t in torch.autograd.grad(1e3 * out[0, 1, 2].float().sum(), wanted, allow_unused=True, retain_graph=True):
        assert t is None or (t == 0).all()
    dq = torch.autograd.grad(out.float().square().sum(), leaves["q"])[0]
    assert torch.isfinite(dq).all()
    assert (dq[empty(case)] == 0).all()
    assert (dq.abs().sum(-1) > 0).sum() >= 0.8 * dq[..., 0].numel()


@kernels
def test_row_hidden_by_a_table(kernel: str) -> None:
    """A row that its own bias hides from every key is empty too, and so is one that bias and mask hide together."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    bias = torch.zeros(1, 1, 5, 5)
    bias[..., 3, :] = -torch.inf
    bias[..., 1, 1:] = -torch.inf
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 1, 0] = False
    for given, empty in ((None, [3]), (mask, [1, 3])):
        out = parapos.attend(q, q, q, [parapos.Table(bias)], given, kernel=kernel)
        assert (out.abs().sum(-1) == 0)[0, 0].nonzero().flatten().tolist() == empty
        (gradient,) = torch.autograd.grad(out[..., empty, :].sum(), q)
        assert (gradient == 0).all()


@pytest.mark.parametrize("kernel", ["reference", *[full(k) if k == "flex" else k for k in FORWARD]])
@encodings
def test_a_mask_of_four_dimensions_is_padding_when_it_says_so(name: str, kernel: str) -> None:
    """Shared by heads or by samples, expanded or not: the same attention."""
    case = padded(name)
    with torch.no_grad():
        want = case.attend(kernel, **case.tensors)
        real = case.mask[:, None, :, None]
        case.mask = case.mask[:, None, None, :].expand(3, 1, 30, 30)
        for mask in (case.mask, case.mask.expand(3, 2, 30, 30).contiguous()):
            case.mask = mask
            torch.testing.assert_close(case.attend(kernel, **case.tensors) * real, want * real, rtol=1e-5, atol=1e-5)


@kernels
def test_a_square_mask_is_told_apart_by_its_dimensions(kernel: str) -> None:
    """As many samples as tokens: (N, N) is padding of N samples, (1, 1, N, N) is causal."""
    n = 5
    q, k, v = torch.randn(3, n, 2, n, 8).unbind()
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    term = [parapos.Distance(torch.ones(2), parapos.grid_positions(1, n)[None])]
    dense = (q @ k.mT) * 8**-0.5 + term[0].scores(torch.float32)
    for mask, shape in ((causal, (n, 1, 1, n)), (causal[None, None], (1, 1, n, n))):
        want = dense.masked_fill(~causal.view(shape), -torch.inf).softmax(-1) @ v
        found = parapos.attend(q, k, v, term, mask, kernel=kernel)
        real = causal[:, None, :, None] if mask.ndim == 2 else torch.ones(())  # padded queries give anything
        torch.testing.assert_close(found * real, want * real)


def _mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (_mask(4, 6), "torch.bool (4, 6)"),
        (_mask(2, 4), "torch.bool (2, 4)"),  # queries, not keys
        (_mask(1, 6), "torch.bool (1, 6)"),
        (_mask(6), "torch.bool (6,)"),
        (_mask(2, 4, 6), "torch.bool (2, 4, 6)"),
        (_mask(2, 3, 6, 4), "torch.bool (2, 3, 6, 4)"),
        (_mask(2, 2, 4, 6), "torch.bool (2, 2, 4, 6)"),
        (_mask(2, 3, 1, 6), "torch.bool (2, 3, 1, 6)"),
        (_mask(1, 2, 3, 4, 6), "torch.bool (1, 2, 3, 4, 6)"),
        (_mask(2, 6, dtype=torch.float32), "torch.float32 (2, 6)"),
        (_mask(2, 3, 4, 6, dtype=torch.float32), "torch.float32 (2, 3, 4, 6)"),
        (_mask(2, 6, dtype=torch.uint8), "torch.uint8 (2, 6)"),
    ],
)
def test_other_masks_are_refused(mask: Tensor, got: str) -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    want = "mask must be boolean, (2, 6) with True for real keys, or (2 or 1, 3 or 1, 4, 6) with True where"
    with pytest.raises(ValueError, match=re.escape(want) + ".*" + re.escape(got)):
        parapos.attend(q, k, k, (), mask)
    with pytest.raises(ValueError, match=re.escape(got)):
        parapos.explain(q, k, k, (), mask)


@pytest.mark.parametrize("mask", [_mask(2, 6), _mask(2, 3, 4, 6), _mask(1, 1, 4, 6), _mask(1, 3, 4, 6)])
@kernels
def test_masks_that_hide_nothing(mask: Tensor, kernel: str) -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    found = parapos.attend(q, k, k, (), mask, kernel=kernel)
    torch.testing.assert_close(found, parapos.attend(q, k, k, kernel=kernel))


def test_released_alibi_ignores_padding() -> None:
    case = padded("alibi")
    official = parapos.create_encoding("alibi", dim=24, heads=2, head_dim=16, pos_dim=2, compat="official")
    q, k, v, x = (case.tensors[key] for key in "qkvx")
    masked, unmasked = (
        parapos.attend(*encoding(x, q, k, case.r)[:2], v, encoding(x, q, k, case.r)[2], case.mask)
        for encoding in (case.encoding, official)
    )
    plain = parapos.attend(q, k, v, case.encoding(x, q, k, case.r)[2], None)
    assert torch.equal(unmasked, plain)
    assert not torch.allclose(masked[0], unmasked[0])


@pytest.mark.parametrize("kind", ["padding", "of each query", "of each query, with a table"])
def test_weights_of_queries_that_see_nothing(kind: str) -> None:
    """Zeros where a key is hidden, rows that sum to one, or to zero if all keys are hidden; the output follows."""
    q, k, v = torch.randn(3, 2, 3, 6, 8).unbind()
    mask = torch.rand(2, 6) < 0.7 if kind == "padding" else torch.rand(2, 3, 6, 6) < 0.7
    mask[1] = False
    bias = torch.zeros(1, 1, 6, 6)
    bias[..., 2, :] = -torch.inf
    out, weights = parapos.attend(q, k, v, [parapos.Table(bias)] if "table" in kind else [], mask, return_weights=True)
    seen = (mask[:, None, None] if kind == "padding" else mask).expand_as(weights)
    seen = seen & (bias == 0) if "table" in kind else seen
    assert ((weights > 0) == seen).all()
    torch.testing.assert_close(weights.sum(-1), seen.any(-1).float())
    torch.testing.assert_close(out, weights @ v)
