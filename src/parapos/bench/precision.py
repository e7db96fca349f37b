"""How many digits each form of PaPE's scores keeps, against float64.

A layer of ViT-B at its initialisation (width 768, 12 heads of 64, 50 parabolas) on a grid of G x G patches with a
class token at (0, 0), tokens from N(0, 1). Every form is fed the same W_a x, W_b x, q and k, rounded to the type under
test; so is the float64 reference. Columns are made in float32, rounded, and multiplied in float32, and so are q and k;
the two products are added. "3x" triples a and b, as training may.
H heads, N keys, n sampled queries, h head size, e extra columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import text
from ..attention.columns import columns, make_columns
from ..attention.terms import Quadratic
from ..encodings import create_encoding, published
from ..encodings.parabolic import PaPE, PaPERI
from ..positions import Positions, grid_positions
from ..relative import contract, key_features

DIM, HEADS, HEAD_DIM, PARABOLAS = 768, 12, 64, 50
RANDOM_QUERIES = 155  # with four corners and the class token 160 per head
MAX_GRID = 256
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ENCODINGS = ("pape", "pape_ri")
SETTINGS = {"init": 1.0, "3x": 3.0}


@dataclass(frozen=True)
class Row:
    """One form in one setting, the worst over heads and sampled queries.

    dims: extra columns per head. logit_error: max |error| of a logit, scale included, with the best constant per query
    removed, since softmax does not see it. tv: largest total-variation distance between true and computed attention.
    overflowed: share of queries with a logit that is not finite; the errors are those of the other queries.
    """

    setting: str
    form: str
    dims: int
    logit_error: float
    tv: float
    overflowed: float


def experiment(
    *,
    grid: int = 64,
    dtype: str = "bf16",
    encoding: str = "pape",
    settings: Sequence[str] = tuple(SETTINGS),
    seed: int = 0,
) -> list[Row]:
    """Every form in every setting. dtype: fp16, bf16 or fp32; encoding: pape or pape_ri; grid: 2 to 256."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = list(_heads(encoding, grid, DTYPES[dtype]))
        return [row for setting in settings for row in _rows(heads, setting, DTYPES[dtype])]


