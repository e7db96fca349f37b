"""Coordinate conventions, the checks on positions, and centring."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parapos import Positions, event_positions, grid_positions, point_positions, tubelet_positions
from parapos.positions import centre, placed

NAN = float("nan")


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 2), (2, 3), (14, 14), (7, 13), (1, 5)])
@pytest.mark.parametrize("cls", [False, True, "unplaced"])
def test_grids_are_x_y_from_one_row_major(rows, cols, cls):
    want = [(x, y) for y in range(1, rows + 1) for x in range(1, cols + 1)]
    first = {False: [], True: [(0.0, 0.0)], "unplaced": [(NAN, NAN)]}[cls]
    r = grid_positions(rows, cols, cls=cls)
    assert r.dtype == torch.float32
    torch.testing.assert_close(r, torch.tensor(first + want, dtype=torch.float32), rtol=0, atol=0, equal_nan=True)


def test_interpolation_scales_patches_and_leaves_the_class_token():
    r = grid_positions(28, 28, cls=True, scale=0.5)
    assert r[0].tolist() == [0, 0]
    assert r[1].tolist() == [0.5, 0.5]
    assert r.max() == 14
    assert grid_positions(2, 2, cls="unplaced", scale=0.5)[0].isnan().all()


def test_tubelets_are_t_y_x():
    r = tubelet_positions(2, 3, 4, cls=True)
    want = [(0, 0, 0)] + [(t, y, x) for t in (1, 2) for y in (1, 2, 3) for x in (1, 2, 3, 4)]
    assert r.tolist() == [list(map(float, row)) for row in want]
    scaled = tubelet_positions(2, 3, 4, cls=True, scale=(2.0, 0.5, 0.25))
    assert torch.equal(scaled, r * torch.tensor([2.0, 0.5, 0.25]))


@pytest.mark.parametrize("clock", [torch.int64, torch.float64])
def test_event_times_keep_their_digits(clock):
    """Microsecond clocks of an hour, ten microseconds apart, in units of a millisecond."""
    t = 3_600_000_000 + 10 * torch.arange(50)
    x, y = torch.randint(0, 40, (2, 50))
    r = event_positions(x, y, t.to(clock), time_scale=1000)
    assert r.dtype == torch.float64
    assert torch.equal(r[:, :2], torch.stack([x, y], -1).double())
    torch.testing.assert_close(r[1:, 2] - r[:-1, 2], torch.full((49,), 0.01).double(), rtol=1e-6, atol=0)
    shifted = r - centre(r[None])[0][0]
    torch.testing.assert_close(shifted.float().diff(dim=0)[:, 2], torch.full((49,), 0.01), rtol=1e-4, atol=0)


def test_events_of_a_batch_with_a_class_token():
    x = torch.arange(6).view(2, 3)
    r = event_positions(x, x + 1, x * 1000, time_scale=500, cls=True)
    assert r.shape == (2, 4, 3)
    assert r[:, 0].eq(0).all()
    assert r[1, 2].tolist() == [4, 5, 8]


def test_points_count_in_units():
    points = torch.tensor([[[0.3, -0.6, 0.9]]], dtype=torch.float64)
    r = point_positions(points, unit=0.3, cls="unplaced")
    assert r.dtype == torch.float64
    assert point_positions(points.half(), unit=0.3).dtype == torch.float32
    assert r[0, 0].isnan().all()
    torch.testing.assert_close(r[0, 1], torch.tensor([1.0, -2.0, 3.0]).double())


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: grid_positions(0, 3), "rows"),
        (lambda: grid_positions(3, -1), "cols"),
        (lambda: tubelet_positions(0, 1, 1), "frames"),
        (lambda: grid_positions(2, 2, cls="origin"), "origin"),
        (lambda: grid_positions(2, 2, cls=None), "None"),
        (lambda: event_positions(torch.ones(3), torch.ones(3), torch.ones(2), time_scale=1), r"\(2,\)"),
        (lambda: event_positions(*torch.ones(3, 4), time_scale=0), "time_scale"),
        (lambda: point_positions(torch.ones(3)), r"\(3,\)"),
        (lambda: point_positions(torch.ones(3, 2), unit=-1.0), "unit"),
    ],
)
def test_bad_arguments_are_named(call, word):
    with pytest.raises(ValueError, match=word):
        call()


@pytest.mark.parametrize("flag", [1, 0, np.True_])
def test_a_truthy_class_token_is_never_taken_for_an_unplaced_one(flag):
    try:
        r = grid_positions(2, 2, cls=flag)
    except (TypeError, ValueError):
        return
    assert torch.equal(r, grid_positions(2, 2, cls=bool(flag)))


def test_positions_are_checked_once():
    r = torch.randn(5, 3)
    checked = Positions.of(r, 3)
    assert checked.r.shape == (1, 5, 3)
    assert checked.unplaced is False
    assert Positions.of(checked, 3) is checked
    assert Positions.of(r.expand(2, 5, 3)).r.shape == (2, 5, 3)
    r[2] = NAN
    assert Positions.of(r).unplaced is True
    assert placed(Positions.of(r).r).tolist() == [[True, True, False, True, True]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_become_float64(dtype):
    r = torch.tensor([[200, 1]], dtype=dtype)
    assert Positions.of(r).r.dtype == torch.float64
    assert Positions.of(r).unplaced is False
    large = torch.tensor([[2**40 + 1, 0]])
    assert Positions.of(large).r[0, 0, 0] == 2**40 + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.complex64])
def test_types_that_cannot_hold_positions_are_refused(dtype):
    with pytest.raises(TypeError, match=str(dtype)):
        Positions.of(torch.ones(4, 2).to(dtype))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (1, 1, 4, 2), (2, 4, 1)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=str(shape).strip("(),")):
        Positions.of(torch.ones(shape), 2)


def test_checked_positions_of_another_dimension_are_refused():
    with pytest.raises(ValueError, match=r"\(1, 4, 3\)"):
        Positions.of(Positions.of(torch.ones(4, 3)), 2)


def test_bad_values_are_named():
    r = torch.ones(3, 6, 2)
    r[2, 4, 1] = NAN
    with pytest.raises(ValueError, match=r"position 4 of sample 2 .*\[1\.0, nan\]"):
        Positions.of(r)
    for value in (float("inf"), -float("inf")):
        r[2, 4, 1] = value
        with pytest.raises(ValueError, match="inf"):
            Positions.of(r)


def differences(r):
    return r[:, None, :, :] - r[:, :, None, :]


dims, seeds = st.integers(1, 4), st.integers(0, 2**31)


@given(seeds, dims, st.integers(1, 9), st.integers(0, 20), st.sampled_from([torch.float32, torch.float64]))
def test_centring_integers_changes_no_difference(seed, p, n, bits, dtype):
    g = torch.Generator().manual_seed(seed)
    r = torch.randint(-(2**bits), 2**bits + 1, (2, n, p), generator=g).to(dtype)
    middle, reach = centre(r)
    assert middle.dtype == reach.dtype == torch.float64
    assert torch.equal(differences(r - middle), differences(r.double()))
    half = (r.amax(1) - r.amin(1)).amax(-1) / 2
    assert (reach.flatten() <= half + half.clamp(max=1) / 2).all()
    if half.min() >= 1:  # whole numbers stay whole
        assert (r - middle).frac().eq(0).all()


@given(seeds, dims, st.integers(1, 9), st.floats(-1e6, 1e6), st.floats(1e-3, 1e4))
def test_centring_reals(seed, p, n, shift, spread):
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(2, n, p, generator=g, dtype=torch.float64) * spread + shift
    middle, reach = centre(r)
    assert middle.shape == (2, 1, p)
    assert reach.shape == (2, 1, 1)
    shifted = r - middle
    assert torch.equal(reach.flatten(), shifted.abs().amax((1, 2)))
    rounding = 4 * torch.finfo(torch.float64).eps * r.abs().max()
    assert (differences(shifted) - differences(r)).abs().max() <= rounding
    half = (r.amax(1) - r.amin(1)).amax(-1) / 2
    assert (reach.flatten() <= half + half.clamp(max=1) / 2 + rounding).all()
    # Grids near the origin and far from it end up in the same place.
    grid = torch.randint(0, 50, (1, n, p), generator=g).float()
    assert torch.equal(grid - centre(grid)[0], grid + 2**20 - centre(grid + 2**20)[0])


@given(seeds, dims, st.integers(2, 9))
def test_hidden_and_unplaced_tokens_do_not_move_the_centre(seed, p, n):
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(3, n, p, generator=g) * 5
    mask = torch.rand(3, n, generator=g) < 0.7
    mask[:, 0] = True
    middle, reach = centre(Positions.of(r).hide(mask).r)
    wild = r.clone()
    wild[~mask] = 1e8
    for other in (Positions.of(wild).hide(mask).r, torch.where(mask[..., None], r, NAN)):
        for found, want in zip(centre(other), (middle, reach), strict=True):
            assert torch.equal(found, want)
    for b in range(3):  # one centre per sample, whatever the others hold
        assert torch.equal(centre(r[b : b + 1, mask[b]])[0], middle[b : b + 1])


def test_shared_positions_are_centred_per_mask():
    mask = torch.arange(9) < torch.tensor([[9], [3]])
    middle, reach = centre(Positions.of(grid_positions(1, 9)).hide(mask).r)
    assert middle[:, 0, 0].tolist() == [5, 2]
    assert reach.flatten().tolist() == [4, 1]


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e6, 1e9, -1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 3])
def test_tokens_in_one_place_are_their_own_centre(value, dtype, n):
    r = torch.full((1, n, 2), value, dtype=dtype)
    middle, reach = centre(r)
    assert (r - middle).eq(0).all()
    assert reach.eq(0).all()


@pytest.mark.parametrize("shift", [1e5, 1e7, 1e9])
def test_huge_shifts_stay_finite_and_close(shift):
    r = torch.tensor([[[0.0], [64.0], [128.0]]]) + shift
    middle, reach = centre(r)
    assert torch.equal(differences(r - middle), differences(r.double()))
    assert reach.item() == pytest.approx(64, abs=32)


def test_no_token_with_a_position():
    for r in (torch.full((1, 3, 2), NAN), Positions.of(torch.ones(3, 2)).hide(torch.zeros(1, 3, dtype=torch.bool)).r):
        middle, reach = centre(r)
        assert middle.eq(0).all()
        assert reach.eq(0).all()


def test_what_is_made_once_is_made_once():
    made, positions = [], Positions.of(torch.ones(3, 2))
    for key, want in ((("a", 1), 1), (("a", 1), 1), (("b", 1), 2), (("a", 1), 1), (("a", 2), 3), (("a", 1), 4)):
        assert positions.once(key, lambda: made.append(1) or len(made)) == want  # of each kind the last is kept
    assert Positions.of(positions.r).once(("a", 1), lambda: "anew") == "anew"


def test_hiding_is_done_once_for_a_mask():
    positions, mask = Positions.of(grid_positions(2, 3)), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    hidden = positions.hide(mask)
    assert positions.hide(mask) is hidden
    assert torch.equal(placed(hidden.r), mask)
    assert positions.hide(mask.clone()) is not hidden  # it may hold other numbers
    hidden = positions.hide(mask)
    mask[0, 0] = False
    again = positions.hide(mask)
    assert again is not hidden
    assert torch.equal(placed(again.r), mask)
    assert placed(positions.r).all()


def test_hiding_under_inference_mode_follows_the_mask():
    """Tensors made there have no version, so nothing can be kept for them."""
    positions = Positions.of(grid_positions(2, 3))
    with torch.inference_mode():
        mask = torch.ones(1, 6, dtype=torch.bool)
        assert placed(positions.hide(mask).r).all()
        mask[0, 2] = False
        assert torch.equal(placed(positions.hide(mask).r), mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gathered_tokens(dtype):
    r = torch.randn(2, 5, 3)
    index = torch.tensor([[[0, 4], [3, 3], [1, -1]], [[2, 1], [0, -1], [-1, -1]]], dtype=dtype)
    windows = Positions.of(r).gather(index).r
    assert windows.shape == (6, 2, 3)
    for b in range(2):
        for w in range(3):
            for k, i in enumerate(index[b, w].tolist()):
                found = windows[3 * b + w, k]
                assert found.isnan().all() if i < 0 else torch.equal(found, r[b, i])
    assert torch.equal(Positions.of(r).gather(index[:, 0]).r, windows[[0, 3]])  # (B, K)
    assert torch.equal(Positions.of(r[0]).gather(index[0, :2]).r, windows[:2])  # windows (W, K) of one sample
    shared = Positions.of(r[0]).gather(index[:, :1])  # samples share positions, and each has its own index
    assert torch.equal(shared.r, r[0][index[:, 0].long()])


def test_gathered_padding_has_no_position_and_says_so():
    positions = Positions.of(torch.randn(4, 2))
    assert positions.gather(torch.tensor([[0, -1]])).unplaced is not False
    r = torch.randn(4, 2)
    r[1] = NAN
    assert Positions.of(r).gather(torch.tensor([[0, 1]])).unplaced is not False


@pytest.mark.parametrize(
    ("index", "word"),
    [
        (torch.zeros(3, dtype=torch.int64), r"\(3,\)"),
        (torch.zeros(1, 2, 3, 4, dtype=torch.int64), r"\(1, 2, 3, 4\)"),
        (torch.zeros(2, 3), "float32"),
        (torch.zeros(2, 3, dtype=torch.bool), "bool"),
        (torch.zeros(3, 4, dtype=torch.int64), r"2 samples.*\(3, 4\)"),
    ],
)
def test_bad_indices_are_named(index, word):
    with pytest.raises(ValueError, match=word):
        Positions.of(torch.zeros(2, 5, 2)).gather(index)


def test_sets_are_joined_one_after_another():
    a, b = Positions.of(torch.randn(2, 3, 2)), Positions.of(grid_positions(2, 2, cls="unplaced"))
    both = Positions.cat([a, b])
    assert both.r.shape == (2, 8, 2)
    torch.testing.assert_close(both.r, torch.cat([a.r, b.r.expand(2, -1, -1)], 1), equal_nan=True, rtol=0, atol=0)
    assert both.unplaced is True
    assert Positions.cat([a, a]).unplaced is False
    assert Positions.cat([a, Positions.unchecked(a.r)]).unplaced is None


def test_some_samples_and_tokens_are_taken():
    r = torch.randn(3, 5, 2)
    positions = Positions.of(r)
    assert torch.equal(positions.take(slice(1, 3), slice(2, 4)).r, r[1:3, 2:4])
    assert torch.equal(Positions.of(r[0]).take(slice(1, 3)).r, r[:1])  # shared by all samples
    assert positions.take(slice(0, 1)).unplaced is False
