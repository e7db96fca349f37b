"""nD-sincos by an explicit loop over channels, and no encoding at all."""

import math

import pytest
import torch

from parapos import create_encoding, grid_positions


def by_loops(dim, p, position, base=10000.0):
    """One token's vector: p blocks, the last takes the remainder; in each block all sines, then all cosines."""
    out = []
    for u in range(p):
        n = dim // p + (dim % p if u == p - 1 else 0)
        out += [math.sin(position[u] / base ** (i / n)) for i in range(0, n, 2)]
        out += [math.cos(position[u] / base ** ((i - 1) / n)) for i in range(1, n, 2)]
    return out


def sincos(dim, p, **options):
    return create_encoding("sincos", dim=dim, heads=1, head_dim=4, pos_dim=p, **options)


@pytest.mark.parametrize(("dim", "p"), [(768, 2), (768, 3), (8, 1), (7, 1), (10, 3), (11, 3), (13, 4), (8, 4), (26, 4)])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_layout(dim, p, base):
    r = torch.randn(5, p, dtype=torch.float64) * 30
    x = torch.randn(2, 5, dim, dtype=torch.float64)
    want = torch.tensor([by_loops(dim, p, row.tolist(), base) for row in r], dtype=torch.float64)
    assert want.shape == (5, dim)
    torch.testing.assert_close(sincos(dim, p, base=base).add(x, r) - x, want.expand(2, -1, -1), rtol=1e-12, atol=1e-12)


def test_blocks_of_the_standard_width():
    """768 channels: 192 sines and 192 cosines for x, the same for y; three dimensions have 128 and 128 each."""
    table = sincos(768, 2).add(torch.zeros(1, 1, 768), torch.tensor([[math.pi / 2, 0.0]]))[0, 0]
    assert table[0] == 1  # sin(x) with divisor 1
    assert table[192].abs() < 1e-6  # cos(x) with divisor 1
    assert table[384:576].eq(0).all()  # sines of y
    assert table[576:].eq(1).all()  # cosines of y
    assert sincos(768, 3).add(torch.zeros(1, 1, 768), torch.zeros(1, 3))[0, 0].view(6, 128)[0::2].eq(0).all()


def test_remainder_block_has_one_more_sine():
    """dim 7 in one dimension: 4 sines, 3 cosines; dim 11 in three: the last block takes 5."""
    at_origin = sincos(7, 1).add(torch.zeros(1, 1, 7), torch.zeros(1, 1))[0, 0]
    assert at_origin.tolist() == [0, 0, 0, 0, 1, 1, 1]
    at_origin = sincos(11, 3).add(torch.zeros(1, 1, 11), torch.zeros(1, 3))[0, 0]
    assert at_origin.tolist() == [0, 0, 1] * 2 + [0, 0, 0, 1, 1]


def test_class_token():
    x = torch.zeros(1, 5, 8)
    at_origin = sincos(8, 2).add(x, grid_positions(2, 2, cls=True))[0, 0]
    assert at_origin.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert sincos(8, 2).add(x, grid_positions(2, 2, cls="unplaced"))[0, 0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_far_positions_are_rounded_once(dtype):
    r = torch.tensor([[123457.0, 54321.0]])
    want = torch.tensor(by_loops(16, 2, r[0].tolist()), dtype=torch.float64).to(dtype)
    found = sincos(16, 2).to(dtype).add(torch.zeros(1, 1, 16, dtype=dtype), r)[0, 0]
    torch.testing.assert_close(found, want, rtol=torch.finfo(dtype).eps, atol=1e-9)


@pytest.mark.parametrize("name", ["sincos", "none"])
def test_attention_itself_is_left_alone(name):
    encoding = create_encoding(name, dim=8, heads=2, head_dim=4, pos_dim=2)
    assert list(encoding.parameters()) == []
    assert encoding.state_dict() == {}
    q, k = torch.randn(2, 1, 2, 5, 4)
    x, r = torch.randn(1, 5, 8), torch.randn(5, 2)
    q2, k2, terms = encoding(x, q, k, r)
    assert q2 is q
    assert k2 is k
    assert terms == ()
    assert (encoding.add(x, r) is x) == (name == "none")


@pytest.mark.parametrize(
    ("options", "word"), [({"base": 0}, "base"), ({"base": -1.0}, "base"), ({"dim": 3}, "dim.*4.*3")]
)
def test_bad_options(options, word):
    with pytest.raises(ValueError, match=word):
        sincos(**{"dim": 8, "p": 2, **options})