@dataclass(frozen=True)
class _Head:
    """One head: W_a x, W_b x (1, 1, N, m), W_p (1, m, p), r (1, N, p), q and k (N, h), sampled queries (n,)."""

    a: Tensor
    b: Tensor
    w_p: Tensor
    r: Tensor
    q: Tensor
    k: Tensor
    rows: Tensor
    isotropic: bool

    def coefficients(self, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """a, b and W_p in `dtype`, from the rounded projections."""
        return -factor * F.softplus(self.a.to(dtype)), factor * self.b.to(dtype), self.w_p.to(dtype)

    def term(self, factor: float, dtype: torch.dtype) -> Quadratic:
        M, g = published.collapse(*self.coefficients(factor, dtype))
        r = Positions(self.r.to(dtype), unplaced=False)
        return Quadratic(M[..., 0, 0], None, r) if self.isotropic else Quadratic(M, g, r)

    def scores(self, factor: float, dtype: torch.dtype) -> Tensor:
        """The definition, D^T M D + g.D, of the sampled queries: (n, N)."""
        term = self.term(factor, dtype)
        M, g = (None if x is None else x[:, :, self.rows] for x in (term.M, term.g))
        return Quadratic(M, g, Positions(term.r.r[:, self.rows]), term.r).scores(dtype)[0, 0]


def _heads(encoding: str, grid: int, dtype: torch.dtype) -> Iterator[_Head]:
    options = {"parabolas": PARABOLAS} if encoding == "pape" else {}
    enc = create_encoding(encoding, dim=DIM, heads=HEADS, head_dim=HEAD_DIM, pos_dim=2, **options)
    assert isinstance(enc, (PaPE, PaPERI))
    r = grid_positions(grid, grid, cls=True)[None]
    n = r.shape[1]
    x = torch.randn(1, n, DIM)
    a, b = (y.to(dtype) for y in published.preactivations(enc, x))
    w_p = published.projection(enc)
    corners = torch.tensor([0, 1, grid, n - grid, n - 1])  # the class token, then the corners
    for i in range(HEADS):
        w = torch.empty(2, HEAD_DIM, DIM).uniform_(-(DIM**-0.5), DIM**-0.5)
        q, k = x @ w.mT
        rows = torch.cat([corners, torch.randint(n, (RANDOM_QUERIES,))])
        one = slice(i, i + 1)
        yield _Head(a[:, one], b[:, one], w_p[one], r, q, k, rows, isinstance(enc, PaPERI))


def _columns(head: _Head, factor: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, query and key columns (1, 1, N, e), (1, 1 or none, N, e) of every separable form. Ours stay in float32."""
    a, b, w_p = head.coefficients(factor, torch.float32)
    query, key = published.paper(a, b, w_p, head.r)
    yield "paper", query.to(dtype), key.to(dtype)
    if not head.isotropic:  # what autocast rounds there is not known; here it is W_p r. The sign of b is its own.
        query, key = published.released(-a, -b, w_p, head.r, rounded=dtype)
        yield "released", query.to(dtype), key.to(dtype)
    term = head.term(factor, torch.float32)
    c = term.coefficients(torch.float32)
    minimal = make_columns(term, key_features(term.exponents, with_constant=False))
    yield "centred minimal", contract(c, minimal.T).to(dtype), minimal.phi.to(dtype)
    made = columns(term)  # with the constant of keys that have a position
    yield "parapos", contract(c, made.T), made.phi


def _logits(head: _Head, factor: float, dtype: torch.dtype) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Name, extra columns, computed and true logits (n, N) of every form."""
    scale = HEAD_DIM**-0.5
    q, k = head.q.to(dtype)[head.rows], head.k.to(dtype)
    product = q.float() @ k.float().T
    yield "q.k alone", 0, product * scale, head.q[head.rows].double() @ head.k.double().T * scale
    true = (head.scores(factor, torch.float64) + q.double() @ k.double().T) * scale
    for name, query, key in _columns(head, factor, dtype):
        query, key = query[0, 0, head.rows], key.flatten(0, -2)  # (n, e), (N, e)
        yield name, query.shape[-1], (query.float() @ key.float().T + product) * scale, true
    yield "from D, float32", 0, (head.scores(factor, torch.float32) + product) * scale, true


def _rows(heads: Sequence[_Head], setting: str, dtype: torch.dtype) -> list[Row]:
    """The worst of all queries of all heads; NaN where no query survived, as there is nothing to be judged."""
    judged: dict[tuple[str, int], list[Tensor]] = {}  # (3, n) of a head: errors, distances, whether finite
    for head in heads:
        for name, dims, got, true in _logits(head, SETTINGS[setting], dtype):
            error, tv = got.double() - true, (got.double().softmax(-1) - true.softmax(-1)).abs().sum(-1) / 2
            spread, finite = (error.amax(-1) - error.amin(-1)) / 2, got.isfinite().all(-1)
            judged.setdefault((name, dims), []).append(torch.stack([spread, tv, finite.double()]))
    rows = []
    for (name, dims), parts in judged.items():
        spread, tv, finite = torch.cat(parts, 1)
        logit, distance = (x[finite > 0].max().item() if finite.any() else math.nan for x in (spread, tv))
        rows.append(Row(setting, name, dims, logit, distance, 1 - finite.mean().item()))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as an aligned table."""
    header = ("form", "setting", "extra dims", "logit error", "TV distance", "overflowed")
    cells = [
        (r.form, r.setting, str(r.dims), f"{r.logit_error:.1e}", f"{r.tv:.1e}", f"{r.overflowed:.1%}") for r in rows
    ]
    return text.table(header, cells, left=2)
