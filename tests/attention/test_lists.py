"""Lists of tiles in the Triton kernel and in FlexAttention: that they miss nothing, and that what runs is attention.

Which tiles may be skipped is tested in test_sparse.py. Here tiles have 16 or 32 tokens, so that a few hundred tokens
have lists; Triton runs in its interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Quadratic, Relative, flex, lists, reference, sparse, tiles, tiling, triton
from parapos.attention.kernels import Call
from parapos.positions import Positions

from ..marks import full
from .criterion import DTYPES, assert_within_budget
from .test_sparse import make
from .test_tiles import leaves_of
from .test_triton import one_node

SIZE = 16  # of heads
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
compiles = pytest.mark.skipif(flex._cpu_lacks() is not None, reason=str(flex._cpu_lacks()))


@contextmanager
def small_lists(size: int = 32, worth: bool = True) -> Iterator[None]:
    """Lists for few tokens, in blocks of this size."""
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(sparse, LEAST=1, QUERY_COST=0.0, PAIR_COST=1.0))
        stack.enter_context(patch.object(triton, "LIST", size))
        stack.enter_context(patch.multiple(flex, TILE=size, BLOCKS={"cpu": size}))
        if worth:
            stack.enter_context(patch.object(tiles, "is_worth_it", return_value=True))
        yield


def strip(
    kind: str = "", n: int = 150, p: int = 1, heads: int = 1, samples: int = 1, push: float = 0.0, width: int = SIZE
) -> Call:
    """Tokens strewn over a strip, which look at some neighbours. push: and at that to the right of them."""
    gen = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, generator=gen)

    def positions(count: int) -> Positions:
        r = torch.rand(samples, count, p, generator=gen).double() * torch.tensor([n / 3 ** (p - 1), 3.0, 3.0][:p])
        r[:, :: 41 if kind == "unplaced" else count] = torch.nan if kind == "unplaced" else 0.0
        return Positions.of(r.float() if kind == "float32" else r)

    count = 70 if kind == "cross" else n
    q, k, v = normal(heads, n, SIZE), normal(heads, count, SIZE), normal(heads, count, width)
    r, keys = positions(n), positions(count) if kind == "cross" else None
    root = torch.eye(p) + normal(heads, n, p, p) * 0.1
    g = normal(heads, n, p) + push * 9.0
    term: Relative = Quadratic(-4.5 * root @ root.mT, g, r, keys)
    if kind == "distance":
        term = Distance(torch.linspace(2.0, 4.0, heads), r)
    elif kind == "PaPE-RI":
        term = Quadratic(-4.0 - normal(heads, n).abs(), None, r)
    mask = None
    if kind == "padded":
        mask = (torch.arange(n) < n - 31)[None, None, None].expand(samples, 1, 1, n)
        term = term.hide(mask[:, 0, 0])
    elif kind == "masked":
        mask = torch.rand(samples, heads, n, n, generator=gen) < 0.8
        mask = mask | torch.eye(n, dtype=torch.bool)
    return Call(q, k, v, (term,), mask, SIZE**-0.5, tolerance=1e-7)


def in_type(call: Call, dtype: torch.dtype) -> Call:
    """The same call for all types, with the tolerance of this one."""
    q, k, v = (x.to(dtype).float() for x in (call.q, call.k, call.v))
    return replace(call, q=q, k=k, v=v, tolerance=sparse.DEFAULTS[dtype])


def numbers(call: Call, dtype: torch.dtype, run: Callable[[Call], Tensor]) -> dict[str, Tensor]:
    """Output and gradients, in float64."""
    mine, leaves = leaves_of(call, dtype)
    out = run(mine)
    assert out.dtype == dtype
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach().double()} | {f"gradient {i}": x.double() for i, x in enumerate(grads)}


def by_reference(call: Call) -> Tensor:
    return reference.attention(call)[0]


def visits_of(call: Call, size: int) -> Tensor:
    """Which blocks a training step visits: (B, H, blocks of queries, blocks of keys)."""
    found = lists.listed(leaves_of(call, call.q.dtype)[0], size)
    assert found is not None
    return found.blocks(size, size)


def check_triton(call: Call, dtype: torch.dtype = torch.float32, most: float = 0.9) -> None:
    """Within the budget, equal to the bit when repeated, and with at most this share of all visits."""
    call = in_type(call, dtype)
    with small_lists():
        assert float(visits_of(call, 32).double().mean()) <= most
        ours, again = (numbers(call, dtype, triton.attention) for _ in range(2))
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    theirs, truth = numbers(call, dtype, by_reference), numbers(call, torch.float64, by_reference)
    assert_within_budget(ours, theirs, truth, dtype, call.q.shape[-1])


@needs_triton
@pytest.mark.parametrize(("dtype", "push"), [(torch.float32, 20.0), full(torch.bfloat16, 0.0)], ids=str)
def test_triton_runs_lists(interpreter: Callable[..., Any], dtype: torch.dtype, push: float) -> None:
    interpreter(check_triton, strip(push=push), dtype, 0.6)


@needs_triton
@pytest.mark.parametrize(("n", "tiles"), [(70, triton.Tiles(16, 16, 4, 1)), full(200, None)], ids=str)
def test_tiles_divide_the_blocks_of_lists(interpreter: Callable[..., Any], n: int, tiles: triton.Tiles | None) -> None:
    """None: as on a GPU, with tiles that differ from pass to pass."""
    interpreter(check_triton, strip(n=n), tiles=tiles)


KINDS = ("", "float32", "distance", "PaPE-RI", "unplaced", "padded", "masked", "cross")


MANY = [*product(KINDS, [1], DTYPES), *product(KINDS[:4], [2], DTYPES[:1]), *product(["", "PaPE-RI"], [3], DTYPES[:1])]


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize(("kind", "p", "dtype"), MANY, ids=str)
def test_triton_runs_lists_of_all_kinds(interpreter: Callable[..., Any], kind: str, p: int, dtype: torch.dtype) -> None:
    interpreter(check_triton, strip(kind, p=p, heads=4 if kind == "distance" else 2, width=24), dtype)


def attended(call: Call, mask: Tensor | None, kernel: str, **options: Any) -> Callable[[Call], Tensor]:
    def run(call: Call) -> Tensor:
        out = parapos.attend(call.q, call.k, call.v, call.terms, mask, call.scale, kernel, **options)
        assert isinstance(out, Tensor)
        return out

    return run


def check_masks(call: Call, masks: list[Tensor]) -> None:
    for mask in masks:
        with small_lists():
            ours = numbers(call, torch.float32, attended(call, mask, "triton"))
        theirs = numbers(call, torch.float32, attended(call, mask, "reference"))
        truth = numbers(call, torch.float64, attended(call, mask, "reference"))
        assert_within_budget(ours, theirs, truth, torch.float32, SIZE)


@needs_triton
@pytest.mark.full
def test_samples_with_padding_and_tokens_without_position(interpreter: Callable[..., Any]) -> None:
    """Each sample has an order of its own; hidden tokens, of which some see nothing, are in no list."""
    n = 90
    call = strip(n=n, heads=2, samples=2)
    term = call.terms[0]
    assert isinstance(term, Quadratic)
    r = term.r.r.clone()
    r[:, ::31] = torch.nan
    call = replace(call, terms=(replace(term, r=Positions.of(r)),))
    gen = torch.Generator().manual_seed(5)
    padding = torch.arange(n) < torch.tensor([[n], [n - 37]])
    each = [torch.rand(*shape, n, n, generator=gen) < 0.7 for shape in ((1, 2), (2, 1))]
    each[0][:, :, 4] = False
    interpreter(check_masks, call, [padding, padding & (torch.arange(2) < 1)[:, None], *each])


def counted(call: Call) -> dict[str, int]:
    """How many blocks each pass visited."""
    from parapos.attention import triton_kernels

    found: dict[str, int] = {}
    launch, column = triton._launch, triton_kernels._column

    def named(name: str, args: dict[str, Any], programs: int) -> None:
        def spy(entries: Any, *rest: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            return column(entries, *rest)

        with patch.object(triton_kernels, "_column", spy):
            launch(name, args, programs)

    with small_lists(), patch.object(triton.forward, "__defaults__", (named,)):  # noqa: SIM117
        with patch.object(triton.backward, "__defaults__", (named,)):
            numbers(call, torch.float32, triton.attention)
    return found


@needs_triton
def test_all_passes_visit_the_lists_and_no_more(interpreter: Callable[..., Any]) -> None:
    call = strip(n=100)
    with small_lists():
        visits = visits_of(call, 32)
    passes = ("forward", "backward_query", "backward_key")
    assert interpreter(counted, call) == dict.fromkeys(passes, int(visits.sum()))
    assert int(visits.sum()) < visits.numel() == 16
    everything = interpreter(counted, replace(call, tolerance=0.0), tiles=triton.Tiles(32, 32, 4, 1))
    assert everything == dict.fromkeys(passes, 16)


def far_gradients(call: Call) -> dict[str, Tensor]:
    with small_lists():
        return numbers(call, torch.float32, triton.attention)


@needs_triton
def test_a_key_that_every_query_skips_has_no_gradient(interpreter: Callable[..., Any]) -> None:
    call = strip(n=64)
    term = call.terms[0]
    assert isinstance(term, Quadratic)
    far = term.r.r + 1e4 * (torch.arange(64) % 2)[:, None]
    found = interpreter(far_gradients, replace(call, terms=(replace(term, keys=Positions.of(far)),)))
    for name in ("gradient 1", "gradient 2"):  # of k and v
        assert found[name][:, :, 1::2].eq(0).all()
        assert found[name][:, :, ::2].ne(0).all()


# Wrong lists must be noticed.

Compress = Callable[[Tensor], tuple[Tensor, Tensor]]


def _without_own_block(right: Compress, calls: list[int]) -> Compress:
    return lambda visits: right(visits & ~torch.eye(*visits.shape[-2:], dtype=torch.bool))


def _one_tile_missing(right: Compress, calls: list[int]) -> Compress:
    def wrong(visits: Tensor) -> tuple[Tensor, Tensor]:
        visits = visits.clone()
        visits[0, 0, 1, 1] = False
        return right(visits)

    return wrong


def _missing_backward(right: Compress, calls: list[int]) -> Compress:
    def wrong(visits: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return (_one_tile_missing(right, []) if len(calls) % 2 == 0 else right)(visits)

    return wrong


def _not_transposed(right: Compress, calls: list[int]) -> Compress:
    def wrong(visits: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return right(visits.mT if len(calls) % 2 == 0 else visits)

    return wrong


MUTANTS = (_one_tile_missing, _missing_backward, _not_transposed, _without_own_block)


def check_mutant(call: Call, mutant: Callable[[Compress, list[int]], Compress]) -> bool:
    """Whether the check passes with wrong lists."""
    with patch.object(triton, "compressed", mutant(triton.compressed, [])):
        try:
            check_triton(call)
        except AssertionError:
            return False
    return True


@needs_triton
@pytest.mark.parametrize("mutant", [MUTANTS[2], *map(full, (*MUTANTS[:2], MUTANTS[3]))])
def test_wrong_lists_are_noticed(interpreter: Callable[..., Any], mutant: Any) -> None:
    call = strip(n=100, push=20.0)
    with small_lists():
        visits = visits_of(call, 32)
    assert not torch.equal(visits, visits.mT)
    assert not interpreter(check_mutant, call, mutant)


def operators_with_lists() -> list[int]:
    from torch.utils.flop_counter import FlopCounterMode

    import parapos.bench.flop_formulas  # noqa: F401 - registers the formulas

    with small_lists():
        call = leaves_of(strip(n=70, heads=2), torch.float32)[0]
        found = lists.listed(call, 32)
        assert found is not None
        visits = found.blocks(32, 32)
        inputs = triton.Inputs.of(found.call, visits)
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(triton._attention, (*inputs, True), test_utils=tests)
        with FlopCounterMode(display=False) as forward:
            out = triton._attention(*inputs, True)[0]
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    return [int(visits.sum()), forward.get_total_flops(), backward.get_total_flops()]


@needs_triton
def test_operators_take_lists(interpreter: Callable[..., Any]) -> None:
    visits, forward, backward = interpreter(operators_with_lists)
    assert forward == visits * 32**2 * 2 * (SIZE + SIZE + 2)
    assert backward == visits * 32**2 * 2 * (4 * SIZE + 3 * SIZE + 3 * 2)


def compiled_without_lists() -> None:
    with small_lists():
        one_node()


@needs_triton
@pytest.mark.full
def test_compiled_programs_look_at_every_key(interpreter: Callable[..., Any]) -> None:
    interpreter(compiled_without_lists)


def explained(call: Call, kernel: str, tolerance: float | None = None) -> str:
    with small_lists(worth=False), torch.no_grad():
        plan = parapos.explain(call.q, call.k, call.v, call.terms, None, call.scale, kernel, tolerance=tolerance)
    return plan.method


@needs_triton
def test_explain_tells_the_share_of_tiles(interpreter: Callable[..., Any]) -> None:
    call = strip(n=100)
    term = call.terms[0]
    assert isinstance(term, Quadratic)
    assert term.M is not None
    with small_lists(), torch.no_grad():
        found = lists.listed(call, 32)
        assert found is not None
        text = f"over the {float(found.blocks(32, 32).double().mean()):.1%} of tiles that may have weight"
    assert text in interpreter(explained, call, "triton")
    assert "tiles" not in interpreter(explained, call, "triton", 0.0)
    assert text in explained(call, "flex")
    flat = replace(term, M=term.M * 1e-4, g=None)
    assert "tiles" not in explained(replace(call, terms=(flat,)), "flex")


# The lists themselves.


@pytest.mark.parametrize("kind", ["local", "distance", "both", "unplaced", "padded", "masked", "cross", "points"])
@pytest.mark.parametrize(("i", "j"), [(16, 16), (8, 32), (48, 16)])
def test_blocks_visit_what_any_of_their_tiles_needs(kind: str, i: int, j: int) -> None:
    """Pair by pair of tokens: visited where needed, and every pair of tiles that a block has for nothing shares it."""
    call = make(kind, 2, 3)
    with small_lists():
        found = lists.listed(call, 16)
    assert found is not None
    visits = found.blocks(i, j)[0]
    queries, keys = found.queries, found.keys
    n, count = call.q.shape[2], call.k.shape[2]
    assert torch.equal(queries.tokens.sort()[0], torch.arange(n)[None])
    assert torch.equal(keys.tokens.sort()[0], torch.arange(count)[None])
    assert torch.equal(queries.tokens.gather(1, queries.places), torch.arange(n)[None])
    pairs = found.needed[0][:, queries.tile[0]][:, :, keys.tile[0]]  # (H, n, N)
    for h in range(call.q.shape[1]):
        want = torch.stack([torch.stack([y.any() for y in x.split(j, 1)]) for x in pairs[h].split(i, 0)])
        assert torch.equal(visits[h], want)
    assert not visits.all() or i > 16 or j > 16 or kind not in ("local", "distance")


def test_lists_are_those_of_the_proof() -> None:
    """Block by block what `needed_tiles` says of the tiles that blocks are, in training as in inference."""
    call = strip(n=320, heads=2)
    terms = tuple(replace(t, r=tiling.aligned(t.r, 4)) for t in call.terms if isinstance(t, Quadratic))
    found = []
    for weighted, mine in ((False, call), (True, leaves_of(call, torch.float32)[0])):
        proved = tiles.needed_tiles(replace(call, terms=terms), weighted)
        with small_lists():
            made = lists.listed(mine, 4)
        assert made is not None
        assert proved is not None
        assert torch.equal(made.blocks(4, 4)[0, 0], proved[0][0].needed)
        found.append(int(proved[0][0].needed.sum()))
    assert 0 < found[0] < found[1] < 6400


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 16, 17, 100, 257])
def test_aligned_tiles_are_full_but_for_the_last(n: int, p: int) -> None:
    r = torch.randn(n + 3, p)
    r[:3] = torch.nan
    (made,) = tiling.tilings(tiling.aligned(Positions.of(r), 16))
    counts = (made.index >= 0).sum(1)
    assert len(counts) == -(-n // 16)
    assert (counts[:-1] == 16).all()
    assert torch.equal(made.index[made.index >= 0].sort()[0], torch.arange(3, n + 3))
    for tokens, low, high in zip(made.index, made.low, made.high, strict=True):
        assert torch.equal(r[tokens[tokens >= 0]].double().amin(0), low)
        assert torch.equal(r[tokens[tokens >= 0]].double().amax(0), high)


def test_geometry_is_made_once() -> None:
    call = strip(n=100)
    with small_lists(), patch.object(tiling, "tiling", side_effect=tiling.tiling) as made:
        first = lists.listed(call, 16)
        again = lists.listed(replace(call, q=call.q * 2), 16)
    assert made.call_count == 1
    assert first is not None
    assert again is not None
    assert torch.equal(first.queries.tokens, again.queries.tokens)


def test_lists_are_made_where_the_call_is() -> None:
    """No tensor is made on the default device."""
    for kind in ("local", "unplaced", "padded", "masked", "distance"):
        call = make(kind, 2, 3)
        with small_lists(worth=False), patch.object(sparse, "PAIR_COST", 0.0), torch.device("meta"):
            found = lists.listed(call, 16)
            assert found is not None
            parts = (*lists.compressed(found.blocks(16, 16)), found.call.q)
        assert all(x.device.type == "cpu" for x in parts)


def test_few_tokens_and_few_keys_have_no_lists() -> None:
    call = strip(n=100)
    assert lists.listed(call, 16) is None
    with small_lists():
        assert lists.listed(call, 16) is not None
        assert lists.listed(replace(call, tolerance=0.0), 16) is None
        assert lists.listed(replace(call, q=call.q[:, :, :1]), 16) is None
        assert lists.listed(replace(call, terms=()), 16) is None


# FlexAttention.


def test_a_block_mask_is_the_lists() -> None:
    call = replace(
        strip(n=100, heads=2), mask=torch.rand(1, 2, 100, 100, generator=torch.Generator().manual_seed(0)) < 0.8
    )
    with small_lists():
        found = lists.listed(call, 32)
        assert found is not None
        mask = flex._block_mask(found)
        visits = found.blocks(32, 32)
    assert torch.equal(mask.to_dense().bool(), visits)
    assert not visits.all()
    assert mask.seq_lengths == (100, 100)
    for column in range(visits.shape[-1]):
        rows = mask.q_indices[0, 1, column, : mask.q_num_blocks[0, 1, column]]
        assert rows.tolist() == visits[0, 1, :, column].nonzero()[:, 0].tolist()


@pytest.mark.full
@compiles
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("both", torch.float32), ("masked", torch.float32), ("padded", torch.bfloat16), ("cross", torch.float16)],
)
def test_flex_runs_lists(kind: str, dtype: torch.dtype) -> None:
    call = in_type(make(kind, 1, 3, h=SIZE, w=SIZE), dtype)
    exact = {"out": by_reference(replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double()))}
    call = replace(call, q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))
    with small_lists(), torch.no_grad():
        found = lists.listed(call, 32)
        assert found is not None
        assert not found.blocks(32, 32).all()
        ours, again = flex.attention(call), flex.attention(call)
        wrong = found._replace(needed=torch.zeros_like(found.needed))
        wrong.needed[:, :, :, 0] = True
        nothing = flex._attention(found.call, flex._block_mask(wrong))
    assert torch.equal(ours, again)
    theirs = {"out": by_reference(call).double()}
    assert_within_budget({"out": ours.double()}, theirs, exact, dtype, SIZE)
    assert not torch.allclose(found.queries.undo(nothing).double(), exact["out"], atol=0.1)  # lists are followed
