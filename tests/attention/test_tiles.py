"""Attention over tiles: that it is attention, that it visits what it needs, and when it is chosen.

What may be skipped is tested in test_sparse.py, and so are the calls that are hard in one way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Polynomial, Quadratic, attend, explain, reference, sparse, tiles, tiling
from parapos.attention.head import needed as needed_by
from parapos.attention.kernels import Call
from parapos.positions import Positions

from .criterion import DTYPES
from .test_sparse import TOLERANCE, heads, make


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """And as cheap as dense attention: so few tokens need most of their tiles."""
    with patch.object(tiling, "TILE", 8), patch.multiple(sparse, LEAST=1, QUERY_COST=0.0, PAIR_COST=1.0):
        yield


def leaves_of(call: Call, dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """The call in another type, with leaves that want gradients."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (call.q, call.k, call.v))
    leaves, terms, wide = [q, k, v], [], torch.promote_types(dtype, torch.float32)
    for term in call.terms:
        learned = {name: x for name, x in term.tensors().items() if name in term.learned}
        own = {name: x.detach().to(wide).requires_grad_() for name, x in learned.items()}
        leaves += own.values()
        terms.append(replace(term, **own))  # type: ignore[type-var]
    return replace(call, q=q, k=k, v=v, terms=tuple(terms)), leaves


def results(call: Call, dtype: torch.dtype, run: Callable[[Call], Tensor]) -> list[Tensor]:
    mine, leaves = leaves_of(call, dtype)
    out = run(mine)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]


def by_tiles(call: Call) -> Tensor:
    """By tiles, whatever dense attention would cost."""
    with patch.object(tiles, "is_worth_it", return_value=True):
        out = tiles.attention(call)
    assert out is not None
    return out


def by_reference(call: Call) -> Tensor:
    return reference.attention(call)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["local", "distance", "both", "unplaced", "padded", "masked", "cross", "points"])
def test_outputs_and_gradients_are_those_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    """An error of at most 2x, gradients 3x, that of the reference, or in float32 of 5e-4 as columns may have."""
    call = replace(make(kind, 2, 3, w=12), tolerance=sparse.DEFAULTS[dtype])
    call = replace(call, q=call.q.to(dtype).float(), k=call.k.to(dtype).float(), v=call.v.to(dtype).float())
    found = results(call, dtype, by_tiles)
    theirs, exact = results(call, dtype, by_reference), results(call, torch.float64, by_reference)
    loose = 2e-5 if dtype == torch.float32 else 1e-12
    for i, (x, y, z) in enumerate(zip(found, theirs, exact, strict=True)):
        norm = float(z.norm())
        times = (3 if i else 2) * (2 if z.numel() < 4 else 1)  # the error of one number is luck
        allowed = max(times * float((y.double() - z).norm()), loose * norm)
        assert float((x.double() - z).norm()) <= allowed, i
        assert x.dtype == y.dtype
        assert x.shape == y.shape


def test_exact_calls_form_scores_from_d() -> None:
    call = replace(make("local", 2, 3), exact=True)
    assert all(head.columns is None for _, head in heads(call))
    exact = results(call, torch.float64, by_reference)
    for x, y in zip(results(call, torch.float32, by_tiles), exact, strict=True):
        assert float((x.double() - y).norm()) <= 3e-6 * float(y.norm())


def test_steep_forms_on_coarse_tiles_fall_back_to_d() -> None:
    call = make("local", 2, 3)
    term = call.terms[0]
    assert isinstance(term, Quadratic)
    call = replace(call, terms=(replace(term, M=term.M * 3000.0),))  # type: ignore[operator]
    assert all(head.columns is None for _, head in heads(call))
    exact = by_reference(replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double()))
    assert float((by_tiles(call) - exact).norm()) <= 1e-5 * float(exact.norm())


