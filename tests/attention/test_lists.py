"""Lists of tiles for Triton and FlexAttention: that they miss nothing, and that FlexAttention runs them.

Which tiles may be skipped is tested in test_sparse.py, the Triton kernel with lists in test_triton_lists.py.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from parapos.attention import Quadratic, flex, lists, sparse, tiles, tiling
from parapos.positions import Positions

from .criterion import assert_within_budget
from .strips import SIZE, by_reference, in_type, small_lists, strip
from .test_sparse import make
from .test_tiles import leaves_of

compiles = pytest.mark.skipif(flex._cpu_lacks() is not None, reason=str(flex._cpu_lacks()))


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
