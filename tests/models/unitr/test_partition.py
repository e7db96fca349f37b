"""Windows and sets against loops, on random tokens and at the sizes of the paper."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from parapos.models.unitr.partition import join, partition, windows


def naive(cells, group, side, shift, size, major):
    """Sets by the definition, window after window, as lists of tokens with repetitions."""
    members = {}
    for token, ((x, y), g) in enumerate(zip(cells.tolist(), group.tolist(), strict=True)):
        wx, wy = (x + shift) // side, (y + shift) // side
        members.setdefault((g, wx, wy), []).append(((y, x) if major == "y" else (x, y), token))
    found = []
    for key in sorted(members):
        ordered = [token for _, token in sorted(members[key], key=lambda pair: pair[0])]  # sorted is stable
        n, s = len(ordered), -(-len(ordered) // size)
        found += [[ordered[(k * size + t) * n // (s * size)] for t in range(size)] for k in range(s)]
    return found


@st.composite
def tokens(draw):
    count, extent = draw(st.integers(0, 120)), draw(st.integers(1, 20))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    cells = torch.randint(extent, (count, 2), generator=g)
    return cells, torch.randint(3, (count,), generator=g)


@given(tokens(), st.integers(1, 7), st.integers(0, 3), st.integers(1, 9), st.sampled_from("xy"))
def test_sets_are_those_of_a_loop(drawn, side, shift, size, major):
    cells, group = drawn
    found = partition(cells, group, side=side, shift=min(shift, side - 1), size=size, major=major)
    assert found.tokens.tolist() == naive(cells, group, side, min(shift, side - 1), size, major)
    for row, mask in zip(found.tokens.tolist(), found.mask.tolist(), strict=True):
        assert mask == [t == 0 or row[t] != row[t - 1] for t in range(size)]
    belongs = found.tokens[found.mask]
    assert sorted(belongs.tolist()) == list(range(len(cells)))  # each token once
    assert found.tokens.flatten()[found.slot].tolist() == list(range(len(cells)))
    assert found.mask.flatten()[found.slot].all()


@given(tokens(), st.integers(0, 5))
def test_a_set_stays_in_its_window_and_knows_its_positions(drawn, shift):
    cells, group = drawn
    found = partition(cells, group, side=6, shift=shift, size=4, major="x", scale=2.0)
    window = torch.cat([(cells + shift) // 6, group[:, None]], 1)
    assert (window[found.tokens] == window[found.tokens][:, :1]).all()
    apart = found.in_sets.r[:, :, None] - found.in_sets.r[:, None]
    assert torch.equal(apart, 2.0 * (cells[found.tokens][:, :, None] - cells[found.tokens][:, None]).float())
    inside = found.positions.r[0] / 2
    assert ((inside >= -3) & (inside < 3)).all()


def grid(rows, cols):
    return torch.cartesian_prod(torch.arange(rows), torch.arange(cols))


def test_sizes_of_the_paper():
    image, bev = grid(32, 88), grid(360, 360)
    for cells, shift, sets, count in ((image, 0, 33, 6), (image, 15, 34, 8), (bev, 0, 1440, 144), (bev, 15, 1442, 169)):
        group = torch.zeros(len(cells), dtype=torch.int64)
        assert len(windows(cells, group, 30, shift, "y").counts) == count
        assert len(partition(cells, group, side=30, shift=shift, size=90, major="y").tokens) == sets
    counts = windows(image, torch.zeros(len(image), dtype=torch.int64), 30, 0, "y").counts
    assert sorted(counts.tolist()) == [56, 60, 60, 840, 900, 900]


def test_any_number_of_tokens_in_one_cell():
    cells = torch.zeros(30_001, 2, dtype=torch.int64)
    found = partition(cells, cells[:, 0], side=30, shift=15, size=90, major="x")
    assert len(found.tokens) == -(-30_001 // 90)
    assert torch.equal(found.tokens[found.mask], torch.arange(30_001))  # ties keep their order


def test_joined_partitions_are_both():
    first, second = (grid(5, 7), grid(9, 4))
    parts = [partition(c, c[:, 0] * 0, side=4, shift=1, size=6, major="y") for c in (first, second)]
    both = join(*parts)
    assert both.tokens.tolist() == parts[0].tokens.tolist() + (parts[1].tokens + 35).tolist()
    assert both.tokens.flatten()[both.slot].tolist() == list(range(35 + 36))
    assert torch.equal(both.positions.r, torch.cat([part.positions.r for part in parts], 1))
