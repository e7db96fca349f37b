"""nD-ALiBi's slopes and distances; LookHere's fields of view by an independent geometric definition."""

import math

import pytest
import torch

import parapos
from parapos import create_encoding, grid_positions

LOG2_SLOPES = {
    4: [-2, -4, -6, -8],
    6: [-2, -4, -6, -8, -1, -3],
    8: [-1, -2, -3, -4, -5, -6, -7, -8],
    12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
    16: [-0.5 * t for t in range(1, 17)],
}
GAZES = {  # where a head looks, as (dx, dy) with y downwards; it sees 45 degrees to either side
    "up-left": (-1, -1),
    "up-right": (1, -1),
    "down-left": (-1, 1),
    "down-right": (1, 1),
    "up": (0, -1),
    "down": (0, 1),
    "left": (-1, 0),
    "right": (1, 0),
}
CORNERS, SIDES = list(GAZES)[:4], list(GAZES)[4:]
OPEN = [(None, 1 / 4), (None, 1 / 16), (None, 1 / 64), (None, 1 / 256)]
HEADS = {
    12: [(gaze, 1 / 2) for gaze in CORNERS + SIDES] + OPEN,
    16: [(g, 1 / 2) for g in CORNERS] + [(g, 1 / 4) for g in CORNERS] + [(g, 1 / 2) for g in SIDES] + OPEN,
}


def encoding(name, heads=12, p=2, **options):
    return create_encoding(name, dim=8, heads=heads, head_dim=4, pos_dim=p, **options)


def scores(enc, r):
    """The bias (H, N, N) of one sample."""
    q = torch.zeros(1, enc.heads, r.shape[-2], 4)
    (term,) = enc(torch.zeros(1, r.shape[-2], 8), q, q, r)[2]
    assert not term.scaled
    return term.scores(torch.float32).expand(1, enc.heads, -1, -1)[0]


@pytest.mark.parametrize("heads", LOG2_SLOPES)
def test_alibi_slopes(heads):
    found = encoding("alibi", heads).slopes
    torch.testing.assert_close([math.log2(s) for s in found], [float(s) for s in LOG2_SLOPES[heads]])


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 24, 33])
def test_alibi_slopes_for_any_number_of_heads(heads):
    slopes = encoding("alibi", heads).slopes
    assert len(slopes) == len(set(slopes)) == heads
    assert all(0 < s < 1 for s in slopes)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_alibi_fades_with_distance_after_scaling(p):
    enc = encoding("alibi", 6, p)
    r = torch.randn(9, p)
    found = scores(enc, r)
    for head, slope in enumerate([2.0**s for s in LOG2_SLOPES[6]]):
        for i in range(9):
            for j in range(9):
                assert found[head, i, j].item() == pytest.approx(-slope * math.dist(r[i], r[j]), rel=1e-5, abs=1e-6)
    # With q = k = 0 attention is the softmax of the bias alone: it is not divided by sqrt(h).
    q, eye = torch.zeros(1, 6, 9, 4), torch.eye(9).expand(1, 6, 9, 9)
    _, _, terms = enc(torch.zeros(1, 9, 8), q, q, r)
    out = parapos.attend(q, q, eye, terms, scale=enc.scale)
    torch.testing.assert_close(out[0], found.softmax(-1))


def test_the_class_token_is_an_ordinary_token_for_alibi():
    found = scores(encoding("alibi"), grid_positions(3, 3, cls=True))
    assert found[0, 0, 9].item() == pytest.approx(-0.5 * math.hypot(3, 3))


def sees(gaze, dx, dy):
    """Within 45 degrees of the gaze, bounds included: cos^2 >= 1/2 on the right side, in integers."""
    if gaze is None or (dx, dy) == (0, 0):
        return True
    gx, gy = GAZES[gaze]
    along = dx * gx + dy * gy
    return along > 0 and 2 * along**2 >= (dx * dx + dy * dy) * (gx * gx + gy * gy)


