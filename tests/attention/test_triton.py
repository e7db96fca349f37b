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
from parapos.attention import KERNELS, Call, Distance, Polynomial, Quadratic, Table, Term, triton
from parapos.positions import Positions

from .criterion import DTYPES
from .interpreted import SPECIAL, TERMS, TermCase, numbers, within_budget

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

AXES: dict[str, list[Any]] = {
    "term": list(TERMS),
    "sizes": [(16, 16), (32, 32), (64, 64), (128, 128), (40, 24)],
    "special": list(SPECIAL),
    "p": [1, 2, 3, 4],
    "keys": [None, 1, 40, 140],
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


# A case for each promise: every term, dtype, number of dimensions and kind of mask; self- and cross-attention with
# fewer and with more keys than queries; tokens without a position, positions in float64.
FEW: list[dict[str, Any]] = [
    dict(),
    dict(term="M", p=3, keys=140, special="mask", dtype=torch.bfloat16, heads=1),
    dict(term="g", p=4, keys=33, special="padding", dtype=torch.float16),
    dict(term="alpha", p=1, special="mask", n=70, heads=1),
    dict(term="alpha, g", keys=30, special="far"),
    dict(term="slopes", keys=40, special="unplaced", heads=4),
    dict(term="bias", special="earlier", dtype=torch.bfloat16),
    dict(term="M, bias", n=70, keys=20, special="mask", heads=1),
    dict(term="none", n=1, keys=30, special="mask"),
    dict(special="padding", sizes=(40, 24), p=3),
]


def name(options: dict[str, Any]) -> str:
    return "-".join(f"{key} {x}" for key, x in options.items()) or "default"


@pytest.mark.parametrize("options", FEW, ids=name)
def test_within_budget(interpreter: Callable[..., Any], options: dict[str, Any]) -> None:
    interpreter(within_budget, TermCase(**options))


def test_every_promise_has_a_case() -> None:
    """What the kernel serves is what is tested, here and below."""
    cases = [TermCase(**options) for options in FEW]
    assert {type(term) for case in cases for term in case.terms(case.tensors)} == set(triton._FIELDS)
    assert {case.term for case in cases} == set(TERMS)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert {case.p for case in cases} == set(range(1, triton.LARGEST_P + 1))


@pytest.mark.full
@pytest.mark.parametrize("options", pairwise(), ids=name)
def test_every_pair_of_options(interpreter: Callable[..., Any], options: dict[str, Any]) -> None:
    interpreter(within_budget, TermCase(**options))


@pytest.mark.full
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
        interpreter(within_budget, TermCase(term, dtype, p, (size, size), n, heads=heads), n == 17)


def test_tiles_of_the_table(interpreter: Callable[..., Any]) -> None:
    """As on a GPU, with tiles that differ from pass to pass."""
    interpreter(within_budget, TermCase(dtype=torch.float16, n=70, special="padding", heads=1), tiles=None)
    interpreter(within_budget, TermCase(n=20, keys=40, special="mask", heads=1), tiles=None)


@pytest.mark.full
def test_values_with_a_mean(interpreter: Callable[..., Any]) -> None:
    """Even attention to many keys: the gradients of M and g would show the rounding of the output."""
    case = TermCase(dtype=torch.bfloat16, n=600, special="mean")
    for name in "Mg":
        case.tensors[name] *= 0.02
    interpreter(within_budget, case, tiles=triton.Tiles(512, 512, 4, 1))


@pytest.mark.parametrize("options", [dict(n=70), dict(term="slopes", keys=140, special="mask")], ids=name)
def test_repeats_to_the_last_bit(interpreter: Callable[..., Any], options: dict[str, Any]) -> None:
    case = TermCase(dtype=torch.bfloat16, heads=1, **options)
    first, second = interpreter(numbers, case), interpreter(numbers, case)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("keys", [None, 50])
def test_padding_never_matters(interpreter: Callable[..., Any], keys: int | None) -> None:
    """Whatever stands in padded keys and values, outputs and gradients are equal to the last bit, and 0 for padding."""
    case = TermCase("M, g", n=20, keys=keys, special="padding")
    assert case.mask is not None
    hidden = ~case.mask[:, None, :, None]
    before = interpreter(numbers, case)
    for fill in (torch.nan, torch.inf):
        for name in "kv":
            case.tensors[name].masked_fill_(hidden, fill)
        after = interpreter(numbers, case)
        assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("dk", "dv"):
        assert (after[name].masked_select(hidden) == 0).all()


def test_a_mask_equal_for_all_queries_is_padding(interpreter: Callable[..., Any]) -> None:
    """The two ways through the kernel give the same bits."""
    padding = TermCase("M, g", n=20, keys=70, special="padding")
    mask = TermCase("M, g", n=20, keys=70)
    assert padding.mask is not None
    mask.mask = padding.mask[:, None, None, :].expand(2, 1, 20, 70)
    found = [interpreter(numbers, case) for case in (padding, mask)]
    assert all(torch.equal(*(x[name] for x in found)) for name in found[0])


def test_queries_that_see_nothing(interpreter: Callable[..., Any]) -> None:
    """Zeros, and zero gradients; keys that nobody sees have none either, whatever they hold."""
    for term in ("M, g", "slopes"):
        case = TermCase(term, n=20, keys=30, special="mask")
        assert case.mask is not None
        case.mask[:, 0, 3], case.mask[1, :, 5], case.mask[:, :, :, 7] = False, False, False
        for name in "kv":
            case.tensors[name][:, :, 7] = torch.nan
        found = interpreter(numbers, case)
        empty = ~case.mask.any(-1)
        assert empty.sum() >= 4
        for name in ("out", "dq", "dM", "dg"):
            if name in found:
                assert (found[name][empty] == 0).all(), name
                assert (found[name][~empty] != 0).any(), name
        for name in ("dk", "dv"):
            assert (found[name][:, :, 7] == 0).all(), name
        assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize(("double", "shift"), [(False, 1e4), (False, 1e6), (True, 1e6), (True, 1e14)])
def test_positions_may_be_anywhere(interpreter: Callable[..., Any], double: bool, shift: float) -> None:
    """Integer positions give the same bits wherever they are."""
    case = TermCase("M, g", n=10, keys=40 if double else None)
    if case.key_r is not None:
        case.r, case.key_r = case.r.double(), case.key_r.double()
    near = interpreter(numbers, case)
    case.r = case.r + shift
    case.key_r = None if case.key_r is None else case.key_r + shift
    far = interpreter(numbers, case)
    assert all(torch.equal(near[name], far[name]) for name in near)


def test_microseconds_keep_their_digits(interpreter: Callable[..., Any]) -> None:
    """Neighbours in a long recording: float32 about the middle alone would be off by 0.03."""
    case = TermCase("M, g", n=40, p=1)
    case.r = 1e6 * (torch.arange(40).double() // 20)[None, :, None] + torch.rand(1, 40, 1).double()
    interpreter(within_budget, case)


def test_queries_in_float32_and_keys_in_float64(interpreter: Callable[..., Any]) -> None:
    """And more keys of far away, where they would have another middle than the queries."""
    case = TermCase("M, g", n=10, keys=40, p=1)
    assert case.key_r is not None
    case.key_r = case.key_r.double() + 1e5 * (torch.arange(40) > 10)[None, :, None]
    interpreter(within_budget, case)


def empty_samples(case: TermCase) -> dict[str, Tensor]:
    assert case.mask is not None
    case.mask[1] = False
    return numbers(case)


@pytest.mark.parametrize(
    ("term", "dtype"), [("M, g", torch.float32), ("slopes", torch.bfloat16), ("none", torch.float32)], ids=str
)
def test_empty_samples(interpreter: Callable[..., Any], term: str, dtype: torch.dtype) -> None:
    found = interpreter(empty_samples, TermCase(term, dtype, special="padding"))
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


def nothing() -> None:
    for b, n, keys in ((2, 0, 0), (0, 5, 5), (2, 0, 3), (2, 5, 0)):
        q = torch.randn(b, 2, n, 8, requires_grad=True)
        k = torch.randn(b, 2, keys, 8, requires_grad=True)
        form = torch.randn(b, 2, n, 3, 3, requires_grad=True)
        term = Quadratic(form, None, Positions(torch.zeros(1, n, 3)), Positions(torch.zeros(1, keys, 3)))
        out = parapos.attend(q, k, k, [term], kernel="triton")
        assert isinstance(out, Tensor)
        assert out.shape == q.shape
        for x, grad in zip((q, k, form), torch.autograd.grad(out.sum(), [q, k, form]), strict=True):
            assert torch.equal(grad, torch.zeros_like(x))
        assert torch.equal(out, torch.zeros_like(q))


def test_no_tokens_and_no_samples(interpreter: Callable[..., Any]) -> None:
    interpreter(nothing)


def fused_projection() -> None:
    g = torch.Generator().manual_seed(0)
    views = torch.randn(2, 20, 3, 2, 16, generator=g).permute(2, 0, 3, 1, 4)
    turned = torch.randn(2, 2, 16, 20, generator=g).mT
    form = -torch.rand(1, 2, 1, 2, 2, generator=g).expand(2, 2, 20, 2, 2)
    mask = (torch.rand(1, 1, 20, 20, generator=g) < 0.5).mT.expand(2, 1, 20, 20)
    term = Quadratic(form, None, Positions(torch.rand(1, 20, 2, generator=g)))
    slopes, r = torch.rand(4, generator=g)[::2], torch.rand(1, 2, 20, generator=g).mT
    for q, k, v in (views, (views[0], turned, views[2])):
        apart = [x.contiguous() for x in (q, k, v)]
        copied = Quadratic(form.contiguous(), None, term.r)
        pieces, whole = Distance(slopes, Positions(r)), Distance(slopes.contiguous(), Positions(r.contiguous()))
        for x, y in ((term, copied), (pieces, whole)):
            found = triton.attention(Call(q, k, v, (x,), mask, 1.0))
            assert torch.equal(found, triton.attention(Call(*apart, (y,), mask.contiguous(), 1.0)))
    launched: list[dict[str, Any]] = []
    call = triton.Inputs.of(Call(*views, (term,), mask, 1.0))
    triton.forward(call, True, lambda name, args, programs: launched.append(args))
    for name, x in zip(("q", "k", "v", "M", "mask"), (*views, form, mask), strict=True):
        assert launched[0][name].data_ptr() == x.data_ptr(), f"{name} was copied"


def test_views_are_not_copied(interpreter: Callable[..., Any]) -> None:
    interpreter(fused_projection)


# The operators.


def sound_operators() -> None:
    for options in (
        {"term": "slopes", "special": "padding"},
        {"term": "M, bias", "dtype": torch.bfloat16},
        {"n": 5, "keys": 30, "special": "mask"},
        {"n": 30, "keys": 5, "special": "far", "dtype": torch.float16},
    ):
        case = TermCase(**options)  # type: ignore[arg-type]
        leaves = {name: x.clone().requires_grad_(name != "bias") for name, x in case.tensors.items()}
        mask = case.mask if case.mask is None or case.mask.ndim == 4 else case.mask[:, None, None, :]
        inputs = triton.Inputs.of(Call(leaves["q"], leaves["k"], leaves["v"], tuple(case.terms(leaves)), mask, 0.2))
        torch.library.opcheck(triton._attention, (*inputs, True), test_utils=("test_schema", "test_faketensor"))
        torch.library.opcheck(triton._attention, (*inputs, True), test_utils="test_autograd_registration")
        kept = triton._attention(*inputs, True)
        plain = [x.detach() if isinstance(x, Tensor) else x for x in (*inputs, kept[0], *kept)]
        wanted = [x is not None for x in (inputs.M, inputs.g, inputs.slopes)]
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
        q_, k, terms = self.encoding(x, q, q, r)
        out = parapos.attend(q_, k, q, terms, mask, 0.25, "triton")
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)


def one_node() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 20, 32)
    padding = torch.arange(20) < torch.tensor([[20], [13]])
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    compiled = torch.compile(net, fullgraph=True, backend=backend)
    r = parapos.grid_positions(4, 5)
    for r_, mask in ((r, padding), (r.double(), torch.rand(2, 1, 20, 20) < 0.5)):
        results = [torch.autograd.grad(f(x, r_, mask).square().sum(), list(net.parameters())) for f in (compiled, net)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 2
    for names in graphs:
        assert sum("triton_attention" in name for name in names) == 1
        assert not any("softmax" in name or "bmm" in name for name in names)
    with pytest.raises(Exception, match="an exported program holds standard operators alone"):
        torch.export.export(net, (x, r, padding))


def test_compiles_as_one_node_and_is_not_exported(interpreter: Callable[..., Any]) -> None:
    interpreter(one_node)


def flops() -> list[int]:
    from torch.utils.flop_counter import FlopCounterMode

    import parapos.bench.flop_formulas  # registers the formulas

    q, k, v = torch.randn(2, 3, 20, 16, requires_grad=True), torch.randn(2, 3, 30, 16), torch.randn(2, 3, 30, 8)
    with FlopCounterMode(display=False) as forward:
        out = parapos.attend(q, k, v, kernel="triton")
    assert isinstance(out, Tensor)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    with FlopCounterMode(display=False) as dense:
        parapos.attend(q, k, v, kernel="reference")
    return [counter.get_total_flops() for counter in (forward, backward, dense)]


def test_flops_are_counted(interpreter: Callable[..., Any]) -> None:
    forward, backward, dense = interpreter(flops)
    assert forward == dense == 2 * 6 * 20 * 30 * (16 + 8)
    assert backward == 2 * 6 * 20 * 30 * (4 * 16 + 3 * 8)


def test_nothing_is_kept_without_gradients() -> None:
    q = torch.zeros(2, 3, 5, 8, dtype=torch.bfloat16)
    _, rest, norm = triton.forward(triton.Inputs.of(Call(q, q, q, (), None, 1.0)), False, lambda *_: None)
    assert (rest.numel(), norm.numel()) == (0, 0)


# What it cannot serve.

R = Positions(torch.zeros(1, 4, 2))
LEARNED = torch.zeros(1, 1, 4, 4, requires_grad=True)
REFUSED: list[tuple[str, dict[str, Any], list[Term]]] = [
    ("it has no float64", {"dtype": torch.float64}, []),
    ("it serves head sizes up to 128, the query size is 129", {"size": 129}, []),
    ("it has no Polynomial term", {}, [Polynomial(torch.zeros(1, 2, 4, 2), R)]),
    ("it has no gradient of Table.bias", {}, [Table(LEARNED)]),
    (
        "the positions require a gradient",
        {},
        [Distance(torch.ones(2), Positions(torch.zeros(1, 4, 2, requires_grad=True)))],
    ),
    ("it serves 1 to 4 position dimensions, got 5", {}, [Distance(torch.ones(2), Positions(torch.zeros(1, 4, 5)))]),
    (
        "it takes one Quadratic or Distance and one Table at most, got Distance + Distance",
        {},
        [Distance(torch.ones(2), R), Distance(torch.ones(2), R)],
    ),
]


def refusal(size: int, dtype: torch.dtype, terms: list[Term], grad: bool) -> str | None:
    q = torch.zeros(1, 2, 4, size, dtype=dtype)
    with torch.set_grad_enabled(grad):
        return KERNELS["triton"].reason_against(Call(q, q, q, tuple(terms), None, 1.0))


@pytest.mark.parametrize(("reason", "options", "terms"), REFUSED, ids=[reason for reason, _, _ in REFUSED])
def test_refusals(interpreter: Callable[..., Any], reason: str, options: dict[str, Any], terms: list[Term]) -> None:
    arguments = {"size": 8, "dtype": torch.float32} | options
    assert interpreter(refusal, arguments["size"], arguments["dtype"], terms, True) == reason


def test_fixed_tables_are_served(interpreter: Callable[..., Any]) -> None:
    assert interpreter(refusal, 8, torch.float32, [Table(LEARNED)], False) is None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets here")
def test_processors_are_refused() -> None:
    q = torch.zeros(1, 2, 4, 8)
    assert KERNELS["triton"].reason_against(Call(q, q, q, (), None, 1.0)) == "it runs on GPUs, q is on cpu"


def test_import_does_not_load_triton() -> None:
    code = "import sys, parapos.attention.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