def scattered(masked: str | None) -> Call:
    """Three samples with positions of their own; one or more tokens of each lie far from all others, in wide tiles.

    The second sample has tokens without a position. mask: padding of each sample, or what each head of each may see.
    """
    call, g = make("local", 2, 3), torch.Generator().manual_seed(5)
    (n, h), b = call.q.shape[2:], 3
    q, k, v = (torch.randn(b, 2, n, h, generator=g) for _ in range(3))
    r = 14 * torch.rand(b, n, 2, generator=g)
    for sample in range(b):
        r[sample, 7 * sample : 8 * sample + 2] += 3000.0 * (sample + 1)
    r[1, -20:] = torch.nan
    root = torch.randn(b, 2, n, 2, 2, generator=g)
    term = Quadratic(-root @ root.mT - torch.eye(2), torch.randn(b, 2, n, 2, generator=g), Positions.of(r))
    shape = {None: (), "padding": (b, 1, 1, n), "each head": (b, 2, 1, n), "each query": (b, 2, n, n)}[masked]
    mask = torch.rand(shape, generator=g) < 0.8 if shape else None
    terms: tuple[Any, ...] = (term,)
    return replace(call, q=q, k=k, v=v, terms=terms, mask=mask)


@pytest.mark.parametrize("masked", [None, "padding", "each head", "each query"])
def test_a_wide_tile_is_formed_from_d_and_leaves_the_others_their_columns(masked: str | None) -> None:
    call = scattered(masked)
    terms = sparse.shared_terms(call)
    assert terms is not None
    coefficients = [term.coefficients(torch.float32) for term in terms]
    made = [tiles.Head(call, terms, coefficients, b, h) for b in range(3) for h in range(2)]
    assert all(head.fits.any() and not head.fits.all() for head in made)
    with patch.object(tiles.Head, "without_columns", side_effect=AssertionError("all gradients formed from D")):
        found = results(call, torch.float32, by_tiles)
    exact = results(call, torch.float64, by_reference)
    for i, (x, y) in enumerate(zip(found, exact, strict=True)):
        for sample in range(3):
            error = float((x[sample].double() - y[sample]).norm())
            assert error <= (5e-4 if i else 2e-5) * float(y[sample].norm()), (i, sample)


@pytest.mark.usefixtures("no_compiler")
def test_calls_that_dense_attention_would_form_from_d_run_by_tiles_from_fewer_tokens_on() -> None:
    call = scattered(None)
    near = replace(call, terms=(replace(call.terms[0], r=Positions.of(torch.rand(1, call.q.shape[2], 2))),))  # type: ignore[type-var]
    with patch.multiple(sparse, LEAST=4096, LEAST_FROM_D=64, QUERY_COST=190.0), count_tiles() as ran:
        assert sparse.from_d(call) == 1.0
        want = attend_call(call, kernel="reference")
        torch.testing.assert_close(attend_call(call), want, atol=1e-4, rtol=1e-3)
        assert ran.call_count == 6
        plan = str(explain(call.q, call.k, call.v, call.terms, scale=call.scale))
        assert "columns centred in each tile, or formed from D where those would lose digits" in plan
        assert sparse.from_d(near) == 0.0
        for other in (near, replace(call, exact=True), replace(call, scale=0.0)):
            assert tiles.attention(other) is None
        with patch.object(sparse, "LEAST_FROM_D", 4096):
            assert tiles.attention(call) is None


def test_forward_and_backward_visit_the_needed_tiles_and_no_others() -> None:
    call = make("local", 2, 7)
    needed = [head.needed(torch.arange(len(head.index)), TOLERANCE, weighted=True) for _, head in heads(call)]
    visits: dict[str, int] = {"forward": 0, "backward": 0}
    attention = tiles.Head.attention

    def spy(self: tiles.Head, rows: Tensor, lists: Tensor, room: Tensor) -> Any:
        visits[phase] += int((lists < len(self.keys.index) - 1).sum())
        return attention(self, rows, lists, room)

    with patch.object(tiles.Head, "attention", spy):
        mine, leaves = leaves_of(call, torch.float32)
        phase = "forward"
        out = by_tiles(mine)
        phase = "backward"
        torch.autograd.grad(out.sum(), leaves)
    total = sum(int(x.sum()) for x in needed)
    assert visits == {"forward": total, "backward": total}
    assert total < 0.9 * sum(x[:, :-1].numel() for x in needed)