def geometric(rows, cols, layout, scale=1.0, multiplier=3.0):
    """LookHere's bias (H, N, N) on a grid, by brute force."""
    places = [(x, y) for y in range(rows) for x in range(cols)]
    table = [
        [
            [
                -multiplier * slope * scale * math.hypot(x2 - x, y2 - y) if sees(gaze, x2 - x, y2 - y) else -math.inf
                for x2, y2 in places
            ]
            for x, y in places
        ]
        for gaze, slope in layout
    ]
    return torch.tensor(table)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("rows", "cols"), [(5, 5), (4, 7), (6, 3), (1, 4)])
@pytest.mark.parametrize("cls", [False, True, "unplaced"])
def test_lookhere_fields_of_view(heads, rows, cols, cls):
    found = scores(encoding("lookhere", heads), grid_positions(rows, cols, cls=cls))
    if cls:
        assert found[:, 0].eq(0).all()
        assert found[:, :, 0].eq(0).all()
        found = found[:, 1:, 1:]
    torch.testing.assert_close(found, geometric(rows, cols, HEADS[heads]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("side", [320, 384, 512, 640, 768, 896, 1024])
@pytest.mark.parametrize("cls", [True, "unplaced"])
def test_interpolation_leaves_the_fields_of_view_alone(side, cls):
    """Scaled positions round, and yet a key on the edge of a cone stays in it. Distances scale."""
    n, scale = 12, 224 / side
    found = scores(encoding("lookhere"), grid_positions(n, n, cls=cls, scale=scale))[:, 1:, 1:]
    want = geometric(n, n, HEADS[12], scale=scale)
    assert torch.equal(found.isinf(), want.isinf())
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [0.0, -1.0, 7.0])
def test_a_grid_without_class_token_has_none_wherever_it_starts(shift):
    """A grid from 0 has a token at the origin that is no class token."""
    found = scores(encoding("lookhere"), grid_positions(4, 5) + shift)
    torch.testing.assert_close(found, geometric(4, 5, HEADS[12]), rtol=1e-6, atol=0)


def test_each_sample_has_its_own_class_token():
    grids = torch.stack([grid_positions(2, 2, cls=True), torch.cat([grid_positions(2, 2), torch.full((1, 2), 5.0)])])
    q = torch.zeros(2, 12, 5, 4)
    (term,) = encoding("lookhere")(torch.zeros(2, 5, 8), q, q, grids)[2]
    zero = term.scores(torch.float32)[:, :, 0].eq(0).all(-1).all(-1)
    assert zero.tolist() == [True, False]


def test_layer_multipliers():
    depth, r = 5, grid_positions(1, 2)
    constant = [scores(encoding("lookhere", layer=l, depth=depth), r)[8, 0, 1].item() for l in range(depth)]
    linear = [
        scores(encoding("lookhere", layer=l, depth=depth, schedule="linear"), r)[8, 0, 1].item() for l in range(depth)
    ]
    assert constant == pytest.approx([-3 / 4] * 5)
    assert linear == pytest.approx([-m / 4 for m in (3.0, 2.5, 2.0, 1.5, 1.0)])
    assert encoding("lookhere", schedule="linear").multiplier == 3.0


@pytest.mark.parametrize("heads", [4, 6, 8])
def test_other_numbers_of_heads_need_directions(heads):
    with pytest.raises(ValueError, match=rf"12 or 16 heads, got {heads}.*directions"):
        encoding("lookhere", heads)


def test_explicit_directions():
    layout = [("up", 0.5), ("all", 0.125), ("down-right", 2.0)]
    found = scores(encoding("lookhere", 3, directions=layout), grid_positions(3, 4))
    want = geometric(3, 4, [(None if gaze == "all" else gaze, slope) for gaze, slope in layout])
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"heads": 2, "directions": [("up", 1.0)]}, "2 heads, got 1"),
        ({"heads": 1, "directions": [("north", 1.0)]}, "'north'"),
        ({"p": 1}, "pos_dim 2.*1"),
        ({"p": 3}, "pos_dim 2.*3"),
        ({"schedule": "cosine"}, "schedule.*cosine"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises(ValueError, match=word):
        encoding("lookhere", **options)


def test_a_class_token_that_sees_everything():
    assert encoding("lookhere").cls_token == "unplaced"
    assert encoding("alibi").cls_token is True
