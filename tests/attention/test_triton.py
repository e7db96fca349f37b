"""The Triton kernel: its numbers in Triton's interpreter, its operators, and what it cannot serve. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

import parapos
from parapos.attention import Distance, Polynomial, Quadratic, Table, Term, reference, triton
from parapos.attention.select import _hide

from .budget import DTYPES
from .interpreted import TermCase, numbers, within_budget, within_budget_twice

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

AXES: dict[str, list[Any]] = {
    "term": ["M, g", "M", "g", "alpha", "alpha, g", "slopes", "bias", "M, bias", "none"],
    "sizes": [(16, 16), (32, 32), (64, 64), (128, 128), (40, 24)],
    "special": ["", "mask", "unplaced", "shared", "far", "mean"],
    "p": [1, 2, 3, 4],
    "n": [1, 17, 64, 130],
    "dtype": list(DTYPES),
}


def pairwise() -> list[dict[str, Any]]:
    """Few cases in which every value of an axis meets every value of every other axis."""
    todo = {frozenset(pair) for a, b in combinations(AXES, 2) for pair in product(_values(a), _values(b))}
    rows = []
    while todo:
        row = dict(min(todo, key=lambda pair: sorted(pair)))
        for axis in [axis for axis in AXES if axis not in row]:
            row[axis] = max(
                range(len(AXES[axis])),
                key=lambda i, axis=axis: sum(frozenset([(axis, i), old]) in todo for old in row.items()),
            )
        todo -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append({axis: AXES[axis][row[axis]] for axis in AXES})
    return rows


def _values(axis: str) -> list[tuple[str, int]]:
    return [(axis, i) for i in range(len(AXES[axis]))]


@pytest.mark.parametrize("options", pairwise(), ids=lambda o: "-".join(str(x).replace(" ", "") for x in o.values()))
def test_within_budget(interpreter: Callable[..., Any], options: dict[str, Any]) -> None:
    interpreter(within_budget, TermCase(**options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("term", "p"), [*product(["M, g", "alpha", "slopes"], [1, 2, 3, 4]), ("bias", 2), ("none", 2)], ids=str
)
def test_every_term_dtype_and_size(
    interpreter: Callable[..., Any], term: str, p: int, size: int, dtype: torch.dtype
) -> None:
    """Every combination, at four numbers of tokens. The cases above mix them with everything else."""
    heads = 4 if term == "slopes" else 1  # a slope for each head; of a single number the error is luck
    for n in (1, 17, 64, 130):
        check = within_budget_twice if n == 17 else within_budget
        interpreter(check, TermCase(term, dtype, p, (size, size), n, heads=heads))


def test_tiles_of_the_table(interpreter: Callable[..., Any]) -> None:
    """As on a GPU, with tiles that differ from pass to pass."""
    interpreter(within_budget, TermCase(dtype=torch.float16, n=70, special="mask"), tiles=None)


def test_values_with_a_mean(interpreter: Callable[..., Any]) -> None:
    """Even attention to many keys: the gradients of M and g would show the rounding of the output."""
    case = TermCase(dtype=torch.bfloat16, n=600, special="mean")
    for name in "Mg":
        case.tensors[name] *= 0.02
    interpreter(within_budget, case, tiles=triton.Tiles(512, 512, 4, 1))


@pytest.mark.parametrize("term", ["M, g", "slopes"])
def test_repeats_to_the_last_bit(interpreter: Callable[..., Any], term: str) -> None:
    case = TermCase(term, n=70, dtype=torch.bfloat16)
    first, second = interpreter(numbers, case), interpreter(numbers, case)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("fill", [1e4, torch.nan, torch.inf])
def test_padding_never_matters(interpreter: Callable[..., Any], fill: float) -> None:
    """Whatever stands in padded keys and values, outputs and gradients are equal to the last bit, and 0 for padding."""
    case = TermCase("M, g", n=40, special="mask")
    assert case.mask is not None
    before = interpreter(numbers, case)
    for name in "kv":
        case.tensors[name].masked_fill_(~case.mask[:, None, :, None], fill)
    after = interpreter(numbers, case)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("dk", "dv"):
        assert (after[name].masked_select(~case.mask[:, None, :, None]) == 0).all()


@pytest.mark.parametrize(("double", "shift"), [(False, 1e4), (False, 1e6), (True, 1e6), (True, 1e14)])
def test_positions_may_be_anywhere(interpreter: Callable[..., Any], double: bool, shift: float) -> None:
    """Integer positions give the same bits wherever they are."""
    case = TermCase("M, g", n=40)
    if double:
        case.r = case.r.double()
    near = interpreter(numbers, case)
    case.r = case.r + shift
    far = interpreter(numbers, case)
    assert all(torch.equal(near[name], far[name]) for name in near)


def test_microseconds_keep_their_digits(interpreter: Callable[..., Any]) -> None:
    """Neighbours in a long recording: float32 about the middle alone would be off by 0.03."""
    case = TermCase("M, g", n=40, p=1)
    case.r = 1e6 * (torch.arange(40).double() // 20)[None, :, None] + torch.rand(1, 40, 1).double()
    interpreter(within_budget, case)


def empty_samples(case: TermCase) -> dict[str, Tensor]:
    assert case.mask is not None
    case.mask[1] = False
    return numbers(case)


@pytest.mark.parametrize("term", ["M, g", "slopes", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty_samples(interpreter: Callable[..., Any], term: str, dtype: torch.dtype) -> None:
    found = interpreter(empty_samples, TermCase(term, dtype, special="mask"))
    for name, x in found.items():
        assert torch.isfinite(x).all(), name
        assert (x[0] != 0).any(), name
        assert name == "dslopes" or (x[1] == 0).all(), name


def test_rows_hidden_by_a_table(interpreter: Callable[..., Any]) -> None:
    case = TermCase("bias", n=70)
    case.tensors["bias"][..., 3, :] = -torch.inf
    case.tensors["bias"][..., 5, :65] = -torch.inf
    found = interpreter(numbers, case)
    assert (found["out"][..., 3, :] == 0).all()
    assert (found["dq"][..., 3, :] == 0).all()
    interpreter(within_budget, case)


def nothing() -> list[tuple[int, ...]]:
    shapes = []
    for b, n in ((2, 0), (0, 5)):
        q = torch.zeros(b, 2, n, 8, requires_grad=True)
        form = torch.zeros(b, 2, n, 3, 3, requires_grad=True)
        out = triton.attention(q, q, q, [Quadratic(form, None, torch.zeros(1, n, 3))], None, 1.0)
        shapes += [out.shape, *(g.shape for g in torch.autograd.grad(out.sum(), [q, form]))]
    return [tuple(shape) for shape in shapes]


def test_no_tokens_and_no_samples(interpreter: Callable[..., Any]) -> None:
    assert interpreter(nothing) == [(2, 2, 0, 8)] * 2 + [(2, 2, 0, 3, 3)] + [(0, 2, 5, 8)] * 2 + [(0, 2, 5, 3, 3)]


def fused_projection() -> None:
    g = torch.Generator().manual_seed(0)
    views = torch.randn(2, 70, 3, 2, 16, generator=g).permute(2, 0, 3, 1, 4)
    turned = torch.randn(2, 2, 16, 70, generator=g).mT
    form = -torch.rand(1, 2, 1, 2, 2, generator=g).expand(2, 2, 70, 2, 2)
    term = Quadratic(form, None, torch.rand(1, 70, 2, generator=g))
    for q, k, v in (views, (views[0], turned, views[2])):
        apart = [x.contiguous() for x in (q, k, v)]
        copied = Quadratic(form.contiguous(), None, term.r)
        assert torch.equal(triton.attention(q, k, v, [term], None, 1.0), triton.attention(*apart, [copied], None, 1.0))
    slopes, r = torch.rand(4, generator=g)[::2], torch.rand(1, 2, 70, generator=g).mT
    pieces, whole = Distance(slopes, r), Distance(slopes.contiguous(), r.contiguous())
    assert torch.equal(*(triton.attention(*views, [x], None, 1.0) for x in (pieces, whole)))
    launched: list[dict[str, Any]] = []
    call = triton.Call.of(*views, [term], None, 1.0)
    triton.forward(call, True, lambda name, args, programs: launched.append(args))
    for name, x in zip("qkv", views, strict=True):
        assert launched[0][name].data_ptr() == x.data_ptr(), "copied"
    assert launched[0]["M"].data_ptr() == form.data_ptr()


def test_views_are_not_copied(interpreter: Callable[..., Any]) -> None:
    interpreter(fused_projection)


# The operators.


def sound_operators() -> None:
    for options in ({}, {"term": "slopes", "special": "mask"}, {"term": "M, bias", "dtype": torch.bfloat16}):
        case = TermCase(**options)  # type: ignore[arg-type]
        leaves = {name: x.clone().requires_grad_(name != "bias") for name, x in case.tensors.items()}
        call = triton.Call.of(leaves["q"], leaves["k"], leaves["v"], case.terms(leaves), case.mask, 0.2)
        if case.mask is not None:
            call = call._replace(r=call.r.nan_to_num(1.0))  # the checks compare inputs, and NaN differs from NaN
        torch.library.opcheck(triton._attention, (*call, True), test_utils=("test_schema", "test_faketensor"))
        torch.library.opcheck(triton._attention, (*call, True), test_utils="test_autograd_registration")
        kept = triton._attention(*call, True)
        plain = [x.detach() if isinstance(x, Tensor) else x for x in (*call, kept[0], *kept)]
        wanted = [x is not None for x in (call.M, call.g, call.slopes)]
        torch.library.opcheck(
            triton._attention_backward, (*plain, wanted), test_utils=("test_schema", "test_faketensor")
        )


def test_custom_operators_are_sound(interpreter: Callable[..., Any]) -> None:
    interpreter(sound_operators)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoding = parapos.create_encoding("pape", dim=32, heads=2, head_dim=16, pos_dim=2, parabolas=3)

    def forward(self, x: Tensor, r: Tensor, mask: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 16)).transpose(1, 2)
        q, k, terms = self.encoding(x, q, q, r)
        assert triton.refuse(q, k, q, terms, mask, True) is None
        return triton.attention(q, k, q, [_hide(term, mask) for term in terms], mask, 0.25).transpose(1, 2).flatten(2)


def one_node() -> None:
    torch.manual_seed(0)
    net, x, r = Net(), torch.randn(2, 20, 32), parapos.grid_positions(4, 5)
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(f(x, r, mask).square().sum(), list(net.parameters())) for f in (compiled, net)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    program = torch.export.export(net, (x, r, mask))
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("parapos.triton_attention.default") == 1
    assert not any("softmax" in name or "bmm" in name for name in names)
    torch.testing.assert_close(program.module()(x, r, mask), net(x, r, mask))


def test_compiles_and_exports_as_one_node(interpreter: Callable[..., Any]) -> None:
    interpreter(one_node)


def flops() -> list[int]:
    from torch.utils.flop_counter import FlopCounterMode

    import parapos.attention.flops  # noqa: F401

    q, v = torch.randn(2, 3, 20, 16, requires_grad=True), torch.randn(2, 3, 20, 8)
    with FlopCounterMode(display=False) as forward:
        out = triton.attention(q, q, v, [], None, 1.0)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    with FlopCounterMode(display=False) as dense:
        reference.attention(q, q, v, [], None, 1.0)
    return [counter.get_total_flops() for counter in (forward, backward, dense)]


def test_flops_are_counted(interpreter: Callable[..., Any]) -> None:
    forward, backward, dense = interpreter(flops)
    assert forward == dense == 2 * 6 * 20 * 20 * (16 + 8)
    assert backward == 2 * 6 * 20 * 20 * (4 * 16 + 3 * 8)


def test_nothing_is_kept_without_gradients() -> None:
    q = torch.zeros(2, 3, 5, 8, dtype=torch.bfloat16)
    _, rest, norm = triton.forward(triton.Call.of(q, q, q, [], None, 1.0), False, lambda *_: None)
    assert (rest.numel(), norm.numel()) == (0, 0)


# What it cannot serve.

R = torch.zeros(1, 4, 2)
LEARNED = torch.zeros(1, 1, 4, 4, requires_grad=True)
REFUSED: list[tuple[str, dict[str, Any], list[Term]]] = [
    ("it has no float64", {"dtype": torch.float64}, []),
    ("it serves head sizes up to 128, the query size is 129", {"size": 129}, []),
    ("it has no Polynomial term", {}, [Polynomial(torch.zeros(1, 2, 4, 2), R)]),
    ("it has no gradient of Table.bias", {}, [Table(LEARNED)]),
    ("the positions require a gradient", {}, [Distance(torch.ones(2), R.clone().requires_grad_())]),
    ("it serves 1 to 4 position dimensions, got 5", {}, [Distance(torch.ones(2), torch.zeros(1, 4, 5))]),
    (
        "it takes one Quadratic or Distance and one Table at most, got Distance + Distance",
        {},
        [Distance(torch.ones(2), R), Distance(torch.ones(2), R)],
    ),
]


def refusal(size: int, dtype: torch.dtype, terms: list[Term], needs_grad: bool) -> str | None:
    q = torch.zeros(1, 2, 4, size, dtype=dtype)
    return triton.refuse(q, q, q, terms, None, needs_grad)


@pytest.mark.parametrize(("reason", "options", "terms"), REFUSED, ids=[reason for reason, _, _ in REFUSED])
def test_refusals(interpreter: Callable[..., Any], reason: str, options: dict[str, Any], terms: list[Term]) -> None:
    arguments = {"size": 8, "dtype": torch.float32} | options
    assert interpreter(refusal, arguments["size"], arguments["dtype"], terms, True) == reason


def test_fixed_tables_are_served(interpreter: Callable[..., Any]) -> None:
    assert interpreter(refusal, 8, torch.float32, [Table(LEARNED)], False) is None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets here")
def test_processors_are_refused() -> None:
    q = torch.zeros(1, 2, 4, 8)
    assert triton.refuse(q, q, q, [], None, False) == "it runs on GPUs, q is on cpu"


def test_import_does_not_load_triton() -> None:
    code = "import sys, parapos.attention.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