def test_a_key_that_every_query_skips_has_no_gradient() -> None:
    call = make("local", 2, 1)
    n, far = call.q.shape[2], torch.arange(call.q.shape[2]) % 14 == 13
    r = parapos.grid_positions(14, 14).double()
    r[far] += 1000.0  # one column of the grid, in tiles of its own
    mask = ~far.expand(1, 1, n, n).clone()
    mask[..., far, :] = False
    mask[..., far, 0] = True  # far tokens look at the first one
    term = replace(call.terms[0], r=Positions.of(r))  # type: ignore[type-var]
    call = replace(call, terms=(term,), mask=mask)
    _, _, dk, dv, *_ = results(call, torch.float32, by_tiles)
    assert dk[0, :, far].eq(0).all()
    assert dv[0, :, far].eq(0).all()
    assert dv[0, :, ~far].abs().amin() > 0


def test_repeats_are_equal_to_the_bit() -> None:
    call = make("local", 2, 2)
    for x, y in zip(results(call, torch.float32, by_tiles), results(call, torch.float32, by_tiles), strict=True):
        assert torch.equal(x, y)


def attend_call(call: Call, **options: Any) -> Tensor:
    out = attend(call.q, call.k, call.v, call.terms, call.mask, call.scale, **options)
    assert isinstance(out, Tensor)
    return out


def count_tiles() -> Any:
    return patch.object(tiles, "forward", side_effect=tiles.forward)


@pytest.mark.usefixtures("no_compiler")
def test_attend_skips_by_default_and_looks_everywhere_when_told() -> None:
    call = make("local", 2, 4)
    with count_tiles() as ran:
        assert torch.allclose(attend_call(call), attend_call(call, tolerance=0), atol=1e-3)
        assert ran.call_count == call.q.shape[1]
    with pytest.raises(ValueError, match="tolerance must be a share"):
        attend_call(call, tolerance=-1e-7)


def test_where_nothing_can_be_skipped_dense_attention_runs() -> None:
    call = make("flat", 2, 4)
    with count_tiles() as ran:
        attend_call(call)
    assert not ran.called


@pytest.mark.usefixtures("no_compiler")
def test_explain_tells_the_share_of_tiles() -> None:
    local, flat = make("local", 2, 4), make("flat", 2, 4)
    lists = [head.needed(torch.arange(len(head.index)), TOLERANCE, False)[:, :-1] for _, head in heads(local)]
    share = float(torch.stack(lists).double().mean())
    message = str(explain(local.q, local.k, local.v, local.terms, scale=local.scale))
    assert f"over the {share:.1%} of tiles that may have weight" in message
    assert "tiles" not in str(explain(flat.q, flat.k, flat.v, flat.terms, scale=flat.scale))


def test_terms_without_a_bound_run_dense() -> None:
    call = make("local", 2, 4)
    cubic = Polynomial(torch.randn(1, 2, call.q.shape[2], 9), Positions.of(torch.randn(call.q.shape[2], 2)))
    assert tiles.attention(replace(call, terms=(cubic,))) is None
    assert tiles.attention(replace(call, terms=(*call.terms, cubic))) is None
    assert tiles.attention(replace(call, terms=())) is None


def test_compiled_and_exported_programs_run_dense() -> None:
    att = parapos.Attention(16, heads=2, encoding="pape", pos_dim=2).eval()
    x, r = torch.randn(1, 196, 16), parapos.grid_positions(14, 14)
    with torch.no_grad(), count_tiles() as ran:
        program = torch.export.export(att, (x, r)).module()
        first = ran.call_count
        y = program(x, r)
        assert ran.call_count == first == 0
        assert torch.allclose(att(x, r), y, atol=1e-4)


def test_autocast_and_layers() -> None:
    layer = parapos.Attention(16, heads=2, encoding="pape", pos_dim=2, tolerance=1e-4)
    x, r = torch.randn(1, 196, 16), parapos.grid_positions(14, 14)
    with count_tiles(), torch.autocast("cpu", torch.bfloat16):
        y = layer(x, r)
        y.float().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("kind", ["local", "unplaced", "padded", "masked", "cross", "distance"])
