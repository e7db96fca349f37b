"""The Triton kernel with lists of tiles, in Triton's interpreter: that it is attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Quadratic, lists, triton
from parapos.attention.kernels import Call
from parapos.positions import Positions

from ..marks import full
from .criterion import DTYPES, assert_within_budget
from .strips import SIZE, by_reference, in_type, numbers, small_lists, strip, visits_of
from .test_tiles import leaves_of
from .test_triton import one_node

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def check_triton(call: Call, dtype: torch.dtype = torch.float32, most: float = 0.9) -> None:
    """Within the budget, equal to the bit when repeated, and with at most this share of all visits."""
    call = in_type(call, dtype)
    with small_lists():
        assert float(visits_of(call, 32).double().mean()) <= most
        ours, again = (numbers(call, dtype, triton.attention) for _ in range(2))
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    theirs, truth = numbers(call, dtype, by_reference), numbers(call, torch.float64, by_reference)
    assert_within_budget(ours, theirs, truth, dtype, call.q.shape[-1])


@pytest.mark.parametrize(("dtype", "push"), [(torch.float32, 20.0), full(torch.bfloat16, 0.0)], ids=str)
def test_triton_runs_lists(interpreter: Callable[..., Any], dtype: torch.dtype, push: float) -> None:
    interpreter(check_triton, strip(push=push), dtype, 0.6)


@pytest.mark.parametrize(("n", "tiles"), [(70, triton.Tiles(16, 16, 4, 1)), full(200, None)], ids=str)
def test_tiles_divide_the_blocks_of_lists(interpreter: Callable[..., Any], n: int, tiles: triton.Tiles | None) -> None:
    """None: as on a GPU, with tiles that differ from pass to pass."""
    interpreter(check_triton, strip(n=n), tiles=tiles)


KINDS = ("", "float32", "distance", "PaPE-RI", "unplaced", "padded", "masked", "cross")


MANY = [*product(KINDS, [1], DTYPES), *product(KINDS[:4], [2], DTYPES[:1]), *product(["", "PaPE-RI"], [3], DTYPES[:1])]


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


def test_operators_take_lists(interpreter: Callable[..., Any]) -> None:
    visits, forward, backward = interpreter(operators_with_lists)
    assert forward == visits * 32**2 * 2 * (SIZE + SIZE + 2)
    assert backward == visits * 32**2 * 2 * (4 * SIZE + 3 * SIZE + 3 * 2)


def compiled_without_lists() -> None:
    with small_lists():
        one_node()


@pytest.mark.full
def test_compiled_programs_look_at_every_key(interpreter: Callable[..., Any]) -> None:
    interpreter(compiled_without_lists)


def explained(call: Call, kernel: str, tolerance: float | None = None) -> str:
    with small_lists(worth=False), torch.no_grad():
        plan = parapos.explain(call.q, call.k, call.v, call.terms, None, call.scale, kernel, tolerance=tolerance)
    return plan.method


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
