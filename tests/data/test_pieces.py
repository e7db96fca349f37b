"""Clouds cut into pieces: every cell is one piece's own, pieces are small enough, and heights stay what they are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parapos.data import FormatError
from parapos.data.pieces import SHARE, Pieces, voxelize
from parapos.data.points import Cloud


def cloud(count, seed=0, extent=(9.0, 4.0, 2.0)):
    rng = np.random.default_rng(seed)
    coord = rng.random((count, 3)) * extent + [100.0, -50.0, 3.0]
    return Cloud(coord.astype(np.float32), segment=np.arange(count))


def test_one_point_of_each_cell():
    whole = cloud(500)
    voxels = voxelize(whole, 0.5, np.random.default_rng(0))
    cell = voxels.cloud.cell
    assert len(np.unique(cell, axis=0)) == len(cell) == len(voxels.index)
    assert (voxels.cloud.segment == voxels.index).all()
    low = np.floor(voxels.cloud.coord / 0.5)
    assert (low - low.min(0) == cell - cell.min(0)).all()
    members = np.floor((whole.coord - whole.coord.min(0)) / 0.5)
    for number in (0, len(cell) // 2):  # points of a cell lie within its side of the one that stands for it
        mine = voxels.inverse == number
        assert np.abs(whole.coord[mine] - whole.coord[voxels.index[number]]).max() <= 0.5001
    assert len(np.unique(voxels.inverse)) == len(cell) <= len(np.unique(members, axis=0)) * 8


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 400), most=st.integers(1, 150), seed=st.integers(0, 9))
def test_pieces(count, most, seed):
    voxels = voxelize(cloud(count, seed), 0.5, np.random.default_rng(0))
    pieces = Pieces(voxels, most)
    found = list(pieces)
    assert len(found) == len(pieces)
    own = np.concatenate([piece.index[: piece.count] for piece in found])
    assert np.array_equal(np.sort(own), np.arange(len(voxels.index)))
    for piece in found:
        assert len(np.unique(piece.index)) == len(piece.index) == len(piece.cloud) <= most
        assert len(piece.index) == most or len(pieces) == 1  # there is no room left
        assert (piece.cloud.segment == voxels.cloud.segment[piece.index]).all()
        shift = voxels.cloud.cell[piece.index] - piece.cloud.cell
        assert (shift == shift[0]).all()
        assert shift[0, 2] == 0  # height counts from the floor of the whole
        assert (piece.cloud.cell.min(0)[:2] == 0).all()
        assert np.allclose(piece.cloud.coord[:, 2], voxels.cloud.coord[piece.index, 2])


def test_what_comes_along_is_near():
    voxels = voxelize(cloud(3000), 0.25, np.random.default_rng(0))
    cell = voxels.cloud.cell[:, :2]
    for piece in Pieces(voxels, 600):
        own, others = cell[piece.index[: piece.count]], cell[piece.index[piece.count :]]
        assert SHARE / 2 * 600 <= len(own) <= SHARE * 600
        left = np.setdiff1d(np.arange(len(cell)), piece.index)
        low, high = own.min(0), own.max(0)
        outside = [np.maximum(low - part, part - high).max(1) for part in (others, cell[left])]
        assert outside[0].max() <= outside[1].min()


def test_a_cloud_larger_than_curves_count_is_cut():
    whole = cloud(2000, extent=(5000.0, 1.0, 1.0))
    voxels = voxelize(whole, 0.05, np.random.default_rng(0))  # 100,000 cells long
    for piece in Pieces(voxels, 500):
        assert piece.cloud.cell.max() < 2**16
    with pytest.raises(FormatError, match="cells apart in one piece, expected less than 65536"):
        list(Pieces(voxels, 10_000))
    with pytest.raises(FormatError, match="cells of 1e-05 along an axis"):
        voxelize(whole, 1e-5, np.random.default_rng(0))


def test_one_point():
    one = Cloud(np.ones((1, 3), np.float32))
    (piece,) = Pieces(voxelize(one, 0.1, np.random.default_rng(0)), 5)
    assert (piece.count, piece.cloud.coord.tolist()) == (1, [[0, 0, 0]])
    assert replace(piece.cloud, cell=None).coord.shape == (1, 3)