def test_the_lists_of_tiles_alone_give_attention(kind: str) -> None:
    """What another kernel may rely on: every query in one tile, every visible key in one, and no other key needed."""
    call = replace(make(kind, 2, 3), tolerance=1e-4)
    call = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    weights = reference.attention(call)[1]
    lists = tiles.needed_tiles(call, weighted=False)
    assert lists is not None
    assert [len(x) for x in lists] == [call.q.shape[1]]
    skipped = 0
    for h, head in enumerate(lists[0]):
        assert head.needed.shape == (len(head.queries), len(head.keys))
        queries = head.queries[head.queries >= 0]
        assert torch.equal(queries.sort()[0], torch.arange(call.q.shape[2]))
        keys = head.keys[head.keys >= 0]
        assert len(keys.unique()) == len(keys)
        for tile, row in enumerate(head.needed):
            looks = torch.zeros(call.k.shape[2], dtype=torch.bool)
            looks[head.keys[row][head.keys[row] >= 0]] = True
            lost = weights[0, h][head.queries[tile][head.queries[tile] >= 0]][:, ~looks].sum(-1)
            assert float(lost.max()) <= call.tolerance
        skipped += int((~head.needed).sum())
    assert skipped
    assert tiles.needed_tiles(replace(call, tolerance=0.0), weighted=False) is None


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 7, 8, 100, 257])
def test_tiles_hold_every_token_once_and_are_even(n: int, p: int) -> None:
    r = torch.randn(n, p)
    r[::9] = torch.nan
    made = tiling.tiling(r)
    tokens = torch.cat([made.index[made.index >= 0], made.unplaced])
    assert torch.equal(tokens.sort()[0], torch.arange(n))
    counts = (made.index >= 0).sum(1)
    assert not len(counts) or int(counts.max() - counts.min()) <= 1


def test_tiles_of_a_grid_are_blocks() -> None:
    with patch.object(tiling, "TILE", 64):
        made = tiling.tiling(parapos.grid_positions(64, 64))
    assert made.index.shape == (64, 64)
    assert (made.high - made.low == 7).all()


@pytest.mark.parametrize("kind", ["local", "unplaced", "padded", "masked", "distance"])
def test_heads_that_are_bounded_together_need_what_each_needs_alone(kind: str) -> None:
    made = [head for _, head in heads(make(kind, 2, 6))]
    rows = torch.arange(len(made[0].index))
    both = needed_by(made, rows, TOLERANCE, False)
    alone = torch.stack([head.needed(rows, TOLERANCE, False) for head in made])
    assert float((both != alone).float().mean()) < 1e-3  # products may round otherwise
    assert not torch.equal(both[0], both[1])


def test_heads_with_padding_of_their_own_are_bounded_apart() -> None:
    call = make("local", 2, 6)
    n = call.k.shape[2]
    mask = torch.stack([torch.arange(n) < n - 40, torch.arange(n) >= 40])[None, :, None]  # (1, 2, 1, N)
    call = replace(call, mask=mask, k=call.k.masked_fill(~mask.mT, 0.0), v=call.v.masked_fill(~mask.mT, 0.0))
    assert [len(x) for x in tiles.together(call)] == [1, 1]
    assert [len(x) for x in tiles.together(replace(call, mask=None))] == [2]
    exact = by_reference(replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double()))
    assert float((by_tiles(call) - exact).norm()) <= 2e-5 * float(exact.norm())


def test_forms_that_look_everywhere_are_given_up_before_any_bound() -> None:
    call = make("flat", 2, 1)
    term = call.terms[0]
    assert isinstance(term, Quadratic)
    with patch.object(tiles, "share") as bounded:
        flat = replace(call, terms=(replace(term, M=term.M * 0.01, g=None),))  # type: ignore[operator]
        assert tiles.attention(flat) is None
        assert not bounded.called
    with patch.object(tiles, "share", return_value=0.1) as bounded:
        steep = replace(call, terms=(replace(term, M=term.M * 1e3),))  # type: ignore[operator]
        assert tiles.attention(steep) is not None
        assert bounded.called


def test_dense_attention_runs_where_tiles_would_take_longer() -> None:
    call = make("local", 2, 4)
    with patch.object(sparse, "PAIR_COST", 1.7), patch.object(tiles, "share", return_value=0.6):
        assert tiles.attention(call) is None
    with patch.object(sparse, "PAIR_COST", 1.7), patch.object(tiles, "share", return_value=0.5):
        assert tiles.attention(call) is not None


@pytest.mark.parametrize("training", [False, True])
def test_the_share_is_estimated_for_what_will_run(training: bool) -> None:
    """Training needs more tiles than inference, so the estimate that chooses between tiles and all must count those."""
    call = make("local", 2, 4)
    call = leaves_of(call, torch.float32)[0] if training else call
    with patch.object(tiles.Head, "needed", autospec=True, side_effect=tiles.Head.needed) as bounded:
        assert tiles.chosen(call) is not None
    assert [args[-1] for args, _ in bounded.call_args_list] == [training]
    shares = [tiles.share(call, *chosen, weighted) for weighted in (False, True) if (chosen := tiles.chosen(call))]
    assert shares[0] < shares[1]


def test_gradients_that_columns_would_round_are_formed_from_d() -> None:
    call = make("local", 2, 3)
    without = patch.object(tiles.Head, "without_columns", autospec=True, side_effect=tiles.Head.without_columns)
    with patch.object(tiles, "ALLOWED", 0.0), without as formed:
        found = results(call, torch.float32, by_tiles)
    assert formed.call_count == call.q.shape[1]
    for x, y in zip(found[1:], results(call, torch.float64, by_reference)[1:], strict=True):
        assert float((x.double() - y).norm()) <= 3e-6 * float(y.norm())


def straight(shift: float) -> tuple[list[Tensor], list[Any]]:
    """4096 keys in a row, and queries that are all so far from them."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 1, 4096, 16, generator=g).requires_grad_() for _ in range(3)]
    at = torch.arange(4096.0)[None, :, None]
    return x, [Quadratic(-torch.ones(1, 1, 4096, 1, 1), None, Positions.of(at + shift), Positions.of(at))]


@pytest.mark.parametrize("tolerance", [0.0, TOLERANCE], ids=["dense", "tiles"])
@pytest.mark.parametrize("size", [1.0, 1e5], ids=["far queries", "large products"])
def test_scores_of_any_size_keep_their_order(tolerance: float, size: float) -> None:
    """Next to scores of 2^31, 85 is less than their rounding."""
    x, terms = straight(1e5 if size == 1 else 0.0)
    x = [(x[0] * size).detach().requires_grad_(), (x[1] * size).detach().requires_grad_(), x[2]]
    found = [attend(*x, terms, kernel=kernel, tolerance=tolerance) for kernel in ("fused", "reference")]
    grads = [torch.autograd.grad(out.square().sum(), x[2])[0] for out in found]  # type: ignore[union-attr]
    for one, other in (found, grads):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_what_changed_after_the_forward_pass_is_noticed() -> None:
    (q, k, v), terms = straight(0.0)
    keys = k * 1.0
    out = attend(q, keys, v, terms, kernel="fused")
    with torch.no_grad():
        keys.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), q)  # type: ignore[union-attr]


def test_the_smallest_tolerance_skips_no_weight() -> None:
    x, terms = straight(0.0)
    want = attend(*x, terms, kernel="reference")
    for tolerance in (1e-290, 1e-300, 5e-324):
        torch.testing.assert_close(attend(*x, terms, kernel="fused", tolerance=tolerance), want, rtol=1e-3, atol=1e-4)


def test_padding_is_hidden_at_any_scale() -> None:
    (q, k, v), _ = straight(0.0)
    r = Positions.of(torch.arange(4096.0)[None, :, None])
    terms = [Quadratic(-torch.ones(1, 1, 4096, 1, 1) * 1e30, None, r)]
    mask = torch.arange(4096)[None] % 3 > 0
    found = [attend(q, k, v, terms, mask, 1e-30, kernel=kernel) for kernel in ("fused", "reference")]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_products_in_tf32_have_no_bound() -> None:
    class OnGPU:
        is_cuda = True

    for allowed in (False, True):
        with patch.object(type(torch.backends.cuda.matmul), "__getattr__", lambda self, name, x=allowed: x):
            assert tiles.rounds_products(OnGPU()) is allowed  # type: ignore[arg-type]
    assert not tiles.rounds_products(torch.zeros(1))
